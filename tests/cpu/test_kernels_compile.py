"""Every kernel that a call can reach compiles for sm_90a without a GPU, and keeps its values in registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_fp8.jit.build import BuildReport
from tests.reachable_kernels import ReachableKernels

#: Register file of one SM, in 32-bit registers; one block may use at most this number.
REGISTER_FILE = 65_536


@pytest.fixture(scope="module")
def report(reachable_kernels: ReachableKernels) -> BuildReport:
    return reachable_kernels.report


def test_all_compile(report: BuildReport) -> None:
    names = {row.spec.name for row in report.rows}
    assert names == {path.stem for path in Path(_kernels()).glob("*.cuh")}, (
        "an entry file that no problem reaches"
    )
    assert report.compiled == len(report.rows) > 0
    assert len({row.key for row in report.rows}) == len(report.rows)


def test_none_spills(report: BuildReport) -> None:
    spilling = [
        f"{row.spec}: {row.spill_bytes} B spilled, {row.local_bytes} B local"
        for row in report.rows
        if row.spill_bytes or row.local_bytes
    ]
    assert not spilling, "\n".join(spilling)


def test_none_warns(report: BuildReport) -> None:
    warnings = [f"{row.spec}: {warning}" for row in report.rows for warning in row.warnings]
    assert not warnings, "\n".join(warnings)


def test_each_fits_one_multiprocessor(report: BuildReport) -> None:
    too_large = [
        f"{row.spec}: {row.registers} x {row.spec.num_threads}"
        for row in report.rows
        if row.registers * row.spec.num_threads > REGISTER_FILE
    ]
    assert not too_large, "\n".join(too_large)


def test_register_files_are_handed_round_whole(report: BuildReport) -> None:
    # One warpgroup gives registers back and others wait for them. They would wait in vain if the block did
    # not get all registers.
    rows = [row for row in report.rows if row.spec.name in ("mqa_logits_fp8", "paged_mqa_logits_fp8")]
    assert rows
    assert {row.registers * row.spec.num_threads for row in rows} == {REGISTER_FILE}


def _kernels() -> Path:
    import moe_fp8.kernels

    return Path(moe_fp8.kernels.__path__[0])
