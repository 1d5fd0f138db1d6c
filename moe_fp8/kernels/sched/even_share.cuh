// Work is dealt out evenly over the grid, whatever the items' sizes.
#pragma once

#include "common/scan.cuh"
#include "common/types.cuh"

namespace moe_fp8::sched {

// A CTA's run of units goes from `unit` of `item` up to, and without, `end_unit` of `end_item`.
struct Share {
    int item, unit;
    int end_item, end_unit;
};

// Each item has `units(item)` units, and the units of all items are counted in order. CTA s of g takes the units from s * total / g
// to (s + 1) * total / g. Every thread of the CTA's kThreads calls it. `share` is there after a CTA barrier. `warp_sums` has room
// for a sum of each warp.
template <int kThreads, typename Units>
DEVICE void find_share(Share& share, uint32_t* warp_sums, int num_items, Units units) {
    // In a round each thread has one item. The rounds are made once for the total, and again to find the ends, unless one round has
    // all items. (The loop keeps one copy of `units`, since instructions that run once come from memory.)
    uint32_t total = 0;
#pragma unroll 1
    for (int pass = num_items <= kThreads; pass < 2; ++pass) {
        uint32_t before = 0;
#pragma unroll 1
        for (int base = 0; base < num_items; base += kThreads) {
            const int item = base + static_cast<int>(threadIdx.x);
            const uint32_t count = item < num_items ? units(item) : 0;
            uint32_t sum;
            const uint32_t mine = before + sum_before<kThreads / kWarp>(count, warp_sums, sum);
            before += sum;
            if (num_items <= kThreads) total = sum;
            if (pass == 1) {
                const uint32_t whole = total / gridDim.x, rest = total % gridDim.x;
                const uint32_t begin = blockIdx.x * whole + blockIdx.x * rest / gridDim.x;
                const uint32_t end = (blockIdx.x + 1) * whole + (blockIdx.x + 1) * rest / gridDim.x;
                if (mine <= begin && begin < mine + count) share.item = item, share.unit = static_cast<int>(begin - mine);
                if (mine <= end && end < mine + count) share.end_item = item, share.end_unit = static_cast<int>(end - mine);
                if (threadIdx.x == 0 && base == 0) {
                    if (begin == total) share.item = num_items, share.unit = 0;
                    if (end == total) share.end_item = num_items, share.end_unit = 0;
                }
            }
            __syncthreads();
        }
        total = before;
    }
}

}  // namespace moe_fp8::sched
