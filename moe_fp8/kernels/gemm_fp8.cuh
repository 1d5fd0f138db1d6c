// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// Weights (B) take the M side of wgmma and tokens (A) its N side: a tile of 8 tokens then costs 8 columns and not 64
// padded rows, and the weights' scale is one number for a warpgroup's tile. One producer thread feeds a ring of
// stages by TMA; each of two math warpgroups owns half of the weight rows. The grid is persistent.
//
// Specialised by: LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, MULTICAST_WEIGHTS,
// OUT_FP32, MAX_EXPERTS; M, N, K and the number of experts are run-time values.
#pragma once

#include "common/types.cuh"
#include "mma/promote.cuh"
#include "mma/store_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sched/segments.cuh"

namespace moe_fp8 {

constexpr sched::Layout kLayout = static_cast<sched::Layout>(LAYOUT);
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kStages = NUM_STAGES;
constexpr int kCluster = CLUSTER_SIZE;
constexpr bool kShareWeights = kCluster > 1 && MULTICAST_WEIGHTS;
constexpr bool kShareTokens = kCluster > 1 && !MULTICAST_WEIGHTS;
constexpr int kClusterM = kShareWeights ? kCluster : 1;
constexpr int kClusterN = kShareTokens ? kCluster : 1;

constexpr int kMathWarpgroups = 2;
constexpr int kWaves = kBlockN / (64 * kMathWarpgroups);
static_assert(kBlockN == 64 * kMathWarpgroups * kWaves, "a wave is 64 weight rows of each math warpgroup");
static_assert(kWaves <= 2, "a warpgroup's rows must lie in one 128-row scale block");
static_assert(NUM_THREADS == kWarpgroup * (1 + kMathWarpgroups), "one producer warpgroup");

using Table = sched::SegmentTable<MAX_EXPERTS>;
using Walk = sched::TileWalk<kLayout, kBlockM, kBlockN, kClusterM, kClusterN, MAX_EXPERTS>;
#if OUT_FP32
using Out = float;
#else
using Out = uint16_t;
#endif

struct Shared {
    uint8_t weights[kStages][kBlockN * kBlockK];
    uint8_t tokens[kStages][kBlockM * kBlockK];
    alignas(128) float token_scales[kStages][align_up(kBlockM, 32)];
    alignas(16) uint8_t staging[kMathWarpgroups][mma::kStagedTokens<kBlockM> * mma::kStagedTokenBytes];
    Table table;
    ptx::Barrier full[kStages];
    ptx::Barrier empty[kStages];
};
// heuristics.gemm_smem_bytes computes the same from its own constants, with 1 KiB for the barriers.
static_assert(sizeof(Shared) + 1024 <= SMEM_BYTES && SMEM_BYTES <= sizeof(Shared) + 3072, "see heuristics.py");

constexpr uint32_t kStageBytes = (kBlockN + kBlockM) * kBlockK + kBlockM * sizeof(float);

}  // namespace moe_fp8

struct GemmParams {
    moe_fp8::TensorMap a;        // [rows, K] fp8, box kBlockM / kClusterN rows x 128
    moe_fp8::TensorMap a_scale;  // [K/128 (x experts if masked), rows] fp32, box 1 x kBlockM / kClusterN
    moe_fp8::TensorMap b;        // [experts * N, K] fp8, box kBlockN / kClusterM rows x 128
    void* out;                   // [rows, N]
    const float* b_scale;        // [experts, ceil(N/128), K/128]
    const int* index;            // m_indices, psum, offsets or masked_m; null if dense
    int64_t out_stride;          // elements between tokens
    int m;                       // rows of a; if masked, of one expert's buffer
    int n;
    int k;
    int num_experts;
};

namespace moe_fp8 {

DEVICE void produce(const GemmParams& p, Shared& shared, Walk walk, uint32_t rank) {
    const int num_k_blocks = p.k / kBlockK;
    const uint16_t everyone = (1 << kCluster) - 1;
    uint32_t stage = 0, phase = 0;
    sched::Tile tile;
    while (walk.next(tile)) {
        const int scale_column = kLayout == sched::Layout::kMasked ? tile.expert * num_k_blocks : 0;
        const int weight_row = tile.expert * p.n + tile.n;
        for (int block = 0; block < num_k_blocks; ++block) {
            ptx::Barrier* full = &shared.full[stage];
            ptx::barrier_wait(&shared.empty[stage], phase ^ 1);
            ptx::barrier_arrive_expect(full, kStageBytes);
            if constexpr (kShareWeights) {
                constexpr int kRows = kBlockN / kCluster;
                ptx::tma_load_2d_multicast(&p.b, full, &shared.weights[stage][rank * kRows * kBlockK], block * kBlockK,
                                           weight_row + rank * kRows, everyone, ptx::CacheHint::kNormal);
            } else {
                ptx::tma_load_2d(&p.b, full, shared.weights[stage], block * kBlockK, weight_row,
                                 kBlockM < 128 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal);
            }
            if constexpr (kShareTokens) {
                constexpr int kRows = kBlockM / kCluster;
                ptx::tma_load_2d_multicast(&p.a, full, &shared.tokens[stage][rank * kRows * kBlockK], block * kBlockK,
                                           tile.row + rank * kRows, everyone, ptx::CacheHint::kEvictLast);
                ptx::tma_load_2d_multicast(&p.a_scale, full, &shared.token_scales[stage][rank * kRows],
                                           tile.scale_row + rank * kRows, scale_column + block, everyone,
                                           ptx::CacheHint::kEvictLast);
            } else {
                ptx::tma_load_2d(&p.a, full, shared.tokens[stage], block * kBlockK, tile.row,
                                 ptx::CacheHint::kEvictLast);
                ptx::tma_load_2d(&p.a_scale, full, shared.token_scales[stage], tile.scale_row, scale_column + block,
                                 ptx::CacheHint::kEvictLast);
            }
            if (++stage == kStages) stage = 0, phase ^= 1;
        }
    }
}

// Tells every producer that writes to this stage that this warp has read it.
DEVICE void release_stage(Shared& shared, uint32_t stage) {
    __syncwarp();
    if constexpr (kCluster == 1) {
        if (lane_index() == 0) ptx::barrier_arrive(&shared.empty[stage]);
    } else {
        if (lane_index() < kCluster) ptx::barrier_arrive_cluster(&shared.empty[stage], lane_index());
    }
}

DEVICE void consume(const GemmParams& p, Shared& shared, Walk walk, int warpgroup) {
    const int num_k_blocks = p.k / kBlockK;
    const int scale_rows = ceil_div(p.n, kBlockK);
    uint32_t stage = 0, phase = 0;
    sched::Tile tile;
    while (walk.next(tile)) {
        const int first_n = tile.n + warpgroup * kWaves * 64;
        const int scale_row = min(first_n / kBlockK, scale_rows - 1);
        const float* weight_scales =
            p.b_scale + (static_cast<int64_t>(tile.expert) * scale_rows + scale_row) * num_k_blocks;
        float weight_scale = __ldg(weight_scales);

        float sum[kWaves][kBlockM / 2];
#pragma unroll
        for (int i = 0; i < kWaves * kBlockM / 2; ++i) sum[i / (kBlockM / 2)][i % (kBlockM / 2)] = 0.0f;
        for (int block = 0; block < num_k_blocks; ++block) {
            // Fetched a block ahead: its latency hides behind the tensor core.
            const float next_weight_scale = __ldg(weight_scales + min(block + 1, num_k_blocks - 1));
            ptx::barrier_wait(&shared.full[stage], phase);
            const uint64_t tokens = ptx::wgmma_descriptor<kBlockK>(shared.tokens[stage]);
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const uint64_t weights = ptx::wgmma_descriptor<kBlockK>(
                    &shared.weights[stage][(warpgroup * kWaves + wave) * 64 * kBlockK]);
                float partial[kBlockM / 2];
                ptx::wgmma_pin(partial);
                ptx::wgmma_fence();
#pragma unroll
                for (int bytes = 0; bytes < kBlockK; bytes += 32) {
                    ptx::Wgmma<kBlockM>::mma(partial, ptx::advance_descriptor(weights, bytes),
                                             ptx::advance_descriptor(tokens, bytes), bytes > 0);
                }
                ptx::wgmma_commit();
                ptx::wgmma_pin(partial);
                ptx::wgmma_wait<0>();
                mma::promote<kBlockM>(sum[wave], partial, shared.token_scales[stage], weight_scale);
            }
            release_stage(shared, stage);
            weight_scale = next_weight_scale;
            if (++stage == kStages) stage = 0, phase ^= 1;
        }

        // Spelled out and not a loop: the compiler leaves one this long rolled, which would put `sum` into local memory.
        auto store_wave = [&](const float (&wave_sum)[kBlockM / 2], int n) {
            if (n >= p.n) return;
            Out* out = static_cast<Out*>(p.out) + tile.row * p.out_stride + n;
            mma::store_fragment<kBlockM>(wave_sum, out, p.out_stride, tile.begin_row, tile.end_row,
                                         shared.staging[warpgroup], 1 + warpgroup);
        };
        store_wave(sum[0], first_n);
        if constexpr (kWaves > 1) store_wave(sum[1], first_n + 64);
    }
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    gemm_fp8(const __grid_constant__ GemmParams p) {
    using namespace moe_fp8;
    extern __shared__ uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic + (1024 - ptx::shared_address(dynamic) % 1024) % 1024);

    const int warp = warp_index();
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&p.a);
        ptx::prefetch_tensor_map(&p.a_scale);
        ptx::prefetch_tensor_map(&p.b);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(&shared.full[stage], 1);
            ptx::barrier_init(&shared.empty[stage], kMathWarpgroups * 4 * kCluster);
        }
        ptx::fence_barrier_init();
    }
    if constexpr (kLayout != sched::Layout::kDense && kLayout != sched::Layout::kMIndices) {
        if (warp == 1) {
            sched::build_segment_table<kLayout, kBlockM * kClusterM>(shared.table, p.index, p.num_experts, p.m);
        }
    }
    uint32_t rank = 0;
    __syncthreads();
    if constexpr (kCluster > 1) {
        rank = ptx::cluster_rank();
        ptx::cluster_barrier();
    }

    const Walk walk(shared.table, p.index, p.num_experts, p.m, p.n, rank);
    if (warp < 4) {
        ptx::registers_release<40>();
        if (warp == 0 && ptx::elect_one()) produce(p, shared, walk, rank);
    } else {
        ptx::registers_acquire<232>();
        consume(p, shared, walk, warp / 4 - 1);
    }

    // A peer may still copy into this CTA's stages or arrive on its barriers.
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_barrier();
    }
}
