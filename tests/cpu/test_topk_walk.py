"""topk_walk.cpp runs the top-k kernel on the host, with small CTAs and little room for candidates."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cpu import host_program
from tests.cpu.host_program import KERNELS

CAPACITY = 512


def _sources(folder: Path) -> None:
    """The kernel's files, with the host's integers, shared memory and PTX instead of the device's."""
    shutil.copytree(KERNELS / "topk", folder / "topk")
    host_program.copy_headers(folder, "common/scan.cuh")
    (folder / "ptx" / "shared.cuh").write_text("#pragma once\n")
    entry = host_program.entry("indexer_topk", 3)
    dynamic = "char* dynamic = host::dynamic_memory[host::cta];"
    entry, count = re.subn(r"extern __shared__ \S+ uint8_t dynamic\[\];", dynamic, entry)
    assert count == 1
    (folder / "indexer_topk.cuh").write_text(entry)


@host_program.needs_compiler
@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("in_dtype", [0, 2])
def test_the_kernel_chooses_what_a_sort_chooses(tmp_path: Path, in_dtype: int, cluster: int) -> None:
    _sources(tmp_path)
    threads = 64 if cluster > 2 else 128
    defines = {
        "IN_DTYPE": in_dtype,
        "CAPACITY": CAPACITY,
        "MAX_K": 256,
        "CLUSTER_SIZE": cluster,
        "NUM_THREADS": threads,
        "SMEM_BYTES": CAPACITY * 8 + 2 * 2048 * 4,
        "CASES": 120 // cluster + 30,
        "COLUMNS_OF_A_CTA": 70_000 if cluster < 8 else 20_000,
    }
    host_program.run("topk_walk", tmp_path, defines)
