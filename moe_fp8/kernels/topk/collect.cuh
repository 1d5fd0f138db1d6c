// The keys of a search come from a sample of the slice, from the candidates that pass a bound, or from the whole slice.
#pragma once

#include "topk/search.cuh"

namespace moe_fp8::topk {

// One vector in this many is sampled, or fewer vectors if the sample would not fit.
constexpr int kSampleStride = 16;

DEVICE int sample_stride(const Slice& slice) {
    return max(kSampleStride, ceil_div(slice.most_vectors, 2 * kCapacity / kVector));
}

// Returns the rank in the sample of a key that at least k keys of the row reach. It lies four standard deviations below the k-th
// key, so that one row in some ten thousand has fewer such keys and is searched the long way. If neighbours are alike, more rows
// are searched so.
DEVICE int sample_rank(int k, int stride) {
    const float expected = static_cast<float>(k) / static_cast<float>(stride);
    return static_cast<int>(expected + 4.0f * sqrtf(expected)) + 4;
}

// Stores the keys of the sample and returns their number. A CTA barrier must follow.
DEVICE int take_sample(const State& state, const Slice& slice, int stride) {
    const int vectors = slice.num_vectors / stride;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
        float values[kVector];
        unpack(slice.vectors[i * stride + stride / 2], values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) state.keys[i * kVector + j] = key_of(values[j]);
    }
    return vectors * kVector;
}

// Adds the logits of a warp whose keys are at least `bound`, if there is room. It counts them in any case.
struct Append {
    const State& state;
    uint32_t bound;
    float bound_value;

    template <int kCount>
    DEVICE void operator()(bool valid, uint32_t number, const float (&values)[kCount]) const {
        uint32_t takers[kCount];
        uint32_t total = 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            takers[j] = __ballot_sync(0xffffffffu, valid && !(values[j] < bound_value));
            total += __popc(takers[j]);
        }
        if (total == 0) return;
        if (bound_value != bound_value) {
            // No comparison with NaN tells one logit from another, but keys do.
            total = 0;
#pragma unroll
            for (int j = 0; j < kCount; ++j) {
                takers[j] = __ballot_sync(0xffffffffu, valid && key_of(values[j]) >= bound);
                total += __popc(takers[j]);
            }
        }
        const int lane = lane_index();
        uint32_t at = lane == 0 ? atomicAdd(state.collected, total) : 0;
        at = __shfl_sync(0xffffffffu, at, 0);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const uint32_t own = at + __popc(takers[j] & ((1u << lane) - 1));
            if (takers[j] >> lane & 1 && own < kCapacity) {
                state.keys[own] = key_of(values[j]);
                state.numbers[own] = number + j;
            }
            at += __popc(takers[j]);
        }
    }
};

// Collects all logits of the slice whose keys are at least `bound`. A CTA barrier must follow.
DEVICE void collect(const State& state, const Slice& slice, uint32_t bound) {
    const Append append{state, bound, bound_of(bound)};
    slice.each_vector<kBf16 ? 1 : kUnroll>(0, slice.num_vectors, append);
    slice.each_at_the_edges(append);
}

// This source has the first `count` keys of the list. Whole warps call visit(valid, key), here and in the source below.
struct Listed {
    const State& state;
    int count;

    template <typename Visit>
    DEVICE void each(Visit visit) const {
        for (int base = static_cast<int>(threadIdx.x) - lane_index(); base < count; base += kThreads) {
            const int i = base + lane_index();
            visit(i < count, i < count ? state.keys[i] : 0);
        }
    }
};

// This source has every key of the slice, from global memory.
struct Whole {
    const Slice& slice;

    template <typename Visit>
    struct Keys {
        Visit& visit;

        template <int kCount>
        DEVICE void operator()(bool valid, uint32_t, const float (&values)[kCount]) const {
#pragma unroll
            for (int j = 0; j < kCount; ++j) visit(valid, key_of(values[j]));
        }
    };

    template <typename Visit>
    DEVICE void each(Visit visit) const {
        const Keys<Visit> keys{visit};
        slice.each_vector(0, slice.num_vectors, keys);
        slice.each_at_the_edges(keys);
    }
};

}  // namespace moe_fp8::topk
