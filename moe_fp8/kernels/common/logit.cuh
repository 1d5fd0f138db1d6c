// What logits are stored as: fp32 or, with OUT_BF16, bf16.
#pragma once

#include "common/types.cuh"

namespace moe_fp8 {

#if OUT_BF16
using Logit = uint16_t;
DEVICE Logit to_logit(float value) {
    uint16_t rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}
DEVICE Logit negative_infinity() { return 0xff80; }
#else
using Logit = float;
DEVICE Logit to_logit(float value) { return value; }
DEVICE Logit negative_infinity() { return __int_as_float(0xff800000); }
#endif

}  // namespace moe_fp8
