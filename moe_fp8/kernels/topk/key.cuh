// Logits as unsigned keys that sort as the op ranks them: -inf lowest, -0 and +0 equal, every NaN above +inf.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::topk {

constexpr bool kBf16 = static_cast<InDtype>(IN_DTYPE) == InDtype::kBf16;
static_assert(kBf16 || static_cast<InDtype>(IN_DTYPE) == InDtype::kFp32, "see specs.py");

// A logit as it lies in memory.
using Bits = Choose<kBf16, uint16_t, uint32_t>::Type;
constexpr Bits kMinusInfinity = kBf16 ? 0xff80u : 0xff800000u;

// One 16-byte load has so many logits.
constexpr int kVector = 16 / sizeof(Bits);

// The keys of NaN and of -inf. No key is 0.
constexpr uint32_t kLargestKey = kBf16 ? 0xffffu : 0xffffffffu;
constexpr uint32_t kLowestKey = kBf16 ? 0x007fu : 0x007fffffu;

DEVICE float value_of(Bits bits) { return __uint_as_float(kBf16 ? static_cast<uint32_t>(bits) << 16 : bits); }

DEVICE uint32_t key_of(float value) {
    uint32_t bits = __float_as_uint(value);
    if (value == 0.0f) bits = 0;
    const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return value != value ? kLargestKey : kBf16 ? key >> 16 : key;
}

// Returns a float f such that key_of(x) >= key means !(x < f) for every x. The converse holds unless f is NaN.
DEVICE float bound_of(uint32_t key) {
    const uint32_t wide = kBf16 ? key << 16 : key;
    return __uint_as_float(wide & 0x80000000u ? wide ^ 0x80000000u : ~(kBf16 ? wide | 0xffffu : wide));
}

DEVICE void unpack(const uint4& packed, float (&values)[kVector]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kBf16) {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
            values[i] = __uint_as_float(words[i]);
        }
    }
}

}  // namespace moe_fp8::topk
