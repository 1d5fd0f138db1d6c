// What the threads of a CTA share, and the barriers and sums among them.
#pragma once

#include "common/scan.cuh"
#include "ptx/sync.cuh"
#include "topk/slice.cuh"

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
    // Candidates, in no order: keys and, behind them, numbers within the slice. A sample's keys take the room of both.
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
