"""permute_walk.cpp runs the kernel of moe_permute on the host, with small CTAs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu import host_program


def _sources(folder: Path) -> None:
    """The kernel's files, with the host's integers, shared memory and PTX instead of the device's."""
    host_program.copy_headers(folder, "common/scan.cuh", "common/quantize.cuh")
    (folder / "moe_permute.cuh").write_text(host_program.entry("moe_permute", 5))


@host_program.needs_compiler
@pytest.mark.parametrize("wide", [0, 1])
def test_the_kernel_sorts_rows_by_expert(tmp_path: Path, wide: int) -> None:
    _sources(tmp_path)
    defines = {
        "IN_FP8": 1,
        "POWER_OF_TWO": 0,
        "WIDE_IDS": wide,
        "NUM_THREADS": 64,
        "CLUSTER_SIZE": 1,
        "SMEM_BYTES": 0,
        "CASES": 40,
    }
    host_program.run("permute_walk", tmp_path, defines | {"IdType": "int64_t" if wide else "int"})
