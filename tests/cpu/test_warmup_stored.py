"""A plan that was made before is read from the store, and only then."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_fp8.errors import ModelError
from moe_fp8.jit.store import KernelStore
from moe_fp8.warmup import Plan, PlanOptions, load_model, parse_shape, plan, stored
from moe_fp8.warmup.stored import stored_plan

CONFIGS = Path(__file__).parent.parent / "configs"
MODEL = load_model(CONFIGS / "deepseek_v32.json")
OPTIONS = PlanOptions(tp=8, ep=8, max_tokens=64, max_batch=4)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "cache")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were made and not read."""
    plans: list[Plan] = []

    def make(*arguments: object, **options: object) -> Plan:
        plans.append(plan(*arguments, **options))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(stored, "plan", make)
    return plans


def files(store: KernelStore) -> list[Path]:
    assert store.root is not None
    return sorted(store.root.glob("*.plan"))


def test_the_second_plan_is_read_and_equal(store: KernelStore, made: list[Plan]) -> None:
    first = stored_plan(MODEL, OPTIONS, store)
    assert stored_plan(MODEL, OPTIONS, KernelStore(store.root)) == first == plan(MODEL, OPTIONS)
    assert len(made) == 1 and len(files(store)) == 1


def test_other_contents_are_other_plans(
    store: KernelStore, made: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_plan(MODEL, OPTIONS, store)
    stored_plan(MODEL, replace(OPTIONS, max_batch=5), store)
    stored_plan(replace(MODEL, max_positions=4096), OPTIONS, store)
    extra = [parse_shape("dense:512:512")]
    for _ in range(2):
        assert stored_plan(MODEL, OPTIONS, store, extra=extra) == plan(MODEL, OPTIONS, extra=extra)
    monkeypatch.setattr(stored, "_sources", lambda: "other sources")
    stored_plan(MODEL, OPTIONS, store)
    assert len(made) == len(files(store)) == 5


def test_sources_that_are_no_files_keep_no_plan(
    store: KernelStore, made: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an archive no source can be digested, so a plan of another version would look the same."""
    monkeypatch.setattr(stored, "__file__", "/nowhere/moe_fp8.whl/moe_fp8/warmup/stored.py")
    stored._sources.cache_clear()
    for _ in range(2):
        stored_plan(MODEL, OPTIONS, store)
    stored._sources.cache_clear()
    assert len(made) == 2 and not files(store)


def test_what_decides_a_plan_is_digested() -> None:
    """Every module that planning imports is digested, but for parts that choose no kernel."""
    program = (
        "import sys, moe_fp8.warmup.planner\n"
        "print(*(name for name in sys.modules if name.startswith('moe_fp8.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    parts = {name.split(".")[1] for name in done.stdout.split()}
    digested = {part.removesuffix(".py") for part in stored._DECIDING}
    assert parts - digested == {"errors", "settings", "params", "jit", "kernels"} & parts


def test_every_table_and_source_is_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("heuristics/gemm", "warmup/models"):
        (tmp_path / part).mkdir(parents=True)
    for name in ("problems.py", "limits.py", "specs.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(stored, "__file__", str(tmp_path / "warmup" / "stored.py"))
    digests = set()
    for name in ("heuristics/gemm/table.json", "warmup/models/described.py", "limits.py"):
        for contents in ("1", "2"):
            (tmp_path / name).write_text(contents)
            stored._sources.cache_clear()
            digests.add(stored._sources())
    # A table's name is its device.
    table = tmp_path / "heuristics/gemm/table.json"
    table.rename(table.with_name("other.json"))
    stored._sources.cache_clear()
    digests.add(stored._sources())
    stored._sources.cache_clear()
    assert len(digests) == 7 and "" not in digests


@pytest.mark.parametrize("damage", [b"", b"\n", b"nothing", None])
def test_a_damaged_file_counts_as_absent(store: KernelStore, made: list[Plan], damage: bytes | None) -> None:
    whole = stored_plan(MODEL, OPTIONS, store)
    (file,) = files(store)
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    assert stored_plan(MODEL, OPTIONS, store) == whole
    assert len(made) == 2
    # The file was written again.
    assert stored_plan(MODEL, OPTIONS, store) == whole and len(made) == 2


def test_a_file_of_another_plan_counts_as_absent(store: KernelStore, made: list[Plan]) -> None:
    whole = stored_plan(MODEL, OPTIONS, store)
    (file,) = files(store)
    kept = file.read_bytes()
    file.unlink()
    stored_plan(MODEL, replace(OPTIONS, max_batch=5), store)
    (other,) = files(store)
    other.write_bytes(kept)
    assert stored_plan(MODEL, replace(OPTIONS, max_batch=5), store).options.max_batch == 5
    assert len(made) == 3 and stored_plan(MODEL, OPTIONS, store) == whole


def test_what_a_killed_process_left_of_a_plan_is_removed(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.root is not None

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            stored_plan(MODEL, OPTIONS, store)
    assert list(store.root.glob("*.tmp")) and not files(store)
    stored_plan(MODEL, OPTIONS, store)
    assert files(store) and not list(store.root.glob("*.tmp"))


def test_a_file_that_others_can_write_is_not_read(store: KernelStore, made: list[Plan]) -> None:
    stored_plan(MODEL, OPTIONS, store)
    (file,) = files(store)
    file.chmod(0o666)
    stored_plan(MODEL, OPTIONS, store)
    assert len(made) == 2


def test_a_store_in_memory_keeps_no_plan(made: list[Plan]) -> None:
    memory = KernelStore(None)
    assert stored_plan(MODEL, OPTIONS, memory) == stored_plan(MODEL, OPTIONS, memory)
    assert len(made) == 2


def test_a_stored_plan_is_strict_if_asked(store: KernelStore) -> None:
    uneven = load_model(CONFIGS / "qwen3_30b.json")
    options = PlanOptions(tp=4, max_tokens=8, max_batch=1)
    for _ in range(2):
        assert stored_plan(uneven, options, store).lacking
        with pytest.raises(ModelError, match="strict"):
            stored_plan(uneven, options, store, strict=True)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: the objects of other tests would be searched, which takes half a second."""
    gc.disable()
    yield
    gc.enable()


def test_reading_is_much_faster_than_planning(store: KernelStore, no_collection: None) -> None:
    large = replace(OPTIONS, max_tokens=16384, max_batch=256)
    started = time.process_time()
    stored_plan(MODEL, large, store)
    made_in = time.process_time() - started
    started = time.process_time()
    stored_plan(MODEL, large, store)
    assert time.process_time() - started < made_in / 3
