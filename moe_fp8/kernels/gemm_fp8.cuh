// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// The grid is persistent. In each CTA one warp walks its tiles, one feeds a ring of stages by TMA, one adds the weights'
// scales, and two math warpgroups share every tile (mma/fragments.cuh says how).
//
// A cluster either shares operands by multicast (weights or tokens: each CTA loads a part of them for all) or shares one
// tile along K: each CTA sums a part of K, and the parts are added in the order of rank, so that results repeat bit for bit.
//
// Specialised by: LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, CLUSTER_SHARES (0 tokens, 1
// weights, 2 the tile, along K), OUT_FP32; M, N, K and the number of experts are run-time values.
#pragma once

#include "common/types.cuh"
#include "mma/fragments.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sched/ring.cuh"
#include "sched/segments.cuh"
#include "sched/tile_ring.cuh"

namespace moe_fp8 {

constexpr sched::Layout kLayout = static_cast<sched::Layout>(LAYOUT);
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kStages = NUM_STAGES;
constexpr int kCluster = CLUSTER_SIZE;
constexpr bool kShareTokens = kCluster > 1 && CLUSTER_SHARES == 0;
constexpr bool kShareWeights = kCluster > 1 && CLUSTER_SHARES == 1;
constexpr bool kSplitK = kCluster > 1 && CLUSTER_SHARES == 2;
constexpr int kClusterM = kShareWeights ? kCluster : 1;
constexpr int kClusterN = kShareTokens ? kCluster : 1;
constexpr int kClusterK = kSplitK ? kCluster : 1;
constexpr uint16_t kEveryone = (1 << kCluster) - 1;

#if BLOCK_M == 128
using Fragments = mma::TokensOnM<kBlockM, kBlockN>;
#else
using Fragments = mma::WeightsOnM<kBlockM, kBlockN>;
#endif
constexpr int kWaves = Fragments::kWaves;
constexpr int kScaleBlocks = ceil_div(kBlockN, 128);  // of the weights, in a tile

constexpr int kMathWarpgroups = 2;
// Tiles of 64 weight rows are one fragment: the warpgroups take alternate blocks of K.
constexpr bool kAlternate = kBlockN == 64;
// Parts in which a tile's sum comes about, and the columns of a fragment in groups of eight, which are dealt to them.
constexpr int kParts = kClusterK * (kAlternate ? kMathWarpgroups : 1);
constexpr int kColumnGroups = Fragments::kColumns / 8;
constexpr int kMostShare = ceil_div(kColumnGroups, kParts);
static_assert(kParts == 1 || kWaves == 1, "one fragment");
static_assert(NUM_THREADS == kWarpgroup * (1 + kMathWarpgroups), "one producer warpgroup");

using Walk = sched::TileWalk<kLayout, kBlockM, kBlockN, kClusterM, kClusterN, kClusterK>;
constexpr int kTileReaders = 2 + kMathWarpgroups * 4;  // both producers and the math warps
using Tiles = sched::TileRing<kTileReaders>;
using TileWriter = sched::TileWriter<kTileReaders>;
using TileReader = sched::TileReader<kTileReaders>;

// Tokens that TMA stores at once, and bytes of a warpgroup's staging.
constexpr int kStoredTokens = kBlockM < 16 ? kBlockM : 16;
constexpr int kStagingBytes = Fragments::kStagedBoxes * Fragments::kStagedTokens * mma::kStagedBytes;

struct Shared {
    uint8_t weights[kStages][kBlockN * kBlockK];
    uint8_t tokens[kStages][kBlockM * kBlockK];
    uint8_t staging[kMathWarpgroups][kStagingBytes];
    alignas(128) float token_scales[kStages][align_up(kBlockM, 32)];
    // For each warpgroup, from every other part of the sum, its share of it: [part][column group][thread].
    alignas(16) float4 parts[kMathWarpgroups][kParts > 1 ? (kParts - 1) * kMostShare * kWarpgroup : 1];
    float weight_scales[kStages][kScaleBlocks];
    Tiles tiles;
    ptx::Barrier parts_full[kMathWarpgroups];  // the others' parts have come
    ptx::Barrier parts_free;                   // every warp of the cluster has read the parts it got
    ptx::Barrier full[kStages];
    ptx::Barrier empty[kStages];
};
// heuristics.gemm_smem_bytes computes the same from its own constants, with 1 KiB for the tiles and barriers.
static_assert(sizeof(Shared) <= SMEM_BYTES && SMEM_BYTES <= sizeof(Shared) + 1024, "see heuristics.py");

constexpr uint32_t kStageBytes = (kBlockN + kBlockM) * kBlockK + kBlockM * sizeof(float);

}  // namespace moe_fp8

struct GemmParams {
    moe_fp8::TensorMap a;        // [rows, K] fp8, box kBlockM / kClusterN rows x 128
    moe_fp8::TensorMap a_scale;  // [K/128 (x experts if masked), rows] fp32, box 1 x kBlockM / kClusterN
    moe_fp8::TensorMap b;        // [experts * N, K] fp8, box kBlockN / kClusterM rows x 128
    moe_fp8::TensorMap out_map;  // [rows, N] bf16, box kStoredTokens rows x 64; unused if fp32
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

DEVICE uint32_t cluster_rank() { return kCluster > 1 ? ptx::cluster_rank() : 0; }

// Blocks of K that this CTA sums.
struct KRange {
    int begin, end;
    DEVICE KRange(const GemmParams& p, uint32_t rank) {
        const int blocks = p.k / kBlockK, part = kSplitK ? static_cast<int>(rank) : 0;
        begin = blocks * part / kClusterK, end = blocks * (part + 1) / kClusterK;
    }
};

using Ring = sched::RingCursor<kStages>;

// Copies one stage's weights, or tokens and their scales.
DEVICE void load_weights(const GemmParams& p, Shared& shared, const sched::Tile& tile, uint32_t rank, uint32_t stage, int block) {
    const int row = tile.expert * p.n + tile.n;
    if constexpr (kShareWeights) {
        constexpr int kRows = kBlockN / kCluster;
        ptx::tma_load_2d_multicast(&p.b, &shared.full[stage], &shared.weights[stage][rank * kRows * kBlockK],
                                   block * kBlockK, row + rank * kRows, kEveryone, ptx::CacheHint::kNormal);
    } else {
        ptx::tma_load_2d(&p.b, &shared.full[stage], shared.weights[stage], block * kBlockK, row,
                         kBlockM < 128 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal);
    }
}

DEVICE void load_tokens(const GemmParams& p, Shared& shared, const sched::Tile& tile, uint32_t rank, uint32_t stage, int block) {
    const int scale_row = (kLayout == sched::Layout::kMasked ? tile.expert * (p.k / kBlockK) : 0) + block;
    ptx::Barrier* full = &shared.full[stage];
    if constexpr (kShareTokens) {
        constexpr int kRows = kBlockM / kCluster;
        ptx::tma_load_2d_multicast(&p.a, full, &shared.tokens[stage][rank * kRows * kBlockK], block * kBlockK,
                                   tile.row + rank * kRows, kEveryone, ptx::CacheHint::kEvictLast);
        ptx::tma_load_2d_multicast(&p.a_scale, full, &shared.token_scales[stage][rank * kRows],
                                   tile.scale_row + rank * kRows, scale_row, kEveryone, ptx::CacheHint::kEvictLast);
    } else {
        ptx::tma_load_2d(&p.a, full, shared.tokens[stage], block * kBlockK, tile.row, ptx::CacheHint::kEvictLast);
        ptx::tma_load_2d(&p.a_scale, full, shared.token_scales[stage], tile.scale_row, scale_row, ptx::CacheHint::kEvictLast);
    }
}

DEVICE void walk_tiles(const GemmParams& p, Shared& shared) {
    if constexpr (kLayout != sched::Layout::kDense) ptx::grid_dependency_wait();
    Walk walk(p.index, p.num_experts, p.m, p.n, cluster_rank());
    TileWriter writer(shared.tiles);
    sched::Tile tile;
    while (walk.next(tile)) writer.push(tile);
    writer.finish();
}

// The warp stays together around its first lane, which issues the copies. Not an elected lane: the ring's position is that
// lane's alone, and the compiler may repeat an election.
//
// Weights do not depend on the kernel before: those of the first stages are on their way while it ends.
DEVICE void produce(const GemmParams& p, Shared& shared) {
    const uint32_t rank = cluster_rank();
    const KRange range(p, rank);
    TileReader reader(shared.tiles);
    Ring ring;
    bool waited = false;
    while (const sched::Tile* slot = reader.next()) {
        const sched::Tile tile = *slot;
        reader.release();
        int block = range.begin;
        if (!waited) {
            const int ahead = min(range.begin + kStages, range.end);
            if (lane_index() == 0) {
#pragma unroll 1
                for (int i = block; i < ahead; ++i) {
                    ptx::barrier_arrive_expect(&shared.full[i - block], kStageBytes);
                    load_weights(p, shared, tile, rank, i - block, i);
                }
            }
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
#pragma unroll 1
            for (; block < ahead; ++block, ring.step()) {
                if (lane_index() == 0) load_tokens(p, shared, tile, rank, ring.slot, block);
            }
            waited = true;
        }
        if (lane_index() == 0) {
#pragma unroll 1
            for (; block < range.end; ++block, ring.step()) {
                ptx::barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
                ptx::barrier_arrive_expect(&shared.full[ring.slot], kStageBytes);
                load_weights(p, shared, tile, rank, ring.slot, block);
                load_tokens(p, shared, tile, rank, ring.slot, block);
            }
        }
        __syncwarp();
    }
    if (!waited) ptx::grid_dependency_wait(), ptx::launch_dependents();
}

// A second warp brings the weights' scales, a few floats a stage that TMA is too coarse for: it reads them a warp's worth at a
// time and a warp's worth ahead, and fills each stage's as the first warp does.
DEVICE void produce_scales(const GemmParams& p, Shared& shared) {
    TileReader reader(shared.tiles);
    const KRange range(p, cluster_rank());
    const int num_k_blocks = p.k / kBlockK, scale_rows = ceil_div(p.n, kBlockK);
    Ring ring;
    while (const sched::Tile* tile = reader.next()) {
        const float* rows[kScaleBlocks];
        float held[kScaleBlocks], ahead[kScaleBlocks];
        auto load = [&](float (&values)[kScaleBlocks], int block) {
#pragma unroll
            for (int i = 0; i < kScaleBlocks; ++i) values[i] = __ldg(rows[i] + min(block + lane_index(), range.end - 1));
        };
#pragma unroll
        for (int i = 0; i < kScaleBlocks; ++i) {
            const int row = tile->expert * scale_rows + min(tile->n / kBlockK + i, scale_rows - 1);
            rows[i] = p.b_scale + static_cast<int64_t>(row) * num_k_blocks;
        }
        reader.release();
        load(ahead, range.begin);
        for (int block = range.begin; block < range.end; ++block, ring.step()) {
            const int lane = (block - range.begin) % kWarp;
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < kScaleBlocks; ++i) held[i] = ahead[i];
                load(ahead, block + kWarp);
            }
            ptx::barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
            if (lane_index() == lane) {
#pragma unroll
                for (int i = 0; i < kScaleBlocks; ++i) shared.weight_scales[ring.slot][i] = held[i];
                ptx::barrier_arrive(&shared.full[ring.slot]);
            }
        }
    }
}

// Tells every producer that writes to this stage that this warp has read it.
DEVICE void release_stage(Shared& shared, uint32_t stage) {
    __syncwarp();
    if constexpr (!kShareWeights && !kShareTokens) {
        if (lane_index() == 0) ptx::barrier_arrive(&shared.empty[stage]);
    } else {
        if (lane_index() < kCluster) ptx::barrier_arrive_cluster(&shared.empty[stage], lane_index());
    }
}

// The sum of a part of one tile over this CTA's part of K: `num_blocks` > 0 stages. A stage's scales are read before the
// tensor core is given work: while it is busy they would wait for shared memory, and it then for them.
class Accumulator {
   public:
    DEVICE Accumulator(Shared& shared, int warpgroup) : shared_(shared), warpgroup_(warpgroup) {
        if (kAlternate && warpgroup == 1) ring_.step();
    }

    // `first_done` is called with the first of two fragments as soon as it is whole.
    template <typename FirstDone>
    DEVICE void run(int num_blocks, mma::Part part, Fragments::Sum (&sum)[kWaves], FirstDone first_done) {
        part_ = part;
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
            for (int i = 0; i < Fragments::kColumns / 2; ++i) sum[wave][i] = 0.0f;
        }
        if constexpr (kAlternate) {
            const int mine = (num_blocks + (next_ == warpgroup_)) / 2;
            next_ ^= num_blocks & 1;
            if (mine > 0) run_block_by_block(mine, sum[0]);
        } else if (kWaves == 1 || part.columns == Fragments::kColumns) {
            run_block_by_block(num_blocks, sum[0]);
        } else {
            run_wave_by_wave(num_blocks, sum, first_done);
        }
    }

    // Lets a tile pass of which this warpgroup owns nothing.
    DEVICE void skip(int num_blocks) {
        for (; num_blocks > 0; --num_blocks, ring_.step()) {
            ptx::barrier_wait(&shared_.full[ring_.slot], ring_.phase);
            release_stage(shared_, ring_.slot);
        }
    }

   private:
    using Sum = Fragments::Sum;
    using Scales = Fragments::Scales;

    // One fragment. A block is promoted while the next is multiplied into the other of two partial sums.
    DEVICE void run_block_by_block(int num_blocks, Sum& sum) {
        Sum partial[2];
        Scales scales[2];
        wait(ring_, scales[0]);
        multiply(partial[0], ring_, 0);
        auto step = [&](int done, int next) {
            Ring ahead = ring_;
            step_ring(ahead);
            wait(ahead, scales[next]);
            multiply(partial[next], ahead, 0);
            ptx::wgmma_wait<1>();
            finish_block(sum, partial[done], scales[done]);
        };
        int block = 0;
        for (; block + 2 < num_blocks; block += 2) {
            step(0, 1);
            step(1, 0);
        }
        if (block + 1 < num_blocks) {
            step(0, 1);
            ptx::wgmma_wait<0>();
            finish_block(sum, partial[1], scales[1]);
        } else {
            ptx::wgmma_wait<0>();
            finish_block(sum, partial[0], scales[0]);
        }
    }

    DEVICE void finish_block(Sum& sum, const Sum& partial, const Scales& scales) {
        Fragments::promote(sum, partial, scales, 0);
        release_stage(shared_, ring_.slot);
        step_ring(ring_);
    }

    DEVICE static void step_ring(Ring& ring) {
        ring.step();
        if constexpr (kAlternate) ring.step();
    }

    // Two fragments, which leave no registers for a second partial sum: one warpgroup promotes while the other multiplies.
    template <typename FirstDone>
    DEVICE void run_wave_by_wave(int num_blocks, Sum (&sum)[kWaves], FirstDone first_done) {
        Sum partial;
        Scales scales;
        wait(ring_, scales);
        for (int left = num_blocks;;) {
            multiply(partial, ring_, 0);
            ptx::wgmma_wait<0>();
            Fragments::promote(sum[0], partial, scales, 0);
            multiply(partial, ring_, 1);
            if (--left == 0) break;
            ptx::wgmma_wait<0>();
            release_stage(shared_, ring_.slot);
            ring_.step();
            const Scales done = scales;
            wait(ring_, scales);
            Fragments::promote(sum[1], partial, done, 1);
        }
        first_done(sum[0]);
        ptx::wgmma_wait<0>();
        release_stage(shared_, ring_.slot);
        ring_.step();
        Fragments::promote(sum[1], partial, scales, 1);
    }

    DEVICE void wait(const Ring& ring, Scales& scales) {
        ptx::barrier_wait(&shared_.full[ring.slot], ring.phase);
        scales.load(shared_.token_scales[ring.slot], shared_.weight_scales[ring.slot], part_);
    }

    DEVICE void multiply(Sum& partial, const Ring& ring, int wave) {
        const uint8_t* weights = shared_.weights[ring.slot] + wave * Fragments::kColumns * kBlockK;
        const uint8_t* tokens = shared_.tokens[ring.slot];
        const uint64_t a = ptx::wgmma_descriptor<kBlockK>(Fragments::m_operand(weights, tokens, part_));
        const uint64_t b = ptx::wgmma_descriptor<kBlockK>(Fragments::n_operand(weights, tokens, part_));
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

    Shared& shared_;
    const int warpgroup_;
    int next_ = 0;  // the warpgroup that takes the next block, where they alternate
    mma::Part part_;
    Ring ring_;
};

// The column groups [first, end) that warpgroup `warpgroup` of CTA `rank` adds up and stores, as `part` of kParts.
struct Share {
    int part = 0, first = 0, end = kColumnGroups;

    DEVICE Share(uint32_t rank, int warpgroup) {
        if constexpr (kParts > 1) {
            part = kAlternate ? (kSplitK ? rank * kMathWarpgroups : 0) + warpgroup : rank;
            first = ceil_div(part * kColumnGroups, kParts), end = ceil_div((part + 1) * kColumnGroups, kParts);
        }
    }
};

// Adds the parts of the tile, in the order of their numbers: every warpgroup sends each other its share and gets its own. What
// this does to groups of other shares has no meaning. (No branch depends on whose a group is: where each has one group the
// compiler would index `sum` by it, and put it in local memory.)
DEVICE void add_parts(Shared& shared, Fragments::Sum& sum, int warpgroup, const Share& share, uint32_t phase) {
    const int thread = mma::warpgroup_thread();
    if (thread == 0) {
        ptx::barrier_arrive_expect(&shared.parts_full[warpgroup],
                                   (kParts - 1) * (share.end - share.first) * kWarpgroup * sizeof(float4));
    }
    ptx::barrier_wait(&shared.parts_free, phase ^ 1);
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
        const int to = j * kParts / kColumnGroups, slot = j - ceil_div(to * kColumnGroups, kParts);
        const int target = kAlternate ? to % kMathWarpgroups : warpgroup, from = share.part - (share.part > to);
        ptx::store_cluster_async(to != share.part,
                                 &shared.parts[target][(from * kMostShare + slot) * kWarpgroup + thread],
                                 make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]),
                                 &shared.parts_full[target], kAlternate ? to / kMathWarpgroups : to);
    }
    ptx::barrier_wait(&shared.parts_full[warpgroup], phase);
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
        const int to = j * kParts / kColumnGroups, slot = j - ceil_div(to * kColumnGroups, kParts);
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float4 value = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
            if (part != to) value = shared.parts[warpgroup][((part - (part > to)) * kMostShare + slot) * kWarpgroup + thread];
            total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
        }
        sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
    __syncwarp();
    if (lane_index() < kCluster) ptx::barrier_arrive_cluster(&shared.parts_free, lane_index());
}

// Takes this warp's group of staged tokens to memory: by TMA if all of it is to be stored, else row by row. `row` and `column`
// are the fragment's first.
DEVICE void store_staged(const GemmParams& p, const uint8_t* staging, int row, int column,
                         const Fragments::Region& region) {
    constexpr int kGroups = Fragments::kStagedTokens / kStoredTokens;
    constexpr int kBoxBytes = Fragments::kStagedTokens * mma::kStagedBytes;
    const int warp = mma::warpgroup_thread() / kWarp, lane = mma::fresh_lane();
    const int first = warp * kStoredTokens, from = max(region.begin, first), to = min(region.end, first + kStoredTokens);
    if (warp >= kGroups) return;
    const int left = region.left, right = min(region.right, p.n - column);
    if (to - from == kStoredTokens && (left | right) % 64 == 0) {
        if (left / 64 <= lane && lane < right / 64) {
            ptx::tma_store_2d(&p.out_map, staging + lane * kBoxBytes + first * mma::kStagedBytes, column + lane * 64,
                              row + first);
        }
        ptx::bulk_commit();
        return;
    }
#pragma unroll 1
    for (int token = from + lane / 8; token < to; token += kWarp / 8) {
#pragma unroll
        for (int box = 0; box < Fragments::kStagedBoxes; ++box) {
            const int at = box * 64 + lane % 8 * 8;
            if (at < left || at >= right) continue;
            const uint8_t* source =
                staging + box * kBoxBytes + token * mma::kStagedBytes + mma::staged_chunk(token, lane % 8);
            uint16_t* out = static_cast<uint16_t*>(p.out) + (row + token) * p.out_stride + column + at;
            *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(source);
        }
    }
}

DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup) {
    const uint32_t rank = cluster_rank();
    const KRange range(p, rank);
    const Share share(rank, warpgroup);
    TileReader reader(shared.tiles);
    Accumulator accumulator(shared, warpgroup);
    uint32_t parts_phase = 0;
    for (; const sched::Tile* tile = reader.next(); reader.release()) {
        const mma::Part part = Fragments::part(warpgroup, tile->end_row);
        if (part.token >= tile->end_row) {
            accumulator.skip(range.end - range.begin);
            continue;
        }
        auto store = [&](const Fragments::Sum& sum, int wave) {
            const Fragments::Region region(tile->begin_row - part.token, tile->end_row - part.token, share.first, share.end);
            const int row = tile->row + part.token, column = tile->n + part.weight + wave * Fragments::kColumns;
            if constexpr (OUT_FP32) {
                float* out = static_cast<float*>(p.out) + row * p.out_stride + column;
                Fragments::store(sum, out, p.out_stride, region, p.n - column);
            } else {
                uint8_t* staging = shared.staging[warpgroup];
                ptx::bulk_wait_read();
                Fragments::sync_staging(warpgroup);
                Fragments::stage(sum, staging);
                ptx::fence_async_proxy();
                Fragments::sync_staging(warpgroup);
                store_staged(p, staging, row, column, region);
            }
        };
        Fragments::Sum sum[kWaves];
        accumulator.run(range.end - range.begin, part, sum, [&](const Fragments::Sum& first) { store(first, 0); });
        if constexpr (kParts > 1) {
            add_parts(shared, sum[0], warpgroup, share, parts_phase);
            parts_phase ^= 1;
        }
        if (kWaves == 1 || part.columns == Fragments::kColumns) {
            store(sum[0], 0);
        } else {
            store(sum[kWaves - 1], 1);
        }
    }
    ptx::bulk_wait_read();
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    gemm_fp8(const __grid_constant__ GemmParams p) {
    using namespace moe_fp8;
    extern __shared__ __align__(1024) uint8_t dynamic[];  // with no static shared memory it starts at such an address
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);

    const int warp = warp_index();
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&p.a);
        ptx::prefetch_tensor_map(&p.a_scale);
        ptx::prefetch_tensor_map(&p.b);
        if constexpr (!OUT_FP32) ptx::prefetch_tensor_map(&p.out_map);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(&shared.full[stage], 2);  // a producer each of operands and of weight scales
            ptx::barrier_init(&shared.empty[stage], (kAlternate ? 1 : kMathWarpgroups) * 4 * kClusterM * kClusterN);
        }
        shared.tiles.init();
        for (int warpgroup = 0; warpgroup < kMathWarpgroups; ++warpgroup) ptx::barrier_init(&shared.parts_full[warpgroup], 1);
        ptx::barrier_init(&shared.parts_free, kMathWarpgroups * 4 * kCluster);
        ptx::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) ptx::cluster_barrier();

    if (warp < 4) {
        ptx::registers_release<40>();
        if (warp == 0) produce(p, shared);
        if (warp == 1) produce_scales(p, shared);
        if (warp == 2) walk_tiles(p, shared);
    } else {
        ptx::registers_acquire<232>();
        consume(p, shared, warp / 4 - 1);
    }

    // A peer may still copy into this CTA's stages or arrive on its barriers.
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_barrier();
    }
}
