// The first GEMM of experts and the step behind it: SiLU(gate) * up of a grouped GEMM's columns, quantized to FP8 with a scale for
// each 1 x 128.
//
// The kernel is that of gemm_fp8.cuh, which has its map, but for the end of a tile (gemm/silu_mul.cuh). The weights' rows alternate:
// eight rows of the gate, then the eight rows of up for the same outputs. So a thread has both in its registers. A tile has 256
// weight rows, which are the 128 outputs that share a scale. Nothing is divided along K, and no tile comes in pieces.
//
// Barriers, besides those of gemm_fp8.cuh: if tokens are few, a token's outputs are of all math warps, which meet twice for each tile
// at named barrier 1. The map of shared memory has `maxima`, too, and another rule for `staging`:
//
//   maxima     Each warp overwrites its own with the next tile's, after the barrier behind all reads.
//   staging    A warp overwrites its outputs with the next tile's. If tokens are few, the next tile's first barrier is behind all
//              reads. If tokens are many, the warp alone reads them, and `__syncwarp` comes between.
//
// The kernel is specialized by LAYOUT, BLOCK_M, BLOCK_N, NUM_STAGES, POWER_OF_TWO and ROUNDED (silu_mul_quantize.cuh).
#pragma once

#define SILU_MUL 1
#define OUT_FP32 0
#define SPLIT_K 0

#include "gemm/kernel.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    gemm_silu_mul_fp8(const __grid_constant__ GemmParams p) {
    moe_fp8::run(p);
}
