// The search for the k-th greatest key takes histograms of ever narrower intervals of keys, and sums each histogram over the
// cluster.
#pragma once

#include "ptx/shared.cuh"
#include "topk/state.cuh"

namespace moe_fp8::topk {

// The keys [low, high] fall into kBins bins of 1 << shift keys. The last bin also takes the keys that lie above it.
struct Interval {
    uint32_t low, high;
    int shift;

    // The bins are as fine as they can be if no key above `top` matters.
    DEVICE Interval(uint32_t low_, uint32_t high_, uint32_t top) : low(low_), high(high_) {
        const uint32_t width = max(top, low) - low;
        shift = max(32 - __clz(static_cast<int>(width / kBins)), 0);
    }
};

// Keys above `key` are taken. Among the keys equal to `key`, the `ties` keys of the lowest columns are taken.
struct Threshold {
    bool found;
    uint32_t key;
    int ties;
};

// Returns the bin of the key that has rank `rank` among the keys of `source` in all CTAs. With kAggregate, lanes of equal bins add
// once, since all keys may be equal. `level` counts the calls for a row. The histogram of this level is zero at the start, and the
// other histogram is left zero.
template <bool kAggregate, typename Source>
DEVICE Bin narrow(const State& state, int level, const Interval& in, int rank, const Source& source) {
    uint32_t* bins = state.bins + level % 2 * kBins;
    uint32_t* others = state.bins + (level + 1) % 2 * kBins;
    source.each([&](bool valid, uint32_t key) {
        valid = valid && key >= in.low && key <= in.high;
        const int bin = valid ? static_cast<int>(min((key - in.low) >> in.shift, kBins - 1u)) : kBins;
        if constexpr (kAggregate) {
            const uint32_t peers = __match_any_sync(0xffffffffu, bin);
            if (valid && lane_index() == __ffs(static_cast<int>(peers)) - 1) atomicAdd(&bins[bin], __popc(peers));
        } else {
            if (valid) atomicAdd(&bins[bin], 1u);
        }
    });
    row_sync();

    // Thread 0 has the uppermost bins.
    constexpr int kOwn = kBins / kThreads;
    const int first = kBins - (static_cast<int>(threadIdx.x) + 1) * kOwn;
    uint32_t counts[kOwn] = {};
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
#pragma unroll
        for (int r = 0; r < kCluster; ++r) {
            const uint2* pair = reinterpret_cast<const uint2*>(bins + first + i);
            const uint2 theirs = kCluster > 1 ? ptx::load_cluster(pair, r) : *pair;
            counts[i] += theirs.x;
            counts[i + 1] += theirs.y;
        }
    }
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += counts[i];
    // The peers have read the other histogram: they did so before the barrier above.
    for (int i = threadIdx.x; i < kBins; i += kThreads) others[i] = 0;

    uint32_t total;
    uint32_t above = sum_before<kWarps>(sum, state.warp_sums, total);
    const uint32_t wanted = static_cast<uint32_t>(rank);
    if (threadIdx.x == 0) {
        bool overflow = false;
#pragma unroll
        for (int r = 0; r < kCluster; ++r) {
            overflow |= (kCluster > 1 ? ptx::load_cluster(state.collected, r) : *state.collected) > kCapacity;
        }
        state.bin->overflow = overflow;
        if (total < wanted) state.bin->rank = 0;
    }
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
        const int bin = first + i;
        if (counts[i] > 0 && above == 0) {
            const uint32_t upper = (static_cast<uint32_t>(bin + 1) << in.shift) - 1;
            state.bin->top = bin == kBins - 1 ? in.high : in.low + min(in.high - in.low, upper);
        }
        if (above < wanted && wanted <= above + counts[i]) {
            const uint32_t low = in.low + (static_cast<uint32_t>(bin) << in.shift);
            state.bin->low = low;
            state.bin->high = bin == kBins - 1 ? in.high : low + min(in.high - low, (1u << in.shift) - 1);
            state.bin->rank = static_cast<int>(wanted - above);
            state.bin->count = static_cast<int>(counts[i]);
        }
        above += counts[i];
    }
    __syncthreads();
    return *state.bin;
}

// Returns whether the bin of the wanted rank says which keys are taken.
DEVICE bool found(const Bin& bin, Threshold& threshold) {
    if (bin.count == bin.rank) return threshold = {true, bin.low - 1, 0}, true;  // no key is 0
    if (bin.low == bin.high) return threshold = {true, bin.low, bin.rank}, true;
    return false;
}

}  // namespace moe_fp8::topk
