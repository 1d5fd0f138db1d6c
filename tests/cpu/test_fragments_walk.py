"""fragments_walk.cpp runs the device code that deals a GEMM's tiles to the math warpgroups on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_fp8.heuristics.gemm.tiles import GemmConfig, every_gemm_config
from tests.cpu import host_program

#: What mma/fragments.cuh takes from PTX, for sums that are stored as fp32.
_SHARED = """#pragma once
#include "common/types.cuh"
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
namespace moe_fp8::ptx {
template <typename T> T load_here(const T* pointer) { return *pointer; }
inline float multiply_here(float a, float b) { return a * b; }
inline uint32_t shared_address(const void*) { return 0; }
inline void stmatrix_x4(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) {}
inline uint32_t pack_bf16(float, float) { return 0; }
inline void store_as(float* element, float value) { *element = value; }
}
"""

TILES = {(config.block_m, config.block_n): config for config in every_gemm_config()}


@host_program.needs_compiler
@pytest.mark.parametrize("config", TILES.values(), ids=[f"{m}x{n}" for m, n in TILES])
def test_each_output_is_stored_once_and_both_warpgroups_work(tmp_path: Path, config: GemmConfig) -> None:
    host_program.copy_headers(tmp_path, "mma/fragments.cuh")
    (tmp_path / "ptx" / "shared.cuh").write_text(_SHARED)
    defines = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WIDTHS": 2 if config.divided else 1,
        "NUM_THREADS": config.math_warpgroups * 128,
        "CLUSTER_SIZE": 1,
        "SMEM_BYTES": 16,
    }
    host_program.run("fragments_walk", tmp_path, defines)
