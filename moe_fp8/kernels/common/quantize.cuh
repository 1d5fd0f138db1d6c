// This file turns values into FP8 e4m3. Each group of values has one scale, and the threads that share the group hold it in
// registers.
//
//   amax = max(max |x|, 1e-10);  scale = amax / 448;  q = fp8(clamp(x * (1 / scale), -448, 448)), round to nearest even
//
// This is computed in fp32 with IEEE division, so that every implementation of the formula agrees bit for bit.
#pragma once

#include "common/types.cuh"

namespace moe_fp8 {

// One thread loads so many values at once, in one or two loads of 16 bytes.
constexpr int kQuantizeValues = 8;
constexpr float kFp8Max = 448.0f;
constexpr float kLeastMaximum = 1e-10f;

// Gives the eight bf16 values of a load as fp32.
DEVICE void unpack_bf16(float (&v)[kQuantizeValues], const uint4& packed) {
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

// Loads the values from element `offset` of x on. Their address is a multiple of 16 bytes.
template <InDtype kInDtype>
DEVICE void load_values(const void* x, int64_t offset, float (&v)[kQuantizeValues]) {
    static_assert(kInDtype == InDtype::kBf16 || kInDtype == InDtype::kFp16 || kInDtype == InDtype::kFp32, "see specs.py");
    if constexpr (kInDtype == InDtype::kFp32) {
        const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(x) + offset);
        const float4 a = source[0], b = source[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else if constexpr (kInDtype == InDtype::kBf16) {
        unpack_bf16(v, *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + offset));
    } else {
        const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + offset);
        const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
                : "r"(pairs[i]));
        }
    }
}

// This maximum keeps NaN, so that a NaN in a group shows in the group's scale.
DEVICE float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

DEVICE uint32_t pack_fp8(float a, float b, float c, float d) {
    uint32_t packed;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

DEVICE void unpack_fp8(float (&v)[4], uint32_t packed) {
    asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 x, y;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 x, low;\ncvt.rn.f16x2.e4m3x2 y, high;\n"
        "mov.b32 {a, b}, x;\nmov.b32 {c, d}, y;\n"
        "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
        : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
        : "r"(packed));
}

// Returns the scale of a group whose largest value is `amax`, rounded up to a power of two if kPowerOfTwo.
template <bool kPowerOfTwo>
DEVICE float group_scale(float amax) {
    float scale = __fdiv_rn(amax, kFp8Max);
    if constexpr (kPowerOfTwo) {
        // The sum rounds up, since any mantissa bit carries into the exponent. Scales are normal numbers (amax >= 1e-10).
        if (amax < __int_as_float(0x7f800000)) {
            scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
        }
    }
    return scale;
}

// Returns the scale of the group that kThreads neighbouring lanes hold, rounded up to a power of two if kPowerOfTwo. `q` gets the
// FP8 bytes of this thread's kValues values. Every thread of the warp calls it.
template <int kThreads, bool kPowerOfTwo, int kValues>
DEVICE float quantize_group(const float (&v)[kValues], uint32_t (&q)[kValues / 4]) {
    static_assert(kValues % 4 == 0, "words of four bytes");
    static_assert(kThreads <= kWarp && (kThreads & (kThreads - 1)) == 0, "a group's threads exchange by xor within a warp");
    float amax = kLeastMaximum;
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax = max_nan(amax, fabsf(v[i]));
#pragma unroll
    for (int distance = 1; distance < kThreads; distance *= 2) {
        amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    }
    const float scale = group_scale<kPowerOfTwo>(amax);
    const float inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
        q[i / 4] = pack_fp8(v[i] * inverse, v[i + 1] * inverse, v[i + 2] * inverse, v[i + 3] * inverse);
    }
    return scale;
}

}  // namespace moe_fp8
