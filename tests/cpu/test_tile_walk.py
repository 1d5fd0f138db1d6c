"""tile_walk.cpp runs the device code that divides a grouped GEMM into tiles on the host."""

from __future__ import annotations

from pathlib import Path

from tests.cpu import host_program


@host_program.needs_compiler
def test_every_row_is_stored_once_under_its_expert_with_its_range_of_k(tmp_path: Path) -> None:
    host_program.copy_headers(tmp_path, "sched/divisor.cuh", "sched/segments.cuh", "sched/tile_walk.cuh")
    host_program.run("tile_walk", tmp_path, {"NUM_THREADS": 32, "CLUSTER_SIZE": 1, "SMEM_BYTES": 16})
