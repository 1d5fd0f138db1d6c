// Block-scaled FP8 GEMM of ragged K: D[e,m,n] (+)= sum_k A[m,k] * B[n,k] over the k of expert e, with a scale for each 1 x 128 of A
// and of B. These are the weight gradients of an MoE layer, whose K is the tokens of an expert.
//
// The kernel is that of gemm_fp8.cuh, which has its map, with these differences. Every expert has the same tiles, and a tile's record
// holds its range of K. In a stage the even rows of 128 weights come first (`mma::kWoven`). The weights' scales come by TMA, so `full`
// has one arrival. `promote` reads these scales from the stage, for which a thread has no registers. fp32 sums of tiles of 128 x 128 go
// through `staging`, and warp 1 takes them to memory (`move_sums`); otherwise warp 1 rests.
//
//   weight_scales         TMA copies overwrite them after `empty` of the stage. The arrival comes after the promotions and takes a sum
//                         that was computed from each scale (`Promoted`).
//   staging               TMA copies (what is added to) and math warps (sums) overwrite it after `bulk_wait_read`, when TMA has read the
//                         tile before. Math warps wait for `staging_free`. What they read there they have stored there again before
//                         they arrive.
//   staging_free[warpgroup]  1 arrival: warp 1, also for the bytes of its copies. Math warps wait.
//   staging_full[warpgroup]  4 arrivals, one for each warp of the warpgroup. Warp 1 waits.
//
// An expert without tokens has tiles without blocks: zeros are stored, or nothing is added. Without an index there is one expert,
// which has all of K: this is the dense GEMM of operands that both have scales of single rows.
//
// The kernel is specialized by LAYOUT, BLOCK_M, BLOCK_N, NUM_STAGES, CLUSTER_SIZE and OUT_FP32.
#pragma once

#define ROW_SCALES 1
#define SPLIT_K 0

#include "gemm/kernel.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    k_grouped_gemm_fp8(const __grid_constant__ GemmParams p) {
    moe_fp8::run(p);
}
