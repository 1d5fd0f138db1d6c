// This file writes the chosen columns in ascending order. Windows of the slice become two bitmaps: one of the logits above the
// threshold, and one of the logits at it. Counting their bits gives every chosen logit its place, and tells which of the equal
// logits come first.
#pragma once

#include "topk/collect.cuh"

namespace moe_fp8::topk {

constexpr int kWords = kBins;  // words of a bitmap, which lies where a histogram was
constexpr int kWindowBits = 16;
static_assert(kWords * 32 == 1 << kWindowBits);

// Both bitmaps are counted at once: equal logits in the kEqualBits low bits, and at most k greater logits above these bits.
constexpr int kEqualBits = kWindowBits + 1;
static_assert(MAX_K < 1 << (32 - kEqualBits));

// Counts the logits above and at the threshold in the slices before this slice. Only clusters call it. For them it is also the
// barrier after which the histograms may be overwritten.
DEVICE void count_before(const State& state, const Slice& slice, const Threshold& threshold, bool listed, int count,
                         int rank, uint32_t& greater, uint32_t& equal) {
    uint32_t own_greater = 0, own_equal = 0;
    const auto visit = [&](bool valid, uint32_t key) {
        own_greater += valid && key > threshold.key;
        own_equal += valid && key == threshold.key;
    };
    if (listed) {
        Listed{state, count}.each(visit);
    } else {
        Whole{slice}.each(visit);
    }
    __syncwarp();
    own_greater = __reduce_add_sync(0xffffffffu, own_greater);
    own_equal = __reduce_add_sync(0xffffffffu, own_equal);
    if (lane_index() == 0) {
        atomicAdd(state.greater, own_greater);
        atomicAdd(state.equal, own_equal);
    }
    row_sync();
    greater = equal = 0;
#pragma unroll
    for (int r = 0; r < kCluster - 1; ++r) {
        if (r < rank) {
            greater += ptx::load_cluster(state.greater, r);
            equal += ptx::load_cluster(state.equal, r);
        }
    }
}

// Marks the chosen logits of one window: bit n of `above` (and of `at`) is logit window * 65536 + n. A logit at the threshold is
// marked only if there are ties to take.
struct Mark {
    const Threshold& threshold;
    uint32_t window;
    uint32_t* above;
    uint32_t* at;

    DEVICE void set(uint32_t number, uint32_t key) const {
        if (number >> kWindowBits != window) return;
        uint32_t* map = key > threshold.key ? above : at;
        if (key > threshold.key || (key == threshold.key && threshold.ties > 0)) {
            atomicOr(&map[number / 32 % kWords], 1u << number % 32);
        }
    }

    template <int kCount>
    DEVICE void operator()(bool valid, uint32_t number, const float (&values)[kCount]) const {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            if (valid) set(number + j, key_of(values[j]));
        }
    }

    DEVICE void all(const State& state, const Slice& slice, bool listed, int count) const {
        if (listed) {
            for (int i = threadIdx.x; i < count; i += kThreads) set(state.numbers[i], state.keys[i]);
            return;
        }
        constexpr int kVectors = (1 << kWindowBits) / kVector;
        const int first = max(static_cast<int>(window) * kVectors - 1, 0);
        slice.each_vector(first, min(static_cast<int>(window + 1) * kVectors - 1, slice.num_vectors), *this);
        slice.each_at_the_edges(*this);
    }
};

// If `listed`, all logits that may be chosen are among the `count` candidates. Otherwise the slice is read once more.
DEVICE void emit(const State& state, const Slice& slice, const Threshold& threshold, bool listed, int count, int rank,
                 int* out) {
    uint32_t greater = 0, equal = 0;  // logits before the window
    if constexpr (kCluster > 1) count_before(state, slice, threshold, listed, count, rank, greater, equal);
    const uint32_t ties = static_cast<uint32_t>(threshold.ties);
    uint32_t* above = state.bins;
    uint32_t* at = state.bins + kWords;
    const uint32_t extent = slice.extent();
    for (uint32_t window = 0; window < ceil_div(extent, 1u << kWindowBits); ++window) {
        const int words = static_cast<int>(min(ceil_div(extent - (window << kWindowBits), 32u), uint32_t(kWords)));
        for (int i = threadIdx.x; i < words; i += kThreads) above[i] = at[i] = 0;
        __syncthreads();
        Mark{threshold, window, above, at}.all(state, slice, listed, count);
        __syncthreads();
        const int own = ceil_div(words, kThreads);
        const int first = static_cast<int>(threadIdx.x) * own, last = min(first + own, words);
        uint32_t sum = 0;
        for (int i = first; i < last; ++i) sum += __popc(at[i]) + (__popc(above[i]) << kEqualBits);
        uint32_t total;
        const uint32_t before = sum_before<kWarps>(sum, state.warp_sums, total);
        uint32_t greater_before = greater + (before >> kEqualBits);
        uint32_t equal_before = equal + before % (1u << kEqualBits);
        for (int i = first; i < last; ++i) {
            for (uint32_t bits = above[i] | at[i]; bits != 0; bits &= bits - 1) {
                const int bit = __ffs(static_cast<int>(bits)) - 1;
                const bool is_greater = above[i] >> bit & 1;
                if (is_greater || equal_before < ties) {
                    out[greater_before + min(equal_before, ties)] =
                        static_cast<int>(slice.column + (window << kWindowBits) + i * 32 + bit);
                }
                greater_before += is_greater;
                equal_before += !is_greater;
            }
        }
        greater += total >> kEqualBits;
        equal += total % (1u << kEqualBits);
        __syncthreads();
    }
}

}  // namespace moe_fp8::topk
