"""Several ranks that start on one empty store share the compilation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]

#: A rank: builds every kernel, and prints which of them it compiled and for how long its build ran.
_RANK = """
import json, sys, time
from pathlib import Path
from moe_fp8.errors import CompileError
from moe_fp8.jit.build import build
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec
cache, kernels, jobs, count, broken = sys.argv[1:]
specs = [spec(factor=factor) for factor in range(int(count))]
if int(broken):
    specs.insert(1, spec(num_threads=33))
store = KernelStore(cache, SourceTree(Path(kernels)))
print("ready", flush=True)
sys.stdin.readline()
started = time.monotonic()
try:
    report = build(specs, store, int(jobs), False)
    told = {"compiled": [row.key for row in report.rows if not row.cached], "held": len(report.rows)}
except CompileError as error:
    told = {"failed": error.log}
print(json.dumps({**told, "seconds": time.monotonic() - started}), flush=True)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels", "tiny")


def start(cache: Path, kernels: Path, jobs: int, count: int, broken: bool = False) -> subprocess.Popen[str]:
    """A rank that has imported everything and waits for the signal to build."""
    arguments = map(str, (cache, kernels, jobs, count, int(broken)))
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, *arguments],
        cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    return rank


def begin(*ranks: subprocess.Popen[str]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def told(rank: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = rank.communicate(timeout=120)
    assert rank.returncode == 0
    return dict(json.loads(out))


@pytest.mark.parametrize("jobs", [1, 2])
def test_ranks_share_the_work(tmp_path: Path, kernels: Path, jobs: int) -> None:
    count = 10
    alone = start(tmp_path / "alone", kernels, jobs, count)
    begin(alone)
    single = told(alone)["seconds"]
    ranks = [start(tmp_path / "shared", kernels, jobs, count) for _ in range(4)]
    begin(*ranks)
    reports = [told(rank) for rank in ranks]
    assert all(report["held"] == count for report in reports)
    compiled = [key for report in reports for key in report["compiled"]]
    assert len(compiled) == len(set(compiled)) == count, "a kernel was compiled twice, or never"
    # Four ranks of one core each finish as one builder does, but for what they wait to see published.
    assert max(report["seconds"] for report in reports) < 2 * single + 1.5


def test_a_killed_rank_holds_up_none(tmp_path: Path, kernels: Path) -> None:
    victim, survivor = (start(tmp_path / "cache", kernels, 2, 12) for _ in range(2))
    begin(victim)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*.kernel")) and time.monotonic() < deadline:
        time.sleep(0.01)
    begin(survivor)
    time.sleep(0.1)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert told(survivor)["held"] == 12
    store = KernelStore(tmp_path / "cache", SourceTree(kernels))
    assert all(store.get(store.key(spec(factor=factor))) for factor in range(12))


def test_every_rank_reports_a_kernel_that_does_not_compile(tmp_path: Path, kernels: Path) -> None:
    ranks = [start(tmp_path / "cache", kernels, 2, 4, broken=True) for _ in range(3)]
    begin(*ranks)
    for rank in ranks:
        assert "static assertion" in told(rank)["failed"]
