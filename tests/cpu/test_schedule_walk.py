"""schedule_walk.cpp runs the kernel of paged_mqa_logits_metadata on the host, with small CTAs."""

from __future__ import annotations

from pathlib import Path

from moe_fp8.heuristics import PAGED_CHUNK
from tests.cpu import host_program


@host_program.needs_compiler
def test_the_kernel_deals_out_chunks(tmp_path: Path) -> None:
    host_program.copy_headers(tmp_path, "common/scan.cuh", "sched/context_lens.cuh")
    entry = host_program.entry("paged_mqa_logits_metadata", 2)
    (tmp_path / "paged_mqa_logits_metadata.cuh").write_text(entry)
    defines = {"CHUNK_KV": PAGED_CHUNK, "NUM_THREADS": 64, "CLUSTER_SIZE": 1, "SMEM_BYTES": 0, "CASES": 500}
    host_program.run("schedule_walk", tmp_path, defines)
