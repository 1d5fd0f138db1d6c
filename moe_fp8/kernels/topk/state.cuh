// What the threads of a CTA share, and the barriers and sums among them.
#pragma once

#include "ptx/sync.cuh"
#include "topk/share.cuh"

namespace moe_fp8::topk {

constexpr int kCapacity = CAPACITY;
constexpr int kBins = 2048;
static_assert(SMEM_BYTES == kCapacity * 8 + 2 * kBins * 4, "see heuristics/topk.py");
static_assert(kThreads % kWarp == 0 && kThreads <= 1024 && kBins % (2 * kThreads) == 0);

// The bin in which the wanted key lies, and what lies in it.
struct Bin {
    uint32_t low, high;  // keys
    int rank;            // of the wanted key in the bin, from 1 at the greatest; 0: there are fewer keys than that
    int count;           // keys in the bin
    uint32_t top;        // no key is greater
    bool overflow;       // some CTA's list is too long
};

struct State {
    // Candidates, in no order: keys and, behind them, numbers within the share. A sample's keys take the room of both.
    uint32_t* keys;
    uint32_t* numbers;
    // Two histograms; later two bitmaps over numbers.
    uint32_t* bins;

    uint32_t* collected;  // candidates, whether or not there was room
    uint32_t* greater;    // candidates above the threshold
    uint32_t* equal;      // and at it
    uint32_t* warp_sums;  // [kWarps]
    Bin* bin;
};

// Sum over the threads before this one; `total` is that over all. A CTA barrier stands between two calls.
DEVICE uint32_t sum_before(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
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

// Barrier of all threads that work on the row; orders their accesses of shared and global memory.
DEVICE void row_sync() {
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_sync();
    } else {
        __syncthreads();
    }
}

}  // namespace moe_fp8::topk
