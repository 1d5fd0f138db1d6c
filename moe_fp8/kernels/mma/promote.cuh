// Two-level accumulation: the tensor core's sum over 128 of K enters the fp32 accumulator times both scales.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::mma {

// `partial` and `sum` are wgmma fragments of weights x tokens. A token's scale belongs to a column, of which a
// thread holds pairs; the weights' scale is uniform over the fragment.
template <int kTokens>
DEVICE void promote(float (&sum)[kTokens / 2], const float (&partial)[kTokens / 2], const float* token_scales,
                    float weight_scale) {
    const float2* pairs = reinterpret_cast<const float2*>(token_scales) + lane_index() % 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        const float2 scale = pairs[j * 4];
        const float even = scale.x * weight_scale, odd = scale.y * weight_scale;
        sum[4 * j + 0] += partial[4 * j + 0] * even;
        sum[4 * j + 1] += partial[4 * j + 1] * odd;
        sum[4 * j + 2] += partial[4 * j + 2] * even;
        sum[4 * j + 3] += partial[4 * j + 3] * odd;
    }
}

}  // namespace moe_fp8::mma
