"""Options and fixtures of all tests."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# On some CPUs the last bits of MKL's products depend on the number of rows, so a request beside others might
# get another token. In this mode they do not. MKL reads the variable when torch is loaded.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, rather than skip, the tests in tests/gpu where there is no Hopper GPU",
    )
    parser.addoption(
        "--peer",
        type=Path,
        metavar="FOLDER",
        help="a folder with deep_gemm/ or deep_gemm.zip, DeepGEMM's package, which some tests compare with",
    )
    parser.addoption(
        "--repetition-seconds",
        type=float,
        help="how long tests/gpu/test_repetition.py calls each case (default: that of the benchmarks' class)",
    )
    parser.addoption(
        "--repetition-seed",
        type=int,
        default=0,
        help="what its inputs and its memory traffic are drawn from (default: 0)",
    )
    parser.addoption(
        "--screenshots",
        type=Path,
        metavar="FOLDER",
        help="where tests/cpu/test_server_page_browser.py writes its pictures of the page (default: nowhere)",
    )


@pytest.hookimpl(tryfirst=True)  # before the hook of xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--dist loadgroup` keeps the tests of a file together, and those that share what is slow to make."""
    for item in items:
        group = item.nodeid.partition("::")[0]
        if "reachable_kernels" in getattr(item, "fixturenames", ()):
            group = "reachable_kernels"
        elif item.path.parent.name == "engines":
            group = "engines"  # The first of them downloads the engines' sources.
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="session")
def _usual_umask() -> Iterator[None]:
    """Folders that tests make are not for a group to write, since no store and no bundle may be there."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers in every order of the tests, even if it sets no seed."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def checked_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Ops also check contents, as with MOE_FP8_CHECKED=1; returns the folder of the replay files."""
    from moe_fp8.ops import examine, registry
    from moe_fp8.settings import settings

    on = dataclasses.replace(settings(), checked=True, checked_dir=tmp_path / "replay")
    monkeypatch.setattr(registry, "settings", lambda: on)
    monkeypatch.setattr(examine, "settings", lambda: on)
    return tmp_path / "replay"


@pytest.fixture
def put_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """put_table(rows, device="h200") replaces the package's tables of measured tiles.

    Without rows it writes no table.
    """
    from moe_fp8.heuristics import gemm
    from moe_fp8.heuristics.gemm import table as gemm_table

    def forget() -> None:
        for cached in (gemm_table.devices, gemm_table._table, gemm._config):
            cached.cache_clear()

    def put(rows: Sequence[dict[str, Any]], device: str = "h200") -> None:
        if rows:
            (tmp_path / f"{device}.json").write_text(json.dumps({"rows": list(rows)}))
        forget()

    monkeypatch.setattr(gemm_table, "_FOLDER", tmp_path)
    yield put
    monkeypatch.undo()
    forget()
