// MQA logits of one tile: score[key, token] = k_scale[key] * sum_h relu(k[key] . q[token, h]) * weight[token, h].
// Keys take the M side of wgmma and (token, head) pairs its N side.
#pragma once

#include "common/types.cuh"
#include "ptx/wgmma.cuh"

namespace moe_fp8::mma {

// Query tokens whose scores one thread holds after the reduction.
template <int kTokens>
constexpr int kTokensPerThread = kTokens > 1 ? kTokens / 2 : 1;

// The token, within the tile, of a thread's first score and how far its next one is, and the key row within the warpgroup's 64.
template <int kTokens>
DEVICE int score_token() {
    return kTokens > 1 ? (lane_index() / 2) % 2 : 0;
}
template <int kTokens>
constexpr int kScoreStep = kTokens > 1 ? 2 : 1;
DEVICE int score_key() {
    return static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + lane_index() / 4 + lane_index() % 2 * 8;
}
// With a single token two threads hold each score; one of them stores it.
template <int kTokens>
DEVICE bool score_owner() {
    return kTokens > 1 || lane_index() % 4 < 2;
}

// A thread's weights: those of its columns of every fragment. `weights` is [tokens x heads] in shared memory.
template <int kColumns>
DEVICE void load_weights(float (&w)[kColumns / 4], const float* weights) {
    const float2* pairs = reinterpret_cast<const float2*>(weights) + lane_index() % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const float2 pair = pairs[j * 4];
        w[2 * j] = pair.x, w[2 * j + 1] = pair.y;
    }
}

// d[64, columns] = keys @ queries^T over kHeadDim.
template <int kColumns, int kHeadDim>
DEVICE void score_mma(float (&d)[kColumns / 2], const void* keys, const void* queries) {
    const uint64_t a = ptx::wgmma_descriptor<kHeadDim>(keys), b = ptx::wgmma_descriptor<kHeadDim>(queries);
    ptx::wgmma_pin(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int bytes = 0; bytes < kHeadDim; bytes += 32) {
        ptx::Wgmma<kColumns>::mma(d, ptx::advance_descriptor(a, bytes), ptx::advance_descriptor(b, bytes), bytes > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_pin(d);
}

// ReLU, weights and the sum over heads, of columns from `w` on. The four threads that share a row halve their values at each
// exchange, so that the stores spread over all of them. (2 relu(x) = x + |x|: an FADD, where fmaxf issues at half its rate.)
template <int kTokens, int kHeads>
DEVICE void score_reduce(float (&score)[kTokensPerThread<kTokens>], const float (&d)[kTokens * kHeads / 2], const float* w,
                         float k_scale) {
    constexpr int kGroups = kHeads / 8;
    const bool low_row = lane_index() % 2, odd_token = lane_index() / 2 % 2;
    const float half_scale = 0.5f * k_scale;
    float row[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        float upper = 0.0f, lower = 0.0f;
#pragma unroll
        for (int j = token * kGroups; j < (token + 1) * kGroups; ++j) {
            upper += (d[4 * j] + fabsf(d[4 * j])) * w[2 * j];
            lower += (d[4 * j + 2] + fabsf(d[4 * j + 2])) * w[2 * j];
            upper += (d[4 * j + 1] + fabsf(d[4 * j + 1])) * w[2 * j + 1];
            lower += (d[4 * j + 3] + fabsf(d[4 * j + 3])) * w[2 * j + 1];
        }
        row[token] = (low_row ? lower : upper) + __shfl_xor_sync(0xffffffffu, low_row ? upper : lower, 1);
    }
    if constexpr (kTokens == 1) {
        score[0] = (row[0] + __shfl_xor_sync(0xffffffffu, row[0], 2)) * half_scale;
    } else {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            const float keep = odd_token ? row[2 * i + 1] : row[2 * i];
            const float give = odd_token ? row[2 * i] : row[2 * i + 1];
            score[i] = (keep + __shfl_xor_sync(0xffffffffu, give, 2)) * half_scale;
        }
    }
}

}  // namespace moe_fp8::mma
