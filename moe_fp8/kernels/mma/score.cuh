// MQA logits of one tile: score[key, token] = k_scale[key] * sum_h relu(k[key] . q[token, h]) * weight[token, h].
// Keys take the M side of wgmma and (token, head) pairs its N side.
//
// Since 2 relu(x) = x + |x|, the sum over heads of w relu(q . k) is half of two sums: sum_h w |q . k|, which takes one FFMA a
// score, and (sum_h w q) . k, which takes one more query a token. FP8 holds that query as a sum of kTerms terms: scale * sum_t
// 16^-t term[t]. Each term holds a part of the rest that the terms before it leave over, and the sum is exact to 2^-16 of each
// element. The terms are columns behind the columns of the heads.
#pragma once

#include "common/types.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace moe_fp8::mma {

constexpr int kTerms = 4;

// The columns of the terms, if there are any terms. In each group of eight, column 2t is term t of one token and column 2t + 1 is
// term t of the next token, so that every thread of four holds one term of both tokens.
template <int kTokens, bool kWithTerms>
constexpr int kTermColumns = !kWithTerms ? 0 : kTokens > 1 ? kTokens / 2 * 8 : 8;

// Returns the column of a token's term, behind the columns of the heads.
DEVICE int term_column(int token, int term) { return token / 2 * 8 + term * 2 + token % 2; }

// One thread holds the scores of so many query tokens after the reduction.
template <int kTokens>
constexpr int kTokensPerThread = kTokens > 1 ? kTokens / 2 : 1;

// These give the token, within the tile, of a thread's first score; how many tokens further on its next score is; and the key row
// within the warpgroup's 64.
template <int kTokens>
DEVICE int score_token() {
    return kTokens > 1 ? ptx::fresh_lane() / 2 % 2 : 0;
}
template <int kTokens>
constexpr int kScoreStep = kTokens > 1 ? 2 : 1;
DEVICE int score_key(int warp) {
    const uint32_t lane = ptx::fresh_lane();
    return static_cast<int>(warp % 4 * 16 + lane / 4 + lane % 2 * 8);
}
// With a single token two threads hold each score, and one of the two stores it.
template <int kTokens>
DEVICE bool score_owner() {
    return kTokens > 1 || lane_index() % 4 < 2;
}

// Loads a thread's weights: the weights of its columns of every fragment. `weights` is [tokens x heads] in shared memory.
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
    const uint64_t a = ptx::wgmma_descriptor<kHeadDim>(ptx::wgmma_address(keys));
    const uint64_t b = ptx::wgmma_descriptor<kHeadDim>(ptx::wgmma_address(queries));
    ptx::Wgmma<kColumns>::template start<kHeadDim / 32>(d, a, b);
    ptx::wgmma_pin(d);
}

// Applies ReLU and the weights, and sums over half of the heads. `w` points at the weights of the product's first columns, and
// `term_scales` at the scales of this thread's terms. Four threads share two rows of the product, 8 keys apart. Neighbours among
// the four exchange sums, so that each thread has the sums of one row.
template <int kTokens, int kHeads, bool kWithTerms>
DEVICE void score_sum(float (&sums)[kTokens], const float (&d)[(kTokens * kHeads + kTermColumns<kTokens, kWithTerms>) / 2],
                      const float* w, const float* term_scales, float k_scale) {
    constexpr int kGroups = kHeads / 8;
    const bool low_row = lane_index() % 2;
    const float half_scale = 0.5f * k_scale;
    // This is twice the ReLU, or as much of it as the terms leave. It costs an FADD, while fmaxf would issue at half the rate of an
    // FADD; with terms it costs nothing.
    const auto ramp = [](float x) { return kWithTerms ? fabsf(x) : x + fabsf(x); };
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        float upper = 0.0f, lower = 0.0f;
#pragma unroll
        for (int j = token * kGroups; j < (token + 1) * kGroups; ++j) {
            upper += ramp(d[4 * j]) * w[2 * j];
            lower += ramp(d[4 * j + 2]) * w[2 * j];
            upper += ramp(d[4 * j + 1]) * w[2 * j + 1];
            lower += ramp(d[4 * j + 3]) * w[2 * j + 1];
        }
        if constexpr (kWithTerms) {
            const float* terms = &d[kTokens * kHeads / 2 + token / 2 * 4 + token % 2];
            const float term_scale = term_scales[token * kTerms];
            upper += terms[0] * term_scale;
            lower += terms[2] * term_scale;
        }
        const float sum = (low_row ? lower : upper) + __shfl_xor_sync(0xffffffffu, low_row ? upper : lower, 1);
        sums[token] = sum * half_scale;
    }
}

// Completes the sum over all heads. The two threads that share a row share its tokens too, so that the stores spread over all
// threads.
template <int kTokens>
DEVICE void score_exchange(float (&score)[kTokensPerThread<kTokens>], const float (&sums)[kTokens]) {
    const bool odd_token = ptx::fresh_lane() / 2 % 2;
    if constexpr (kTokens == 1) {
        score[0] = sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 2);
    } else {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            const float keep = odd_token ? sums[2 * i + 1] : sums[2 * i];
            const float give = odd_token ? sums[2 * i] : sums[2 * i + 1];
            score[i] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
        }
    }
}

}  // namespace moe_fp8::mma
