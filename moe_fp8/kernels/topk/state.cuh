// The threads of a CTA share this state, and meet at this barrier.
#pragma once

#include "common/scan.cuh"
#include "ptx/sync.cuh"
#include "topk/slice.cuh"

namespace moe_fp8::topk {

constexpr int kCapacity = CAPACITY;
constexpr int kBins = 2048;
static_assert(SMEM_BYTES == kCapacity * 8 + 2 * kBins * 4, "see heuristics/topk.py");
static_assert(kThreads % kWarp == 0 && kThreads <= 1024 && kBins % (2 * kThreads) == 0);

// The bin in which the wanted key lies, and its contents.
struct Bin {
    uint32_t low, high;  // keys
    int rank;            // rank of the wanted key in the bin, 1 for the greatest key; 0: there are too few keys
    int count;           // keys in the bin
    uint32_t top;        // no key is greater
    bool overflow;       // some CTA's list is too long
};

struct State {
    // Candidates in no order: their keys and, behind the keys, their numbers within the slice. A sample's keys take the room of
    // both.
    uint32_t* keys;
    uint32_t* numbers;
    // There are two histograms here, and later two bitmaps over numbers.
    uint32_t* bins;

    uint32_t* collected;  // candidates, whether or not there was room
    uint32_t* greater;    // candidates above the threshold
    uint32_t* equal;      // candidates at the threshold
    uint32_t* warp_sums;  // [kWarps]
    Bin* bin;
};

// This is a barrier of all threads that work on the row. It orders their accesses of shared and global memory.
DEVICE void row_sync() {
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_sync();
    } else {
        __syncthreads();
    }
}

}  // namespace moe_fp8::topk
