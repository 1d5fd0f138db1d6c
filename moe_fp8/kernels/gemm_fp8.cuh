// Block-scaled FP8 GEMM, dense and grouped: D[m,n] (+)= sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B. Only fp32 is added to.
//
// The terms of the files in gemm/, mma/ and sched/:
//
//   tile      BLOCK_M tokens by BLOCK_N weight rows of D
//   unit      the work that a CTA or a cluster takes at once: a tile, a pair of tiles, or a half or a quarter of these
//   block     128 of K
//   stage     a slot of the ring in shared memory; it holds one block of a tile's tokens and weights, with their scales
//   lap       one turn through all stages of the ring
//   fragment  the 64 x kColumns of a tile that one wgmma of a warpgroup computes
//   partial   the tensor core's sum of a fragment over one block
//   promote   to add a partial sum, times the scales, to the fp32 sum
//   parts     the sums of a tile whose K several CTAs or warpgroups divide; the parts are added at the end
//
// The grid is persistent. In each CTA one warp walks the CTA's tiles, a second warp feeds a ring of stages by TMA, and a third warp
// copies the weights' scales to the stages. (The walking warp copies the weights of the first stages.) One to three math warpgroups
// share every tile; mma/fragments.cuh says how.
//
// A cluster that works together is of one of two kinds. It may take a pair of tiles with weights or tokens in common, and its CTAs take
// turns to load these for both. Or it shares one tile along K: each CTA sums a part of K, and the parts are added in the order of rank,
// so that results repeat bit for bit. CTAs with tiles of their own, of 64 tokens and more, are launched in clusters of two as well, but
// neither CTA waits for the other (`kNeighbours`).
//
// Warps (`run` in gemm/kernel.cuh):
//
//   0      copies tokens, the tokens' scales and, except for the first stages, weights (`produce`)
//   1      stores the weights' scales (`produce_scales`)
//   2      walks the tiles and copies the first stages' weights (`walk_tiles`)
//   3      rests
//   4 on   one to three math warpgroups (`consume`)
//
// Barriers. The phase of a ring's barrier is the ring's lap; the phase of a barrier for parts is the tile:
//
//   full[stage]        2 arrivals: the warp that announces the copies' bytes, and warp 1. Math warps wait.
//   empty[stage]       Every thread of each math warpgroup that reads the stage arrives. In a pair, one lane of each math warp of both
//                      CTAs arrives. Warps 0 and 1 wait.
//   tiles.full[slot]   1 arrival: warp 2. All other warps wait, except warp 3.
//   tiles.empty[slot]  1 arrival from each warp that waits for tiles.full. Warp 2 waits.
//   parts_full         In a CTA every thread of the other warpgroup arrives. In a cluster the barrier counts the bytes that the other
//                      CTAs store. Math warps wait.
//   parts_free         Every thread that has got parts from this warpgroup arrives, or in a cluster one lane of each such warp. This
//                      warpgroup waits.
//
// `Accumulator` has these main loops. Tiles of one fragment take `run_block_by_block`, or `run_one_by_one` if there are no registers
// for two partial sums, or if the kernel's tiles can have two fragments. Tiles of two fragments take `run_side_by_side`, or `begin`
// and `finish` if there are registers for only one partial sum.
//
// The map of shared memory says who overwrites each buffer, after which arrival, and why every read is done by then:
//
//   weights, tokens          TMA copies overwrite them after `empty` of the stage. Only wgmma reads them, and a warp arrives after
//                            `wgmma_wait`.
//   token_scales             TMA copies overwrite them after `empty` of the stage. The arrival takes the scales or their products.
//   weight_scales            Warp 1 overwrites them after `empty` of the stage. The arrival takes the scales or their products.
//   tiles                    Warp 2 overwrites them after `empty` of the slot. The arrival takes a copy of the record
//                            (`TileReader::pop`). All values that were read of the record before went into branches and into
//                            addresses of stores, and these come before the arrival.
//   parts                    Other warpgroups and CTAs overwrite them after `parts_free`. The arrival takes the totals (`add_parts`).
//   staging                  A warp overwrites its own part with its next tile, after `bulk_wait_read`, when TMA has read it. If the
//                            warp itself reads there, it stores the values to memory before it goes on, and the stores need them.
//
// The kernel is specialized by LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, SPLIT_K (the kind of
// cluster) and OUT_FP32. M, N, K and the number of experts are run-time values.
#pragma once

#include "gemm/kernel.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(moe_fp8::kLaunchClusterOf<BLOCK_M, CLUSTER_SIZE>, 1, 1)
    gemm_fp8(const __grid_constant__ GemmParams p) {
    moe_fp8::run(p);
}
