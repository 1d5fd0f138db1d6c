from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import moe_fp8
from moe_fp8 import jit
from moe_fp8.errors import ConfigError, JitMissError, ToolchainError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.runtime import JitCounters, KernelRuntime
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.settings import MissPolicy, Settings
from moe_fp8.specs import KernelSpec
from tests.cpu.jit_kernels import spec, write_kernels


class Loader:
    """A fake driver that records its loads."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int, int]] = []

    def __call__(self, artifact: Artifact, smem_bytes: int, num_threads: int) -> Any:
        time.sleep(0.01)
        self.loaded.append((artifact.key, smem_bytes, num_threads))
        return object()


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "cache", SourceTree(write_kernels(tmp_path / "kernels", "tiny")))


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def runtime(store: KernelStore, loader: Loader) -> KernelRuntime:
    return KernelRuntime(store, loader)


def test_equal_specs_share_one_kernel(runtime: KernelRuntime, loader: Loader, store: KernelStore) -> None:
    kernel = runtime.get_kernel(spec(smem_bytes=1024))
    for _ in range(100):
        # New objects reuse the addresses of dead objects: identity must never answer for another spec.
        assert runtime.get_kernel(spec(smem_bytes=1024)) is kernel
        assert runtime.get_kernel(spec(smem_bytes=2048)) is not kernel
    assert loader.loaded == [
        (store.key(spec(smem_bytes=1024)), 1024, 128),
        (store.key(spec(smem_bytes=2048)), 2048, 128),
    ]
    assert runtime.counters() == JitCounters(compiles=2, store_hits=0, loads=2, misses=0)


def test_store_hits_are_counted(runtime: KernelRuntime, store: KernelStore, loader: Loader) -> None:
    store.get_or_compile(spec())
    runtime.get_kernel(spec())
    assert runtime.counters() == JitCounters(compiles=0, store_hits=1, loads=1, misses=0)


def test_a_miss_without_a_compiler_still_tells_the_kernel(
    runtime: KernelRuntime, store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the key needs the compiler's version."""

    def missing(spec: KernelSpec) -> str:
        raise ToolchainError("no NVRTC")

    monkeypatch.setattr(store, "key", missing)
    runtime.freeze("strict")
    with pytest.raises(JitMissError, match=r"factor=3.*there is no compiler"):
        runtime.get_kernel(spec(factor=3))


def test_strict_freeze_raises_and_counts(runtime: KernelRuntime, store: KernelStore) -> None:
    known, unknown = spec(), spec(factor=3)
    kernel = runtime.get_kernel(known)
    runtime.freeze("strict")
    assert runtime.is_frozen()
    assert runtime.get_kernel(known) is kernel
    assert runtime.get_kernel(spec()) is kernel
    for misses in (1, 2):
        with pytest.raises(JitMissError, match="tiny") as caught:
            runtime.get_kernel(unknown)
        assert caught.value.spec == unknown
        assert caught.value.key == store.key(unknown)
        assert runtime.counters().misses == misses
    assert store.get(store.key(unknown)) is None
    runtime.unfreeze()
    runtime.get_kernel(unknown)
    assert runtime.counters() == JitCounters(compiles=2, store_hits=0, loads=2, misses=2)


@pytest.mark.parametrize(("mode", "warned"), [("warn", True), ("compile", False)])
def test_lenient_freeze_loads_and_counts(
    runtime: KernelRuntime, caplog: pytest.LogCaptureFixture, mode: Any, warned: bool
) -> None:
    runtime.freeze(mode)
    kernel = runtime.get_kernel(spec())
    assert runtime.get_kernel(spec()) is kernel
    assert runtime.counters() == JitCounters(compiles=1, store_hits=0, loads=1, misses=1)
    messages = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == warned


@pytest.mark.parametrize("miss", ["strict", "warn", "compile"])
def test_freeze_defaults_to_the_setting(
    runtime: KernelRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    miss: MissPolicy,
) -> None:
    chosen = Settings(None, False, False, 1, miss)
    monkeypatch.setattr("moe_fp8.jit.runtime.settings", lambda: chosen)
    runtime.freeze()
    with pytest.raises(JitMissError) if miss == "strict" else nullcontext():
        runtime.get_kernel(spec())
    assert ("was not loaded before freeze()" in caplog.text) == (miss == "warn")


def test_unknown_mode(runtime: KernelRuntime) -> None:
    with pytest.raises(ConfigError, match="strict"):
        runtime.freeze("lenient")  # type: ignore[arg-type]
    assert not runtime.is_frozen()


def test_preload_loads_all_and_misses_none(runtime: KernelRuntime, loader: Loader) -> None:
    specs = [spec(factor=factor) for factor in (2, 3, 4)]
    runtime.get_kernel(specs[0])
    runtime.freeze("strict")
    assert runtime.preload(iter([*specs, specs[1]]), jobs=2) == 2
    assert runtime.preload(specs) == 0
    assert len(loader.loaded) == 3
    assert all(runtime.is_loaded(each) for each in specs)
    for each in specs:
        runtime.get_kernel(each)
    assert runtime.counters() == JitCounters(compiles=3, store_hits=0, loads=3, misses=0)


def test_concurrent_requests_load_once(runtime: KernelRuntime, loader: Loader) -> None:
    kernels: list[Any] = []
    threads = [threading.Thread(target=lambda: kernels.append(runtime.get_kernel(spec()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1
    assert len(loader.loaded) == 1


@pytest.mark.parametrize("during", ["a load", "a look-up"])
def test_a_request_within_a_request_does_not_wait_for_itself(store: KernelStore, during: str) -> None:
    """A finalizer or a signal handler may ask for the same kernel in the same thread."""
    kernels: list[Any] = []

    def load(artifact: Artifact, smem_bytes: int, num_threads: int) -> Any:
        if during == "a load" and not kernels:
            kernels.append(object())
            kernels.append(asked.get_kernel(spec()))
        return object()

    def ask() -> None:
        with asked._lock if during == "a look-up" else nullcontext():
            kernels.append(asked.get_kernel(spec()))

    asked = KernelRuntime(store, load)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and asked.get_kernel(spec()) is kernels[-1]


def test_a_failed_load_can_be_tried_again(store: KernelStore, loader: Loader) -> None:
    failures = [RuntimeError("no memory")]

    def sometimes(artifact: Artifact, smem_bytes: int, num_threads: int) -> Any:
        if failures:
            raise failures.pop()
        return loader(artifact, smem_bytes, num_threads)

    runtime = KernelRuntime(store, sometimes)
    with pytest.raises(RuntimeError, match="no memory"):
        runtime.get_kernel(spec())
    runtime.get_kernel(spec())
    assert runtime.counters().loads == 1
    assert KernelRuntime(store).counters() == JitCounters()


def test_counters_of_each_op_and_of_all(runtime: KernelRuntime) -> None:
    runtime.get_kernel(spec())
    runtime.get_kernel(spec(factor=3))
    runtime.count_scale_conversion("another")
    counters = runtime.counters()
    assert counters == JitCounters(compiles=2, loads=2, scale_conversions=1)
    assert counters.by_op == {
        spec().name: JitCounters(compiles=2, loads=2),
        "another": JitCounters(scale_conversions=1),
    }
    runtime.count_scale_conversion("another")
    assert counters.by_op["another"].scale_conversions == 1  # a snapshot


def test_one_namespace_without_torch_or_cuda() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'cuda', 'cuda.bindings'): sys.modules[name] = None\n"
        "import moe_fp8\n"
        "moe_fp8.jit.freeze('warn')\n"
        "import moe_fp8.jit as jit\n"
        "assert jit is moe_fp8.jit and jit.is_frozen()\n"
        "jit.unfreeze()\n"
        "assert jit.counters().misses == 0 and jit.counters().by_op == {} and not jit.is_frozen()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert sorted(jit.__all__) == ["JitCounters", "MissPolicy", "counters", "freeze", "is_frozen", "unfreeze"]
    for name in (*jit.__all__, "counters_by_op", "implicit_scale_conversions"):
        assert not hasattr(moe_fp8, name), f"moe_fp8.{name}: the top level is for ops and errors"
