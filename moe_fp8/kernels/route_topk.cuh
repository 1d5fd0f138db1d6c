// Chooses the experts of each token from the router's logits. All numbers are fp32:
//
//   x = logits[t], clamped to finite numbers; NaN becomes the lowest of them
//   score = softmax(x) over all experts, or 1 / (1 + exp(-x))
//   choice = score + bias (clamped as x), or x itself without bias and with all groups
//   groups: those with the greatest sums of their two greatest choices stay, the smaller group first among equal sums
//   ids[t] = the topk experts with the greatest choices, in descending order, the smaller id first among equal choices
//   weights[t] = score[ids[t]], divided by (their sum + 1e-20) if renormalize, times scaling
//
// So ids are distinct and in range, and weights are finite, whatever the logits hold. Choices are compared as unsigned keys.
//
// A warp takes one token at a time, and lane l has the experts l, l + 32, l + 64 ... in registers. Each of the topk steps finds the
// greatest key of the warp and the smallest id that has it, and lane j keeps the result of step j. Lane j then also computes the
// weight of place j. Therefore topk is at most 32, and so is the number of groups.
//
// Shared memory: each warp has its own row of `values`, and a __syncwarp stands between its lanes' writes and other lanes' reads,
// and between these reads and the next writes. The row first holds the choices, from which lanes take the two greatest of a group,
// and then the scores, which lanes read by id.
//
// The kernel is specialized by VALUES, the experts of a lane, and IN_DTYPE. The other options are the same for all tokens, so that
// their branches cost little.
#pragma once

#include "common/types.cuh"
#include "ptx/sync.cuh"

struct RouteTopkParams {
    const void* logits;    // [num_tokens, num_experts]
    const float* bias;     // [num_experts], or null
    float* weights;        // [num_tokens, topk]
    void* ids;             // [num_tokens, topk]
    int64_t logits_stride; // elements between rows
    int64_t weights_stride;
    int64_t ids_stride;
    int num_tokens;
    int num_experts;
    int topk;
    int num_groups;
    int kept_groups;  // as many as num_groups: no groups
    int softmax;      // 0: sigmoid
    int renormalize;
    int wide_ids;     // int64
    float scaling;
};

namespace moe_fp8 {

constexpr InDtype kInDtype = static_cast<InDtype>(IN_DTYPE);
constexpr int kWarps = NUM_THREADS / kWarp;
constexpr int kExperts = VALUES * kWarp;
constexpr int kMostChosen = kWarp, kMostGroups = kWarp;
constexpr uint32_t kAllLanes = 0xffffffffu;
static_assert(NUM_THREADS % kWarp == 0 && CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");
static_assert(kInDtype == InDtype::kBf16 || kInDtype == InDtype::kFp16 || kInDtype == InDtype::kFp32, "see specs.py");

// Group numbers are (expert * ceil(2^20 / size)) >> 20, which is exact for so many experts.
constexpr int kGroupShift = 20;
static_assert(kExperts <= 1 << (kGroupShift / 2), "the rounding of the factor does not reach the next group");

DEVICE float largest() { return __uint_as_float(0x7f7fffffu); }
DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }

// fmaxf takes the number if the other operand is NaN.
DEVICE float clamp_finite(float x) { return fminf(fmaxf(x, -largest()), largest()); }

DEVICE float load_logit(const void* logits, int64_t at) {
    if constexpr (kInDtype == InDtype::kFp32) {
        return static_cast<const float*>(logits)[at];
    } else {
        const uint16_t bits = static_cast<const uint16_t*>(logits)[at];
        if constexpr (kInDtype == InDtype::kBf16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
}

// Keys sort as the values do, and -0 equals +0. The key of no number is 0.
DEVICE uint32_t key_of(float value) {
    const uint32_t bits = value == 0.0f ? 0 : __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Four maxima at once are faster than a chain in which each comparison waits for the comparison before.
DEVICE uint32_t greatest_of(const uint32_t (&key)[VALUES]) {
    static_assert(VALUES % 4 == 0, "see specs.py");
    uint32_t greatest[4] = {};
#pragma unroll
    for (int i = 0; i < VALUES; ++i) greatest[i % 4] = max(greatest[i % 4], key[i]);
    return max(max(greatest[0], greatest[1]), max(greatest[2], greatest[3]));
}

// The order of the additions is fixed, so that all lanes get the same bits in every call.
DEVICE float sum_of_warp(float value) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
}

// The machine's reciprocal is within one unit in the last place, also for infinity and for what is below the normal numbers. Other
// divisions branch for such operands, one after the other.
DEVICE float reciprocal(float x) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// The two greatest numbers that were added, -inf if there are none.
struct BestTwo {
    float first = negative_infinity();
    float second = negative_infinity();

    DEVICE void add(float value) {
        second = fmaxf(second, fminf(first, value));
        first = fmaxf(first, value);
    }
};

// The division of the experts among groups, and of the warp's lanes: 2^shift neighbouring lanes share a group.
struct Groups {
    int count, size, factor, shift;

    DEVICE explicit Groups(const RouteTopkParams& p) : count(p.num_groups), size(p.num_experts / p.num_groups) {
        factor = ((1 << kGroupShift) + size - 1) / size;
        shift = __clz(max(count - 1, 1)) - __clz(kWarp - 1);
    }

    DEVICE int lane_of(int expert) const { return ((expert * factor) >> kGroupShift) << shift; }

    // Returns a bit for each lane whose group is among the `kept` best. `choices` are those of all experts.
    DEVICE uint32_t best(const float* choices, int kept) const {
        const int lane = lane_index(), group = lane >> shift, lanes = 1 << shift;
        BestTwo two;
        if (group < count) {
            for (int i = lane & (lanes - 1); i < size; i += lanes) two.add(choices[group * size + i]);
        }
        for (int distance = 1; distance < lanes; distance *= 2) {
            const float first = __shfl_xor_sync(kAllLanes, two.first, distance);
            const float second = __shfl_xor_sync(kAllLanes, two.second, distance);
            two.add(first);
            two.add(second);
        }
        const uint32_t key = key_of(two.first + two.second);
        int better = 0;
        for (int other = 0; other < count; ++other) {
            const uint32_t others = __shfl_sync(kAllLanes, key, other << shift);
            better += others > key || (others == key && other < group);
        }
        return __ballot_sync(kAllLanes, better < kept);
    }
};

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS) route_topk(const __grid_constant__ RouteTopkParams p) {
    using namespace moe_fp8;
    __shared__ float values[kWarps][kExperts];
    const int warp = warp_index();
    const bool in_groups = p.kept_groups < p.num_groups;
    const Groups groups(p);
    ptx::grid_dependency_wait();
    ptx::launch_dependents();

    float bias[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int expert = i * kWarp + lane_index();
        bias[i] = p.bias != nullptr && expert < p.num_experts ? p.bias[expert] : 0.0f;
    }

    const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp; token < p.num_tokens; token += step) {
        const int lane = static_cast<int>(ptx::fresh_lane());
        float score[VALUES];
        uint32_t key[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int expert = i * kWarp + lane;
            score[i] = expert < p.num_experts ? load_logit(p.logits, token * p.logits_stride + expert) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            // Lanes that have no such expert compute along without branches: the exp of their score is 0.
            const bool inside = i * kWarp + lane < p.num_experts;
            score[i] = inside ? clamp_finite(score[i]) : negative_infinity();
            key[i] = inside ? key_of(score[i]) : 0;
        }

        if (p.softmax != 0) {
            const float most = value_of(__reduce_max_sync(kAllLanes, greatest_of(key)));
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                score[i] = expf(score[i] - most);
                sum += score[i];
            }
            const float inverse = __frcp_rn(sum_of_warp(sum));
#pragma unroll
            for (int i = 0; i < VALUES; ++i) score[i] *= inverse;
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) score[i] = reciprocal(1.0f + expf(-score[i]));
        }

        float* row = values[warp];
        if (in_groups || p.bias != nullptr) {
            float choice[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                choice[i] = clamp_finite(score[i] + bias[i]);
                if (key[i] != 0) key[i] = key_of(choice[i]);
            }
            if (in_groups) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) row[i * kWarp + lane] = choice[i];
                __syncwarp();
                const uint32_t kept = groups.best(row, p.kept_groups);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) {
                    const int expert = i * kWarp + lane;
                    if (expert < p.num_experts && (kept >> groups.lane_of(expert) & 1) == 0) key[i] = 0;
                }
                __syncwarp();
            }
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) row[i * kWarp + lane] = score[i];

        int chosen = 0;
        for (int place = 0; place < p.topk; ++place) {
            const uint32_t greatest = greatest_of(key);
            int id = 0;
#pragma unroll
            for (int i = VALUES - 1; i >= 0; --i) {
                if (key[i] == greatest) id = i * kWarp + lane;
            }
            const bool has_it = greatest == __reduce_max_sync(kAllLanes, greatest);
            id = __reduce_min_sync(kAllLanes, has_it ? id : kExperts);
            if (lane == place) chosen = id;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                if (id == i * kWarp + lane) key[i] = 0;
            }
        }

        __syncwarp();
        float weight = lane < p.topk ? row[chosen] : 0.0f;
        __syncwarp();
        if (p.renormalize != 0) weight = __fdiv_rn(weight, sum_of_warp(weight) + 1e-20f);
        if (lane < p.topk) {
            p.weights[token * p.weights_stride + lane] = weight * p.scaling;
            const int64_t at = token * p.ids_stride + lane;
            if (p.wide_ids != 0) {
                static_cast<int64_t*>(p.ids)[at] = chosen;
            } else {
                static_cast<int*>(p.ids)[at] = chosen;
            }
        }
    }
}
