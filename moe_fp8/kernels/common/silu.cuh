// SiLU(gate) * up, as the stand-alone kernel and the GEMM's epilogue compute it; silu_mul_quantize.cuh gives the formulas.
#pragma once

#include "common/quantize.cuh"
#include "common/types.cuh"

namespace moe_fp8 {

// This minimum keeps NaN, so that a NaN shows in its group's scale.
DEVICE float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

DEVICE float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float reciprocal_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float divide_approx(float a, float b) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

DEVICE float round_to_bf16(float x) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(packed) : "f"(x));
    return __uint_as_float(packed << 16);
}

template <bool kRounded>
DEVICE float silu_mul(float gate, float up, float limit) {
    constexpr float kLog2E = 1.44269504f;
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
    if constexpr (kRounded) {
        const float silu = round_to_bf16(divide_approx(gate, 1.0f + exp2_approx(-kLog2E * gate)));
        return round_to_bf16(silu * up);
    }
    return gate * reciprocal_approx(1.0f + exp2_approx(-kLog2E * gate)) * up;
}

}  // namespace moe_fp8
