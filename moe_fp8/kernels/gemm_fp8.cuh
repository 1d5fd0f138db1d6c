// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// The grid is persistent. In each CTA one warp walks its tiles, one feeds a ring of stages by TMA, one adds the weights'
// scales, two math warpgroups share every tile (mma/fragments.cuh says how), and one warp takes finished tiles to memory.
//
// A cluster either shares operands by multicast (weights or tokens: each CTA loads a part of them for all) or shares one
// tile along K: each CTA sums a part of K, and the parts are added in the order of rank, so that results repeat bit for bit.
//
// Specialised by: LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, CLUSTER_SHARES (0 tokens, 1
// weights, 2 the tile, along K), OUT_FP32, MAX_EXPERTS; M, N, K and the number of experts are run-time values.
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

#if BLOCK_M == 128
using Fragments = mma::TokensOnM<kBlockM, kBlockN>;
#else
using Fragments = mma::WeightsOnM<kBlockM, kBlockN>;
#endif
constexpr int kWaves = Fragments::kWaves;
constexpr int kScaleBlocks = kBlockN / 128;  // of the weights, in a tile

constexpr int kMathWarpgroups = 2;
static_assert(!kSplitK || BLOCK_M < 128, "parts are dealt by groups of tokens");
static_assert(NUM_THREADS == kWarpgroup * (1 + kMathWarpgroups), "one producer warpgroup");

using Table = sched::SegmentTable<MAX_EXPERTS>;
using Walk = sched::TileWalk<kLayout, kBlockM, kBlockN, kClusterM, kClusterN, kClusterK, MAX_EXPERTS>;
// Who reads tiles: both producers, the math warps and, for bf16, the storing warp (fp32 leaves from the registers).
constexpr int kTileReaders = 2 + kMathWarpgroups * 4 + (OUT_FP32 ? 0 : 1);
using Tiles = sched::TileRing<kTileReaders>;
using TileWriter = sched::TileWriter<kTileReaders>;
using TileReader = sched::TileReader<kTileReaders>;

struct Shared {
    uint8_t weights[kStages][kBlockN * kBlockK];
    uint8_t tokens[kStages][kBlockM * kBlockK];
    alignas(128) float token_scales[kStages][align_up(kBlockM, 32)];
    alignas(8) float weight_scales[kStages][kScaleBlocks];
    alignas(128) uint8_t staging[kBlockM * Fragments::kPitch];
    // Parts of the sum for the peers, [column group][thread]; a single element where K is not split.
    alignas(16) float4 parts[kMathWarpgroups][kSplitK ? Fragments::kColumns / 8 * kWarpgroup : 1];
    Table table;
    Tiles tiles;
    ptx::Barrier staged;    // the math warps have filled `staging`
    ptx::Barrier unstaged;  // the storing warp has emptied it
    ptx::Barrier parts_full;  // every CTA of the cluster has published its part
    ptx::Barrier parts_free;  // every CTA has read this one's
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

// Copies the stages of one tile; one thread.
DEVICE void load_tile(const GemmParams& p, Shared& shared, const sched::Tile tile, uint32_t rank, Ring& ring) {
    const int num_k_blocks = p.k / kBlockK;
    const uint16_t everyone = (1 << kCluster) - 1;
    const int scale_column = kLayout == sched::Layout::kMasked ? tile.expert * num_k_blocks : 0;
    const int weight_row = tile.expert * p.n + tile.n;
    const KRange range(p, rank);
    for (int block = range.begin; block < range.end; ++block, ring.step()) {
        const uint32_t stage = ring.slot;
        ptx::Barrier* full = &shared.full[stage];
        ptx::barrier_wait(&shared.empty[stage], ring.phase ^ 1);
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
    }
}

DEVICE void walk_tiles(const GemmParams& p, Shared& shared) {
    Walk walk(shared.table, p.index, p.num_experts, p.m, p.n, cluster_rank());
    TileWriter writer(shared.tiles);
    sched::Tile tile;
    while (walk.next(tile)) writer.push(tile);
    writer.finish();
}

// The warp stays together around its first lane, which issues the copies. Not an elected lane: the ring's position is that
// lane's alone, and the compiler may repeat an election.
DEVICE void produce(const GemmParams& p, Shared& shared) {
    TileReader reader(shared.tiles);
    Ring ring;
    while (const sched::Tile* tile = reader.next()) {
        if (lane_index() == 0) load_tile(p, shared, *tile, cluster_rank(), ring);
        reader.release();
    }
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
    DEVICE explicit Accumulator(Shared& shared) : shared_(shared) {}

    DEVICE void run(int num_blocks, mma::Part part, Fragments::Sum (&sum)[kWaves]) {
        part_ = part;
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
            for (int i = 0; i < Fragments::kColumns / 2; ++i) sum[wave][i] = 0.0f;
        }
        if (kWaves == 1 || part.columns == Fragments::kColumns) {
            run_block_by_block(num_blocks, sum[0]);
        } else {
            run_wave_by_wave(num_blocks, sum);
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
            ahead.step();
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
        ring_.step();
    }

    // Two fragments, which leave no registers for a second partial sum: one warpgroup promotes while the other multiplies.
    DEVICE void run_wave_by_wave(int num_blocks, Sum (&sum)[kWaves]) {
        Sum partial;
        Scales scales;
        wait(ring_, scales);
        for (int left = num_blocks;;) {
            multiply(partial, ring_, 0);
            ptx::wgmma_wait<0>();
            Fragments::promote(sum[0], partial, scales, 0);
            multiply(partial, ring_, 1);
            ptx::wgmma_wait<0>();
            release_stage(shared_, ring_.slot);
            ring_.step();
            if (--left == 0) break;
            const Scales done = scales;
            wait(ring_, scales);
            Fragments::promote(sum[1], partial, done, 1);
        }
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
    mma::Part part_;
    Ring ring_;
};

// Tokens of a tile that this CTA stores: all, or where K is split the rank's share of the groups of eight.
DEVICE void narrow_to_rank(uint32_t rank, int& begin, int& end) {
    if constexpr (kSplitK) {
        constexpr int kGroups = Fragments::kColumns / 8;
        begin = max(begin, ceil_div(static_cast<int>(rank) * kGroups, kCluster) * 8);
        end = min(end, ceil_div(static_cast<int>(rank + 1) * kGroups, kCluster) * 8);
    }
}

// Adds the parts of the cluster's CTAs; `sum` then is whole for this rank's tokens.
DEVICE void add_parts(Shared& shared, Fragments::Sum& sum, int warpgroup, uint32_t rank, uint32_t phase) {
    constexpr int kGroups = Fragments::kColumns / 8;
    float4* mine = shared.parts[warpgroup] + mma::warpgroup_thread();
    ptx::barrier_wait(&shared.parts_free, phase ^ 1);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
        mine[j * kWarpgroup] = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
    __syncwarp();
    if (lane_index() < kCluster) ptx::barrier_arrive_cluster_release(&shared.parts_full, lane_index());
    ptx::barrier_wait_cluster(&shared.parts_full, phase);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
        if (j * kCluster / kGroups != static_cast<int>(rank)) continue;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int peer = 0; peer < kCluster; ++peer) {
            const float4 part = ptx::load_cluster(mine + j * kWarpgroup, peer);
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
    __syncwarp();
    if (lane_index() < kCluster) ptx::barrier_arrive_cluster(&shared.parts_free, lane_index());
}

DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup) {
    const uint32_t rank = cluster_rank();
    const KRange range(p, rank);
    TileReader reader(shared.tiles);
    Accumulator accumulator(shared);
    uint32_t phase = 0;
    for (; const sched::Tile* tile = reader.next(); phase ^= 1) {
        const mma::Part part = Fragments::part(warpgroup, tile->end_row);
        Fragments::Sum sum[kWaves];
        accumulator.run(range.end - range.begin, part, sum);
        if constexpr (kSplitK) add_parts(shared, sum[0], warpgroup, rank, phase);
        if constexpr (OUT_FP32) {
            int begin = tile->begin_row, end = tile->end_row;
            narrow_to_rank(rank, begin, end);
            float* out = static_cast<float*>(p.out) + tile->row * p.out_stride + tile->n;
            Fragments::store(sum, out, p.out_stride, begin, end, p.n - tile->n, part);
        } else {
            ptx::barrier_wait(&shared.unstaged, phase ^ 1);
            Fragments::stage(sum, shared.staging, part);
            __syncwarp();
            if (lane_index() == 0) ptx::barrier_arrive(&shared.staged);
        }
        reader.release();
    }
}

// One warp takes staged tiles to memory, 16 bytes a lane, while the next tile is under way.
DEVICE void store_tiles(const GemmParams& p, Shared& shared) {
    constexpr int kLanes = kBlockN / 8;  // of one token
    constexpr int kTokens = kWarp / kLanes;
    constexpr int kUnroll = 4;
    const int column = lane_index() % kLanes * 8;
    const uint8_t* staged = shared.staging + column * 2;
    TileReader reader(shared.tiles);
    uint32_t phase = 0;
    for (; const sched::Tile* tile = reader.next(); phase ^= 1) {
        int begin = tile->begin_row, end = tile->end_row;
        narrow_to_rank(cluster_rank(), begin, end);
        if (tile->n + column >= p.n) end = 0;
        uint16_t* out = static_cast<uint16_t*>(p.out) + tile->row * p.out_stride + tile->n + column;
        reader.release();
        ptx::barrier_wait(&shared.staged, phase);
        for (int token = begin + lane_index() / kLanes; token < end; token += kTokens * kUnroll) {
            uint4 values[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const int row = min(token + i * kTokens, kBlockM - 1);
                values[i] = *reinterpret_cast<const uint4*>(staged + row * Fragments::kPitch);
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const int row = token + i * kTokens;
                if (row < end) *reinterpret_cast<uint4*>(out + row * p.out_stride) = values[i];
            }
        }
        __syncwarp();
        if (lane_index() == 0) ptx::barrier_arrive(&shared.unstaged);
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
            ptx::barrier_init(&shared.full[stage], 2);  // a producer each of operands and of weight scales
            ptx::barrier_init(&shared.empty[stage], kMathWarpgroups * 4 * kClusterM * kClusterN);
        }
        shared.tiles.init();
        ptx::barrier_init(&shared.staged, kMathWarpgroups * 4);
        ptx::barrier_init(&shared.unstaged, 1);
        ptx::barrier_init(&shared.parts_full, kMathWarpgroups * 4 * kCluster);
        ptx::barrier_init(&shared.parts_free, kMathWarpgroups * 4 * kCluster);
        ptx::fence_barrier_init();
    }
    ptx::grid_dependency_wait();
    if constexpr (kLayout != sched::Layout::kDense && kLayout != sched::Layout::kMIndices) {
        if (warp == 1) {
            sched::build_segment_table<kLayout, kBlockM * kClusterM>(shared.table, p.index, p.num_experts, p.m);
        }
    }
    __syncthreads();
    if constexpr (kCluster > 1) ptx::cluster_barrier();

    if (warp < 4) {
        ptx::registers_release<40>();
        if (warp == 0) produce(p, shared);
        if (warp == 1) produce_scales(p, shared);
        if (warp == 2) walk_tiles(p, shared);
        if (warp == 3 && !OUT_FP32) store_tiles(p, shared);
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
