// Whole fp32 sums on their way to memory (kSumsByWarp). A math warpgroup leaves its sum in its part of `staging` and goes on to its next
// tile, and warp 1 lets TMA store the sum. If the sum is added to what memory holds, warp 1 brings that to `staging` while the tile is
// multiplied, and the math warps add there.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/tma.cuh"

namespace moe_fp8 {

using mma::kSumBoxBytes, mma::kSumColumns, mma::kSumRows;
constexpr int kSumBoxes = kBlockN / kSumColumns;

// Every math warp calls it with its part of a sum. `phase` is the warpgroup's number of tiles, modulo 2.
DEVICE void leave_sum(const GemmParams& p, Shared& shared, int warpgroup, const Fragments::Sum& sum, uint32_t& phase) {
#if ROW_SCALES
    ptx::barrier_wait(&shared.staging_free[warpgroup], phase);
    phase ^= 1;
    Fragments::leave(sum, shared.staging[warpgroup], p.accumulate != 0);
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_index() == 0) ptx::barrier_arrive(&shared.staging_full[warpgroup]);
    __syncwarp();
#endif
}

// Warp 1 calls it.
DEVICE void move_sums(const GemmParams& p, Shared& shared, Meeting&& meeting) {
#if ROW_SCALES
    TileReader reader = read_tiles(p, shared, cluster_rank());
    meeting.join();
    ptx::grid_dependency_wait();
    uint32_t phases[kMathWarpgroups] = {};
    while (const Record* front = reader.front()) {
        const Tile tile = reader.tile(*front);
        reader.pop(tile);
        if (ptx::elect_one()) ptx::bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int warpgroup = 0; warpgroup < kMathWarpgroups; ++warpgroup) {
            if (warpgroup * kSumRows >= tile.end_row || !ptx::elect_one()) continue;
            ptx::Barrier& free = shared.staging_free[warpgroup];
            if (!p.accumulate) {
                ptx::barrier_arrive(&free);
                continue;
            }
            ptx::barrier_arrive_expect(&free, kSumBoxes * kSumBoxBytes);
#pragma unroll
            for (int box = 0; box < kSumBoxes; ++box) {
                ptx::tma_load_3d(&p.out_map, &free, shared.staging[warpgroup] + box * kSumBoxBytes, tile.n + box * kSumColumns,
                                 tile.row + warpgroup * kSumRows, tile.expert, ptx::CacheHint::kEvictFirst);
            }
        }
        __syncwarp();
#pragma unroll
        for (int warpgroup = 0; warpgroup < kMathWarpgroups; ++warpgroup) {
            if (warpgroup * kSumRows >= tile.end_row) continue;
            ptx::barrier_wait(&shared.staging_full[warpgroup], phases[warpgroup]);
            phases[warpgroup] ^= 1;
            if (ptx::elect_one()) {
#pragma unroll
                for (int box = 0; box < kSumBoxes; ++box) {
                    const uint8_t* source = shared.staging[warpgroup] + box * kSumBoxBytes;
                    ptx::tma_store_3d(&p.out_map, source, tile.n + box * kSumColumns, tile.row + warpgroup * kSumRows, tile.expert);
                }
                ptx::bulk_commit();
            }
            __syncwarp();
        }
    }
    if (ptx::elect_one()) ptx::bulk_wait_read();
#endif
}

}  // namespace moe_fp8
