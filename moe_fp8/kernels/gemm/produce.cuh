// The warps that feed the math warps: tiles, operands and scales.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/tma.cuh"

namespace moe_fp8 {

// Copies one stage's weights, or tokens and their scales: all of them, or a half for both CTAs of a pair.
DEVICE void load_weights(const GemmParams& p, Shared& shared, const sched::Tile& tile, uint32_t rank, uint32_t stage,
                         int block) {
    const int row = tile.expert * p.n + tile.n;
    ptx::Barrier* full = &shared.full[stage];
    uint8_t* weights = shared.weights[stage];
    // Weights of tiles with many tokens are read again for other tokens.
    constexpr ptx::CacheHint kHint = kBlockM < 128 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal;
    if (kPaired && tile.common == sched::Common::kWeights) {
        ptx::tma_load_2d_multicast(&p.b, full, weights + rank * kWeightBox * kBlockK, block * kBlockK,
                                   row + rank * kWeightBox, kEveryone, kHint);
        return;
    }
#pragma unroll
    for (int i = 0; i < kBlockN; i += kWeightBox) {
        ptx::tma_load_2d(&p.b, full, weights + i * kBlockK, block * kBlockK, row + i, kHint);
    }
}

DEVICE void load_tokens(const GemmParams& p, Shared& shared, const sched::Tile& tile, uint32_t rank, uint32_t stage,
                        int block) {
    const int scale_row = (kLayout == sched::Layout::kMasked ? tile.expert * (p.k / kBlockK) : 0) + block;
    ptx::Barrier* full = &shared.full[stage];
    uint8_t* tokens = shared.tokens[stage];
    float* scales = shared.token_scales[stage];
    constexpr ptx::CacheHint kHint = ptx::CacheHint::kEvictLast;
    if (kPaired && tile.common == sched::Common::kTokens) {
        const int first = rank * kTokenBox;
        ptx::tma_load_2d_multicast(&p.a, full, tokens + first * kBlockK, block * kBlockK, tile.row + first, kEveryone, kHint);
        ptx::tma_load_2d_multicast(&p.a_scale, full, scales + first, tile.scale_row + first, scale_row, kEveryone, kHint);
        return;
    }
#pragma unroll
    for (int i = 0; i < kBlockM; i += kTokenBox) {
        ptx::tma_load_2d(&p.a, full, tokens + i * kBlockK, block * kBlockK, tile.row + i, kHint);
        ptx::tma_load_2d(&p.a_scale, full, scales + i, tile.scale_row + i, scale_row, kHint);
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
    // Until the other CTA of a pair has released all stages here: its arrivals must find this CTA's barriers.
    if (kPaired && lane_index() == 0) {
        for (int i = 0; i < kStages; ++i, ring.step()) ptx::barrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
    }
    __syncwarp();
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

}  // namespace moe_fp8
