// Even shares on the host (cta_host.h): for random items the shares of all CTAs must meet, cover every unit once and differ by at
// most one. Prints what is wrong; the exit code is 1 then.
#include "host.h"

#include "sched/even_share.cuh"

namespace {

using host::random_bits;
using moe_fp8::sched::Share;

bool holds(const std::vector<int>& units, int grid, std::vector<host::Fiber>& fibers) {
    gridDim.x = grid;
    long total = 0;
    std::vector<long> before;
    for (int count : units) before.push_back(total), total += count;
    before.push_back(total);
    long end_before = 0, least = total, most = 0;
    for (int cta = 0; cta < grid; ++cta) {
        Share share{-1, -1, -1, -1};
        unsigned warp_sums[NUM_THREADS / 32];
        host::run(cta, fibers, [&] {
            moe_fp8::sched::find_share<NUM_THREADS>(share, warp_sums, static_cast<int>(units.size()), [&](int item) { return units[item]; });
        });
        // What a CTA does: from its first item's unit on, item by item.
        long taken = 0;
        const long begin = before[share.item] + share.unit;
        for (int item = share.item; item < share.end_item || (item == share.end_item && share.end_unit > 0); ++item) {
            const int from = item == share.item ? share.unit : 0, to = item == share.end_item ? share.end_unit : units[item];
            taken += std::max(to - from, 0);
        }
        const long end = before[share.end_item] + share.end_unit;
        if (begin != end_before || taken != end - begin) {
            std::printf("%zu items, %ld units, CTA %d of %d: from %ld (%ld before) to %ld, but %ld taken\n", units.size(), total,
                        cta, grid, begin, end_before, end, taken);
            return false;
        }
        end_before = end, least = std::min(least, taken), most = std::max(most, taken);
    }
    if (end_before != total || most - least > 1) {
        std::printf("%zu items, %d CTAs: %ld of %ld units, shares of %ld to %ld\n", units.size(), grid, end_before, total, least, most);
        return false;
    }
    return true;
}

}  // namespace

int main() {
    std::vector<host::Fiber> fibers = host::fibers();
    for (int round = 0; round < CASES; ++round) {
        // One round of the threads, and several; items without units among them, and nothing else.
        std::vector<int> units(1 + random_bits() % (round % 3 == 0 ? 4 * NUM_THREADS : NUM_THREADS));
        for (int& count : units) count = round % 7 == 0 || random_bits() % 3 == 0 ? 0 : random_bits() % (round % 2 ? 5 : 4000);
        if (!holds(units, 1 + random_bits() % 40, fibers)) return 1;
    }
    // The largest total that there may be: the checks refuse calls beyond (mqa_most_queries in heuristics/mqa.py).
    for (int items : {NUM_THREADS, 3 * NUM_THREADS}) {
        std::vector<int> units(items, static_cast<int>((1L << 32) / items));
        units.back() += static_cast<int>((1L << 32) - 1 - static_cast<long>(items) * units[0]);
        for (int grid : {1, 7, 132}) {
            if (!holds(units, grid, fibers)) return 1;
        }
    }
    return 0;
}
