// The warps that feed the math warps: tiles, operands and scales.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/tma.cuh"

namespace moe_fp8 {

// These are the rows of a tile's tokens and weights that are copied.
DEVICE int copied_tokens(const Tile& tile) {
    return kBlockM > kTokenBox ? max(align_up(tile.end_row, kTokenBox), kTokenBox) : kBlockM;
}
// The last of a tile's boxes ends with the tile's last token. So it copies some tokens of the box before once more, and not rows behind
// the tensor, for which TMA takes 4 cycles and more each. (Boxes of 8 tokens keep the swizzle of a stage.)
DEVICE int last_box(const Tile& tile) { return align_up(tile.end_row, 8) - kTokenBox; }
DEVICE int copied_weights(const Tile& tile) { return kPieces ? tile.width : kBlockN; }

DEVICE uint32_t stage_bytes(const Tile& tile) {
    return (copied_weights(tile) + copied_tokens(tile)) * kBlockK + (kBlockM + (kRowScales ? kBlockN : 0)) * sizeof(float);
}

// The CTAs of a pair take turns to copy the operand that they have in common. Each copies it for both.
DEVICE bool others_turn(uint32_t rank, int block) { return (block & 1) != static_cast<int>(rank); }

// Returns the number of stages whose weights the walking warp copies. If it does not wait for the kernel before, it copies them
// while that kernel ends. If it waits, or if tokens are many, more stages would only compete with the first tokens. (A dense kernel
// seldom waits, so it does not ask whether it waits.)
DEVICE int stages_ahead(const GemmParams& p, const Tile& tile) {
    const bool all = kBlockM < 128 && (kLayout == sched::Layout::kDense || p.constant_weights);
    return min(all ? kStages : 2, tile.k_range.count());
}

// The weights of tiles with many tokens are read again for other tokens. The tokens are read again for other weights, so they stay
// in L2 longer. If experts have few tokens, the tokens that stay in L2 would only be in the way of the next kernel.
constexpr bool kReadAgain = kBlockM >= 128;
constexpr bool kKeepTokens = kReadAgain || kLayout == sched::Layout::kDense;

// Copies a box into this CTA's stage, or into the stages of both CTAs of a pair if they have it in common.
DEVICE void load(bool common, const TensorMap& map, ptx::Barrier& full, void* destination, int x, int y,
                 ptx::CacheHint hint) {
    if (common) {
        ptx::tma_load_2d_multicast(&map, &full, destination, x, y, kEveryone, hint);
    } else {
        ptx::tma_load_2d(&map, &full, destination, x, y, hint);
    }
}

// Copies kWeightBox weights, from row `row` on. If they have scales of single rows, the even rows come first (`mma::kWoven`).
DEVICE void load_box(bool common, const GemmParams& p, ptx::Barrier& full, uint8_t* destination, int x, int row, ptx::CacheHint hint) {
    if constexpr (kRowScales) {
        static_assert(!kRowScales || kWeightBox == mma::kWoven, "a box has the rows that are in another order together");
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            uint8_t* half = destination + odd * (kWeightBox / 2) * kBlockK;
            if (common) {
                ptx::tma_load_3d_multicast(&p.b, &full, half, x, odd, row / 2, kEveryone, hint);
            } else {
                ptx::tma_load_3d(&p.b, &full, half, x, odd, row / 2, hint);
            }
        }
    } else {
        load(common, p.b, full, destination, x, row, hint);
    }
}

// These two copy one stage's weights, and one stage's tokens with their scales.
DEVICE void load_weights(const GemmParams& p, Shared& shared, const Tile& tile, uint32_t rank, uint32_t stage, int block) {
    const bool common = kPaired && tile.common == sched::Common::kWeights;
    if (common && others_turn(rank, block)) return;
    const int row = (sched::kKGrouped<kLayout> ? 0 : tile.expert * p.n) + tile.n;
    constexpr ptx::CacheHint kHint = kReadAgain ? ptx::CacheHint::kNormal : ptx::CacheHint::kEvictFirst;
#pragma unroll
    for (int i = 0; i < kBlockN; i += kWeightBox) {
        if (i >= copied_weights(tile)) break;
        load_box(common, p, shared.full[stage], shared.weights[stage] + i * kBlockK, block * kBlockK, row + i, kHint);
    }
#if ROW_SCALES
    load(common, p.b_scale_map, shared.full[stage], shared.weight_scales[stage], tile.n, block, kHint);
#endif
}

DEVICE void load_tokens(const GemmParams& p, Shared& shared, const Tile& tile, uint32_t rank, uint32_t stage, int block) {
    const bool common = kPaired && tile.common == sched::Common::kTokens;
    if (common && others_turn(rank, block)) return;
    const int scale_row = (kLayout == sched::Layout::kMasked ? tile.expert * (p.k / kBlockK) : 0) + block;
    ptx::Barrier& full = shared.full[stage];
    constexpr ptx::CacheHint kHint = kKeepTokens ? ptx::CacheHint::kEvictLast : ptx::CacheHint::kNormal;
#pragma unroll
    for (int i = 0; i < kBlockM; i += kTokenBox) {
        if (i >= copied_tokens(tile)) break;
        const int token = i == 0 ? 0 : min(i, last_box(tile));
        load(common, p.a, full, shared.tokens[stage] + token * kBlockK, block * kBlockK, tile.row + token, kHint);
    }
    load(common, p.a_scale, full, shared.token_scales[stage], tile.scale_row, scale_row, kHint);
}

// If a cluster shares tiles along K, its CTAs must meet before they send parts. Every warp takes part exactly once: it makes a
// `Meeting` for its role, and joins it when the role first says so, or else when the role has ended. The walking and the producing warp
// join when the first stages are on their way. They do not wait until their end, since they may need math warps to get there.
class Meeting {
   public:
    DEVICE Meeting() {}
    Meeting(const Meeting&) = delete;
    DEVICE ~Meeting() { join(); }

    // Whether this warp has joined, which also says that its first tile's first stages are on their way.
    DEVICE bool joined() const { return joined_; }
    DEVICE void join() {
        if (joined_) return;
        if constexpr (kSplitK) __syncwarp(), ptx::cluster_wait();
        joined_ = true;
    }

   private:
    bool joined_ = false;
};

// The first copies of a grouped GEMM wait for its index. So the index's first lines come to L2 while the kernel before ends. (Without
// this, they take 800 cycles and not 500 after that kernel.)
DEVICE void prefetch_index(const GemmParams& p) {
    if constexpr (kLayout == sched::Layout::kDense || sched::kKGrouped<kLayout>) return;
    constexpr int kLineInts = 128 / sizeof(int);
    if constexpr (Walk::kRuns) {
        // Runs are found by the first row and the last row of each block of 128.
        const int row = min(lane_index() * kSegmentAlignment, p.m - 1);
        ptx::prefetch_line(&p.index[row]);
        ptx::prefetch_line(&p.index[max(row - 1, 0)]);
    } else {
        const int count = kLayout == sched::Layout::kMIndices ? p.m : p.num_experts + (kLayout == sched::Layout::kOffsets);
        ptx::prefetch_line(&p.index[min(lane_index() * kLineInts, count - 1)]);
    }
}

// The walking warp also copies the first stages' weights, since it is the first to know which weights they are. Constant weights,
// their scales and the index do not depend on the kernel before, so the weights are on their way while that kernel ends. (Another
// warp reads the scales, for tiles that it gets from the walking warp.)
DEVICE void walk_tiles(const GemmParams& p, Shared& shared, Meeting&& meeting) {
    prefetch_index(p);
    const uint32_t rank = cluster_rank();
    Walk walk(p.index, p.num_experts, p.m, p.n, p.k / kBlockK, rank);
    if (!p.constant_weights) ptx::grid_dependency_wait();
    walk.start();
    TileWriter writer(shared.tiles);
    Tile tile;
    while (walk.next(tile)) {
#if ROW_SCALES
        if (p.accumulate && tile.k_range.count() == 0) continue;  // nothing to add
#endif
        writer.push(tile);
        if (!meeting.joined()) {
#pragma unroll 1
            for (int i = 0; i < stages_ahead(p, tile); ++i) {
                if (ptx::elect_one()) {
                    ptx::barrier_arrive_expect(&shared.full[i], stage_bytes(tile));
                    load_weights(p, shared, tile, rank, i, tile.k_range.begin + i);
                }
            }
            meeting.join();
        }
        writer.next_slot();
    }
    // (If only the destructor joined, ptxas would move the operands of the copies above through registers that are not uniform.)
    meeting.join();
    writer.finish();
}

// The whole warp goes from stage to stage and waits, and one lane of it issues the copies. (If a single lane did all of this, the
// compiler would put a loop over lanes around every copy, and each loop takes about 150 cycles.)
DEVICE void produce(const GemmParams& p, Shared& shared, Meeting&& meeting) {
    const uint32_t rank = cluster_rank();
    TileReader reader = read_tiles(p, shared, rank);
    Ring ring;
    // If the walking warp waits for the kernel before, no tile comes before that wait ends. So this warp waits here, too, and its wait
    // behind the first tile returns at once.
    if (!p.constant_weights) ptx::grid_dependency_wait();
    while (const Record* front = reader.front()) {
        const Tile tile = reader.tile(*front);
        int block = tile.k_range.begin;
        if (!meeting.joined()) {
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
#pragma unroll 1
            for (const int ahead = block + stages_ahead(p, tile); block < ahead; ++block, ring.step()) {
                if (ptx::elect_one()) load_tokens(p, shared, tile, rank, ring.slot, block);
            }
            meeting.join();
        }
        reader.pop(tile);  // after the first copies, for which the math warps wait
#pragma unroll 1
        for (; block < tile.k_range.end; ++block, ring.step()) {
            ptx::barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
            if (ptx::elect_one()) {
                ptx::barrier_arrive_expect(&shared.full[ring.slot], stage_bytes(tile));
                load_weights(p, shared, tile, rank, ring.slot, block);
                load_tokens(p, shared, tile, rank, ring.slot, block);
            }
        }
    }
    if (!meeting.joined()) ptx::grid_dependency_wait(), ptx::launch_dependents();
    // The warp waits until the other CTA of a pair has released all stages here, since the arrivals of that CTA must find this
    // CTA's barriers.
    for (int i = 0; kPaired && i < kStages; ++i, ring.step()) {
        ptx::barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
    }
}

// A second warp brings the weights' scales: a few floats a stage, for which TMA is too coarse. In each lap of the ring a lane
// stores the scales of one stage, and it reads the scales for the next lap ahead. In a pair, one lane of each math warp hands a stage back
// for all lanes. Racecheck does not know that the other lanes have read by then, but it takes asynchronous stores to be ordered by
// their barrier. So pairs store asynchronously.
DEVICE void produce_scales(const GemmParams& p, Shared& shared, Meeting&& meeting) {
    static_assert(kStages <= kWarp, "a lane for each stage");
    TileReader reader = read_tiles(p, shared, cluster_rank());
    const int num_k_blocks = p.k / kBlockK, scale_rows = ceil_div(p.n, kBlockK);
    Ring ring;
    meeting.join();
    while (const Record* front = reader.front()) {
        const Tile tile = reader.tile(*front);
        reader.pop(tile);
        const float* rows[kWeightScales];
        float next[kWeightScales];
#pragma unroll
        for (int i = 0; i < kWeightScales; ++i) {
            // (An interleaved tile has 128 gates and 128 ups. The ups' scales are the second half of the expert's scales.)
            const int in_expert = kSiluMul ? tile.n / kBlockN + i * (scale_rows / 2)
                                           : min((tile.n + i * kScaleRows) / kBlockK, scale_rows - 1);
            const int row = tile.expert * scale_rows + in_expert;
            rows[i] = p.b_scale + static_cast<int64_t>(row) * num_k_blocks;
        }
        auto load = [&](int block) {
#pragma unroll
            for (int i = 0; i < kWeightScales; ++i) next[i] = rows[i][min(block + lane_index(), tile.k_range.end - 1)];
        };
        load(tile.k_range.begin);
        for (int block = tile.k_range.begin; block < tile.k_range.end; block += kStages) {
            float scales[kWeightScales];
#pragma unroll
            for (int i = 0; i < kWeightScales; ++i) scales[i] = next[i];
            load(block + kStages);
            const int count = min(kStages, tile.k_range.end - block);
            const Ring mine = ring.ahead(min(lane_index(), kStages - 1));
            ptx::Barrier* full = &shared.full[mine.slot];
            bool done = lane_index() >= count;
            while (!__all_sync(0xffffffffu, done)) {
                if (done || !ptx::barrier_passed(&shared.empty[mine.slot], mine.phase ^ 1)) continue;
                done = true;
                float(&there)[kWeightScalesRoom] = shared.weight_scales[mine.slot];
                if constexpr (kPaired) {
                    ptx::barrier_arrive_expect(full, kWeightScales * sizeof(float));
#pragma unroll
                    for (int i = 0; i < kWeightScales; ++i) ptx::store_async(&there[i], scales[i], full);
                } else {
#pragma unroll
                    for (int i = 0; i < kWeightScales; ++i) there[i] = scales[i];
                    ptx::barrier_arrive(full);
                }
            }
            ring = ring.ahead(count);
        }
    }
}

}  // namespace moe_fp8
