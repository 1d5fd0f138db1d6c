// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// One producer thread feeds a ring of stages by TMA; two math warpgroups share every tile (mma/fragments.cuh says how). The
// grid is persistent.
//
// Specialised by: LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, MULTICAST_WEIGHTS,
// OUT_FP32, MAX_EXPERTS; M, N, K and the number of experts are run-time values.
#pragma once

#include "common/types.cuh"
#include "mma/fragments.cuh"
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

#if BLOCK_M == 128
using Fragments = mma::TokensOnM<kBlockM, kBlockN>;
#else
using Fragments = mma::WeightsOnM<kBlockM, kBlockN>;
#endif
constexpr int kWaves = Fragments::kWaves;

constexpr int kMathWarpgroups = 2;
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
    alignas(16) uint8_t staging[kMathWarpgroups][Fragments::kStagingBytes];
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

// Copies the stages of one tile; one thread. `stage` and `phase` run on from tile to tile.
DEVICE void load_tile(const GemmParams& p, Shared& shared, const sched::Tile& tile, uint32_t rank, uint32_t& stage,
                      uint32_t& phase) {
    const int num_k_blocks = p.k / kBlockK;
    const uint16_t everyone = (1 << kCluster) - 1;
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
            ptx::tma_load_2d(&p.a, full, shared.tokens[stage], block * kBlockK, tile.row, ptx::CacheHint::kEvictLast);
            ptx::tma_load_2d(&p.a_scale, full, shared.token_scales[stage], tile.scale_row, scale_column + block,
                             ptx::CacheHint::kEvictLast);
        }
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
}

// One warp walks the tiles together and waits for its first lane, which issues the copies. Not an elected lane: the ring's
// position is that lane's alone, and the compiler may repeat an election.
DEVICE void produce(const GemmParams& p, Shared& shared, Walk walk, uint32_t rank) {
    uint32_t stage = 0, phase = 0;
    sched::Tile tile;
    while (walk.next(tile)) {
        if (lane_index() == 0) load_tile(p, shared, tile, rank, stage, phase);
        __syncwarp();
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

// Starts the multiplication of one wave over 128 of K, as one commit group.
DEVICE void multiply(Fragments::Sum& partial, const Shared& shared, uint32_t stage, int warpgroup, int wave) {
    const uint8_t* weights = shared.weights[stage];
    const uint8_t* tokens = shared.tokens[stage];
    const uint64_t a = ptx::wgmma_descriptor<kBlockK>(Fragments::m_operand(weights, tokens, warpgroup, wave));
    const uint64_t b = ptx::wgmma_descriptor<kBlockK>(Fragments::n_operand(weights, tokens, wave));
    ptx::wgmma_pin(partial);
    ptx::wgmma_fence();
#pragma unroll
    for (int bytes = 0; bytes < kBlockK; bytes += 32) {
        ptx::Wgmma<Fragments::kColumns>::mma(partial, ptx::advance_descriptor(a, bytes),
                                             ptx::advance_descriptor(b, bytes), bytes > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_pin(partial);
}

// One row of weight scales, read a warp at a time (a lane holds every 32nd block) and a warp's worth ahead: a load for each
// block would put an L2 round trip between two promotions. Holds no pointer: registers are short in the largest tile.
class WeightScales {
   public:
    DEVICE void start(const GemmParams& p, int row) {
        first_ = row * (p.k / kBlockK);
        held_ = load(p, 0);
        ahead_ = load(p, kWarp);
    }
    // Blocks are asked for in order.
    DEVICE float at(const GemmParams& p, int block) {
        if (block % kWarp == 0 && block > 0) held_ = ahead_, ahead_ = load(p, block + kWarp);
        return __shfl_sync(0xffffffffu, held_, block % kWarp);
    }

   private:
    DEVICE float load(const GemmParams& p, int block) const {
        return __ldg(p.b_scale + first_ + min(block + lane_index(), p.k / kBlockK - 1));
    }
    int first_;
    float held_, ahead_;
};

DEVICE void consume(const GemmParams& p, Shared& shared, Walk walk, int warpgroup) {
    const int num_k_blocks = p.k / kBlockK;
    const int scale_rows = ceil_div(p.n, kBlockK);
    uint32_t stage = 0, phase = 0;
    sched::Tile tile;
    while (walk.next(tile)) {
        WeightScales weight_scales[kWaves];
        Fragments::Sum sum[kWaves];
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
            const int row = min((tile.n + Fragments::weight_row(warpgroup, wave)) / kBlockK, scale_rows - 1);
            weight_scales[wave].start(p, tile.expert * scale_rows + row);
#pragma unroll
            for (int i = 0; i < Fragments::kColumns / 2; ++i) sum[wave][i] = 0.0f;
        }

        if constexpr (kWaves == 1) {
            // One block is promoted while the next is multiplied into the other partial sum.
            Fragments::Sum partial[2];
            ptx::barrier_wait(&shared.full[stage], phase);
            multiply(partial[0], shared, stage, warpgroup, 0);
            auto promote = [&](Fragments::Sum& done, int block) {
                Fragments::promote(sum[0], done, shared.token_scales[stage], weight_scales[0].at(p, block), warpgroup);
                release_stage(shared, stage);
                if (++stage == kStages) stage = 0, phase ^= 1;
            };
            auto step = [&](Fragments::Sum& done, Fragments::Sum& next, int block) {
                const bool wraps = stage + 1 == kStages;
                const uint32_t next_stage = wraps ? 0 : stage + 1;
                ptx::barrier_wait(&shared.full[next_stage], phase ^ wraps);
                multiply(next, shared, next_stage, warpgroup, 0);
                ptx::wgmma_wait<1>();
                promote(done, block);
            };
            int block = 0;
            for (; block + 2 < num_k_blocks; block += 2) {
                step(partial[0], partial[1], block);
                step(partial[1], partial[0], block + 1);
            }
            if (block + 1 < num_k_blocks) {
                step(partial[0], partial[1], block);
                ptx::wgmma_wait<0>();
                promote(partial[1], block + 1);
            } else {
                ptx::wgmma_wait<0>();
                promote(partial[0], block);
            }
        } else {
            // Two waves leave no registers for a second partial sum: one warpgroup promotes while the other multiplies.
            for (int block = 0; block < num_k_blocks; ++block) {
                ptx::barrier_wait(&shared.full[stage], phase);
#pragma unroll
                for (int wave = 0; wave < kWaves; ++wave) {
                    const float weight_scale = weight_scales[wave].at(p, block);
                    Fragments::Sum partial;
                    multiply(partial, shared, stage, warpgroup, wave);
                    ptx::wgmma_wait<0>();
                    Fragments::promote(sum[wave], partial, shared.token_scales[stage], weight_scale, warpgroup);
                }
                release_stage(shared, stage);
                if (++stage == kStages) stage = 0, phase ^= 1;
            }
        }

        // Spelled out and not a loop: the compiler leaves one this long rolled, which would put `sum` into local memory.
        auto store_wave = [&](const Fragments::Sum& wave_sum, int wave) {
            const int n = tile.n + Fragments::weight_row(warpgroup, wave);
            Out* out = static_cast<Out*>(p.out) + tile.row * p.out_stride + n;
            Fragments::store(wave_sum, out, p.out_stride, tile.begin_row, tile.end_row, p.n - n,
                             shared.staging[warpgroup], warpgroup);
        };
        store_wave(sum[0], 0);
        if constexpr (kWaves > 1) store_wave(sum[1], 1);
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
        if (warp == 0) produce(p, shared, walk, rank);
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
