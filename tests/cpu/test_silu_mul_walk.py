"""silu_mul_walk.cpp runs the end of the tiles of gemm_silu_mul_fp8 on the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_fp8.heuristics import silu_mul_configs
from tests.cpu import host_program

#: What gemm/silu_mul.cuh takes from other files of the GEMM.
_SHAPE = """#pragma once
#include "common/types.cuh"
namespace moe_fp8 {
namespace sched { enum class Layout { kOffsets = 3 }; }
struct Tile { int row, n, begin_row, end_row; };
constexpr sched::Layout kLayout = sched::Layout::kOffsets;
constexpr int kBlockM = BLOCK_M, kBlockN = 256, kWaves = 2, kParts = 1, kMathWarpgroups = 2;
constexpr bool kPaired = false, kAcrossWarps = kBlockM < 64;
struct Fragments {
    static constexpr int kColumns = kBlockM < 64 ? kBlockM : 128;
    using Sum = float[kColumns / 2];
};
namespace mma {
struct Owned { int token, weight, fragments; };
inline int warpgroup_thread() { return threadIdx.x % 128; }
}
namespace ptx {
template <int, int kThreads> void named_barrier() { __syncthreads(); }
}
struct Shared {
    uint8_t staging[2][kBlockM * 128 / 2];
    float maxima[8][kBlockM];
};
struct GemmParams { void* out; int64_t out_stride; float limit; float* out_scale; int64_t out_scale_stride; };
}
"""

_SILU = """#pragma once
namespace moe_fp8 {
inline float round_to_bf16(float x) { return x; }
template <bool> float silu_mul(float gate, float up, float) { return gate + up / 2; }
}
"""

_FP8 = """inline uint8_t to_byte(float x) { return static_cast<uint8_t>(std::lrint(x / 4)); }
inline float max_nan(float a, float b) { return a > b ? a : b; }
inline uint32_t pack_fp8(float a, float b, float c, float d) {
    return to_byte(a) | to_byte(b) << 8 | to_byte(c) << 16 | uint32_t(to_byte(d)) << 24;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
"""


def _sources(folder: Path) -> None:
    host_program.copy_headers(folder, "common/quantize.cuh", "gemm/silu_mul.cuh")
    (folder / "gemm" / "shape.cuh").write_text(_SHAPE)
    (folder / "common" / "silu.cuh").write_text(_SILU)
    quantize = folder / "common" / "quantize.cuh"
    text = quantize.read_text()
    for name in ("float max_nan", "uint32_t pack_fp8", "void unpack_fp8"):
        text, count = re.subn(rf"DEVICE {name}\(.*?\n}}\n", "", text, flags=re.S)
        assert count == 1, name
    quantize.write_text(text.replace("constexpr float kFp8Max", f"{_FP8}constexpr float kFp8Max", 1))


@host_program.needs_compiler
@pytest.mark.parametrize("tokens", [config.block_m for config in silu_mul_configs()])
def test_each_output_lies_where_its_rows_say(tmp_path: Path, tokens: int) -> None:
    _sources(tmp_path)
    defines = {
        "BLOCK_M": tokens,
        "SILU_MUL": 1,
        "ROUNDED": 0,
        "POWER_OF_TWO": 0,
        "NUM_THREADS": 256,
        "CLUSTER_SIZE": 1,
        "SMEM_BYTES": 1 << 16,
        "CASES": 30,
    }
    host_program.run("silu_mul_walk", tmp_path, defines)
