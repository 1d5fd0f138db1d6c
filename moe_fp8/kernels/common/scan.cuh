// Prefix sums over the threads of a CTA.
#pragma once

#include "common/types.cuh"

namespace moe_fp8 {

// Returns the sum over the threads before this thread, in a CTA of kWarps warps. `total` gets the sum over all threads. Every
// thread calls it. `warp_sums` has room for kWarps sums, and a CTA barrier stands between two calls with the same `warp_sums`.
template <int kWarps>
DEVICE uint32_t sum_before(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
    static_assert(kWarps <= kWarp, "a lane for each warp");
    const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarp;
    uint32_t inclusive = value;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const uint32_t below = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (lane >= distance) inclusive += below;
    }
    if (lane == kWarp - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    const uint32_t other = lane < kWarps ? warp_sums[lane] : 0;
    total = __reduce_add_sync(0xffffffffu, other);
    return __reduce_add_sync(0xffffffffu, lane < warp ? other : 0) + inclusive - value;
}

}  // namespace moe_fp8
