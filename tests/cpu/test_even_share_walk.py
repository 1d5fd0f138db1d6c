"""even_share_walk.cpp runs the device code that divides work evenly on the host."""

from __future__ import annotations

from pathlib import Path

from tests.cpu import host_program


@host_program.needs_compiler
def test_shares_meet_and_are_even(tmp_path: Path) -> None:
    host_program.copy_headers(tmp_path, "common/scan.cuh", "sched/even_share.cuh")
    defines = {"NUM_THREADS": 64, "CLUSTER_SIZE": 1, "SMEM_BYTES": 16, "CASES": 120}
    host_program.run("even_share_walk", tmp_path, defines)
