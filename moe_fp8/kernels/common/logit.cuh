// Logits are stored as fp32, or as bf16 with OUT_BF16.
#pragma once

#include "common/types.cuh"

namespace moe_fp8 {

#if OUT_BF16
using Logit = uint16_t;
DEVICE Logit negative_infinity() { return 0xff80; }
DEVICE void store_logit(Logit* pointer, float value) {
    asm volatile("{\n.reg .b16 rounded;\ncvt.rn.bf16.f32 rounded, %1;\nst.global.b16 [%0], rounded;\n}" ::"l"(pointer), "f"(value)
                 : "memory");
}
#else
using Logit = float;
DEVICE Logit negative_infinity() { return __int_as_float(0xff800000); }
DEVICE void store_logit(Logit* pointer, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}
#endif

}  // namespace moe_fp8
