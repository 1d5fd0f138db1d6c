// Copies each token to a row for each expert that it goes to. The rows of an expert follow one another, and so do the experts, in
// order and without gaps. A row is FP8 with MN-major scales of 1 x 128 groups, as a grouped GEMM reads it. The input is FP8 with
// scales, or bf16 that is quantized here (common/quantize.cuh).
//
//   e = expert_map[ids[t, j]], or ids[t, j] without a map; ids and experts outside of 0 to their number - 1 are left out
//   rows[t, j] = the number of (t', j') with a smaller e, or with the same e before (t, j); -1 if (t, j) is left out
//   offsets[e] = the number of (t', j') with a smaller e
//
// One launch does everything: each CTA counts all ids, which are few beside the rows, and places those of its own tokens. So the
// order does not depend on time, and nothing has to be cleared before. If tokens are few, several CTAs divide the groups of a
// token. The first values of x are on their way while a CTA counts.
//
// Shared memory: every thread adds to `counts` and `earlier`, then the CTA waits, and `counts` is overwritten by its prefix sums
// where each thread has read only its own elements. `experts` and `places` are written by one thread for each (t, j) and read after a
// wait.
//
// The kernel is specialized by IN_FP8, POWER_OF_TWO (of bf16 input) and WIDE_IDS (int64).
#pragma once

#include "common/quantize.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"
#include "ptx/sync.cuh"

struct MoePermuteParams {
    const void* x;
    const float* x_scale;    // of FP8 input
    const void* ids;         // [num_tokens, topk]
    const int* expert_map;   // [num_ids], or null
    uint8_t* a;              // [rows, k] contiguous
    float* a_scale;
    int* offsets;            // [num_experts + 1]
    int* rows;               // [num_tokens, topk] contiguous
    int64_t x_stride;        // elements between rows of x
    int64_t x_scale_stride;  // elements between rows of x_scale
    int64_t x_group_stride;  // elements between groups of x_scale
    int64_t ids_stride;      // elements between rows of ids
    int64_t a_scale_stride;  // elements between groups of a_scale
    int num_tokens;
    int topk;
    int k;
    int num_experts;
    int num_ids;             // experts of all ranks, which ids count
    int tokens;              // tokens of a CTA
    int splits;              // CTAs that divide the groups of the same tokens
};

namespace moe_fp8 {

// A CTA has at most so many places for rows of its tokens; specs.py divides tokens accordingly.
constexpr int kPlaces = 512;
constexpr int kMaxExperts = 1024;
constexpr int kWarps = NUM_THREADS / kWarp;
// Each thread holds one load of 16 bytes, which are so many values of x.
constexpr int kValues = IN_FP8 ? 16 : kQuantizeValues;
static_assert(NUM_THREADS % kWarp == 0 && CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");
static_assert(kMaxExperts % NUM_THREADS == 0, "each thread scans as many experts");

// If a thread has at most so many ids, it loads all of them before it looks at them, and so waits only once.
constexpr int kIds = 8;

// Returns the j-th id of a token, or -1 if it is out of range.
DEVICE int id_of(const MoePermuteParams& p, int token, int j) {
    const int64_t at = token * p.ids_stride + j;
    const int64_t id = WIDE_IDS ? static_cast<const int64_t*>(p.ids)[at] : static_cast<const int*>(p.ids)[at];
    return id < 0 || id >= p.num_ids ? -1 : static_cast<int>(id);
}

// Returns the expert of this rank that an id names, or a negative number.
DEVICE int expert_of(const MoePermuteParams& p, int id) {
    const int expert = id < 0 || p.expert_map == nullptr ? id : p.expert_map[id];
    return expert < p.num_experts ? expert : -1;
}

// The part of a CTA: its tokens, and its groups of their columns. A thread takes every NUM_THREADS-th of its loads.
struct Part {
    int first, last, first_group, loads, items;

    DEVICE explicit Part(const MoePermuteParams& p) {
        const int block = static_cast<int>(blockIdx.x) / p.splits, split = static_cast<int>(blockIdx.x) % p.splits;
        const int groups = p.k / kBlockK;
        first = block * p.tokens, last = min(first + p.tokens, p.num_tokens);
        first_group = groups * split / p.splits;
        loads = (groups * (split + 1) / p.splits - first_group) * (kBlockK / kValues);
        items = (last - first) * loads;
    }
    DEVICE int local_token(int item) const { return item / loads; }
    DEVICE int column(int item) const { return first_group * kBlockK + item % loads * kValues; }

    // Returns the values of a load: 16 of FP8, or 8 of bf16. Behind the last load there are zeros.
    DEVICE uint4 values(const MoePermuteParams& p, int item) const {
        if (item >= items) return make_uint4(0, 0, 0, 0);
        const int64_t at = (first + local_token(item)) * p.x_stride + column(item);
        return *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) + at * (IN_FP8 ? 1 : 2));
    }
};

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS) moe_permute(const __grid_constant__ MoePermuteParams p) {
    using namespace moe_fp8;
    __shared__ int counts[kMaxExperts], earlier[kMaxExperts], experts[kPlaces], places[kPlaces];
    __shared__ uint32_t warp_sums[kWarps];
    const int thread = static_cast<int>(threadIdx.x);
    const Part part(p);
    const int first = part.first, last = part.last;

    for (int e = thread; e < kMaxExperts; e += NUM_THREADS) counts[e] = earlier[e] = 0;
    __syncthreads();
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    uint4 ahead = part.values(p, thread);

    const int own = (last - first) * p.topk;
    auto add = [&](bool before_own, int expert) {
        if (expert < 0) return;
        atomicAdd(&counts[expert], 1);
        if (before_own) atomicAdd(&earlier[expert], 1);
    };
    if (const int all = p.num_tokens * p.topk; all <= kIds * NUM_THREADS) {
        const int first_number = first * p.topk;
        int found[kIds];
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
            const int number = i * NUM_THREADS + thread;
            found[i] = number < all ? id_of(p, number / p.topk, number % p.topk) : -1;
        }
#pragma unroll
        for (int i = 0; i < kIds; ++i) found[i] = expert_of(p, found[i]);
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
            const int at = i * NUM_THREADS + thread - first_number;
            if (at >= 0 && at < own) experts[at] = found[i];
            add(at < 0, found[i]);
        }
    } else {
        for (int token = thread; token < p.num_tokens; token += NUM_THREADS) {
            for (int j = 0; j < p.topk; ++j) add(token < first, expert_of(p, id_of(p, token, j)));
        }
        for (int i = thread; i < own; i += NUM_THREADS) {
            experts[i] = expert_of(p, id_of(p, first + i / p.topk, i % p.topk));
        }
    }
    __syncthreads();

    // Each thread sums the counts of neighbouring experts, and all threads the sums.
    constexpr int kPerThread = kMaxExperts / NUM_THREADS;
    uint32_t sum = 0, total;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sum += counts[thread * kPerThread + i];
    uint32_t before = sum_before<kWarps>(sum, warp_sums, total);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int expert = thread * kPerThread + i, count = counts[expert];
        counts[expert] = static_cast<int>(before);
        if (blockIdx.x == 0 && expert < p.num_experts) p.offsets[expert] = static_cast<int>(before);
        before += count;
    }
    if (blockIdx.x == 0 && thread == 0) p.offsets[p.num_experts] = static_cast<int>(total);
    __syncthreads();

    for (int i = thread; i < own; i += NUM_THREADS) {
        const int expert = experts[i];
        int place = -1;
        if (expert >= 0) {
            place = counts[expert] + earlier[expert];
            for (int other = 0; other < i; ++other) place += experts[other] == expert;
        }
        places[i] = place;
        if (part.first_group == 0) p.rows[static_cast<int64_t>(first) * p.topk + i] = place;
    }
    __syncthreads();

    // Whole warps go round together, because a group's threads exchange values.
    for (int begin = 0; begin < part.items; begin += NUM_THREADS) {
        const int item = begin + thread;
        const bool inside = item < part.items;
        const int local = inside ? part.local_token(item) : 0, column = part.column(item);
        const int group = column / kBlockK, token = first + local;
        const bool leads = column % kBlockK == 0;
        uint4 words = ahead;
        ahead = part.values(p, item + NUM_THREADS);
        float scale = 0.0f;
        if constexpr (IN_FP8 != 0) {
            if (inside && leads) scale = p.x_scale[token * p.x_scale_stride + group * p.x_group_stride];
        } else {
            float v[kQuantizeValues];
            unpack_bf16(v, words);
            uint32_t packed[kQuantizeValues / 4];
            scale = quantize_group<kBlockK / kQuantizeValues, POWER_OF_TWO != 0>(v, packed);
            words.x = packed[0], words.y = packed[1];
        }
        if (!inside) continue;
        for (int j = 0; j < p.topk; ++j) {
            const int place = places[local * p.topk + j];
            if (place < 0) continue;
            uint8_t* target = p.a + static_cast<int64_t>(place) * p.k + column;
            if constexpr (IN_FP8 != 0) {
                *reinterpret_cast<uint4*>(target) = words;
            } else {
                *reinterpret_cast<uint2*>(target) = make_uint2(words.x, words.y);
            }
            if (leads) p.a_scale[group * p.a_scale_stride + place] = scale;
        }
    }
}
