// This file takes a math warpgroup's sum to memory: it adds the parts of a tile and stores the tile.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/tma.cuh"
#include "sched/release.cuh"

namespace moe_fp8 {

// Warpgroup `warpgroup` of CTA `rank` adds up and stores the column groups [first, end). Its own sum is part `part` of kParts
// parts.
struct OwnGroups {
    int part = 0, first = 0, end = kColumnGroups;

    DEVICE OwnGroups(uint32_t rank, int warpgroup) {
        if constexpr (kParts > 1) {
            part = kAlternate ? (kSplitK ? rank * kMathWarpgroups : 0) + warpgroup : rank;
            first = ceil_div(part * kColumnGroups, kParts), end = ceil_div((part + 1) * kColumnGroups, kParts);
        }
    }
};

DEVICE ptx::Barrier* parts_free(Shared& shared, int warpgroup) { return &shared.parts_free[kAlternate ? 0 : warpgroup]; }

// Adds the parts of the tile in the order of their numbers. Every warpgroup sends each other warpgroup the groups that the other
// owns, and gets the groups that it owns itself. The groups of others have no meaning in `sum` afterwards. (No branch depends on
// whose a group is. If each warpgroup owns one group, the compiler would index `sum` by that group and put `sum` in local memory.)
DEVICE void add_parts(Shared& shared, Fragments::Sum& sum, int warpgroup, const OwnGroups& groups, uint32_t phase) {
    const int thread = mma::warpgroup_thread();
    ptx::Barrier* free = parts_free(shared, warpgroup);
    ptx::barrier_wait(free, phase ^ 1);
    if (kCluster > 1 && ptx::elect_one() && thread < kWarp) {
        ptx::barrier_arrive_expect(&shared.parts_full[warpgroup],
                                   (kParts - 1) * (groups.end - groups.first) * kWarpgroup * sizeof(float4));
    }
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
        const int to = j * kParts / kColumnGroups, slot = j - ceil_div(to * kColumnGroups, kParts);
        const int target = kAlternate ? to % kMathWarpgroups : warpgroup, from = groups.part - (groups.part > to);
        float4* there = &shared.parts[target][(from * kMostGroups + slot) * kWarpgroup + thread];
        const float4 value = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
        if constexpr (kCluster > 1) {
            ptx::store_cluster_async(to != groups.part, there, value, &shared.parts_full[target],
                                     kAlternate ? to / kMathWarpgroups : to);
        } else {
            ptx::store_if(to != groups.part, there, value);
        }
    }
    if constexpr (kCluster == 1) ptx::barrier_arrive(&shared.parts_full[1 - warpgroup]);
    ptx::barrier_wait(&shared.parts_full[warpgroup], phase);
    float read[kColumnGroups];  // one word of each group, whose four words are loaded at once
#pragma unroll
    for (int j = 0; j < kColumnGroups; ++j) {
        const int to = j * kParts / kColumnGroups, slot = j - ceil_div(to * kColumnGroups, kParts);
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float4 value = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
            const int from = part - (part > to);
            if (part != to) value = shared.parts[warpgroup][(from * kMostGroups + slot) * kWarpgroup + thread];
            total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
        }
        read[j] = total.x;
        sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
    if constexpr (kCluster > 1) {
        sched::release_cluster<kCluster>(free, read);
    } else {
        sched::release_each(free, read);
    }
}

// Takes this warp's tokens of a bf16 fragment through `staging` to memory: by TMA if all of the tokens are to be stored, else row
// by row. `row` and `column` are the fragment's first row and column.
template <typename Fragments>
DEVICE void store_staged(const GemmParams& p, const typename Fragments::Sum& sum, uint8_t* staging, int row, int column,
                         const typename Fragments::Region& region) {
    const int warp = mma::warpgroup_thread() / kWarp, lane = ptx::fresh_lane();
    const int first = warp * kStoredTokens, from = max(region.begin, first), to = min(region.end, first + kStoredTokens);
    constexpr int kBoxRows = Fragments::kBoxRows, kBoxBytes = Fragments::kBoxBytes, kChunks = kBoxBytes / 16;
    constexpr int kStagedBoxBytes = Fragments::kStagedBoxBytes;
    const int left = region.left, right = min(region.right, p.n - column);
    // (The compiler must know that the warp stays together, or the main loop's addresses leave the uniform registers.)
    const bool whole = ptx::uniform(to - from == kStoredTokens && (left | right) % kBoxRows == 0);
    ptx::bulk_wait_read();
    __syncwarp();
    Fragments::stage(sum, staging);
    ptx::fence_async_proxy();
    __syncwarp();
    if (whole) {
        // (If each box had a lane of its own, the compiler would put a loop over lanes around the store: 250 cycles a box.)
        if (ptx::elect_one()) {
#pragma unroll
            for (int box = 0; box < Fragments::kBoxes; ++box) {
                const int at = box * kBoxRows;
                if (at < left || at >= right) continue;
                ptx::tma_store_2d(&p.out_map, staging + box * kStagedBoxBytes + first * kBoxBytes, column + at, row + first);
            }
        }
        ptx::bulk_commit();
        return;
    }
#pragma unroll 1
    for (int token = from + lane / kChunks; token < to; token += kWarp / kChunks) {
#pragma unroll
        for (int box = 0; box < Fragments::kBoxes; ++box) {
            const int at = box * kBoxRows + lane % kChunks * 8;
            if (at < left || at >= right) continue;
            const uint8_t* source = staging + box * kStagedBoxBytes + token * kBoxBytes +
                                    mma::staged_chunk<kBoxBytes>(token, lane % kChunks);
            uint16_t* out = static_cast<uint16_t*>(p.out) + (row + token) * p.out_stride + column + at;
            *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(source);
        }
    }
}

#if !SILU_MUL
// Stores fragment `wave` of this warpgroup's part of `tile`, or the column groups of it that the warpgroup owns.
DEVICE void store_fragment(const GemmParams& p, Shared& shared, const sched::TileRecord& tile, mma::Owned owned, int wave,
                           int warpgroup, const Fragments::Sum& sum) {
    const OwnGroups groups(cluster_rank(), warpgroup);  // worked out anew, so as to take no registers over the main loop
    const Fragments::Region region(tile.begin_row - owned.token, tile.end_row - owned.token, groups.first, groups.end);
    const int row = (sched::kKGrouped<kLayout> ? tile.expert * p.m : 0) + tile.row + owned.token;
    const int column = tile.n + owned.weight + wave * Fragments::kWaveRows;
    if constexpr (kStaged) {
        store_staged<Fragments>(p, sum, shared.staging[warpgroup], row, column, region);
    } else {
        Out* out = static_cast<Out*>(p.out) + row * p.out_stride + column;
        Fragments::store(sum, out, p.out_stride, region, p.n - column, p.accumulate);
    }
}
#endif

}  // namespace moe_fp8
