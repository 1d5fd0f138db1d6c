// x [M, K] -> FP8 e4m3 with one scale for each 1 x 128 group, scales MN-major (element (m, g) at g * stride + m), so that
// a GEMM's TMA reads them as they are.
//
//   amax = max(max |x|, 1e-10);  scale = amax / 448;  q = fp8(clamp(x * (1 / scale), -448, 448)), round to nearest even
//
// in fp32 with IEEE division, so that every implementation of the formula agrees bit for bit. With POWER_OF_TWO the
// scale is rounded up to a power of two. Sixteen threads share a group; a CTA takes 16 rows of one group.
//
// Specialised by: IN_DTYPE (0 bf16, 1 fp16, 2 fp32), POWER_OF_TWO.
#pragma once

#include "common/types.cuh"
#include "ptx/sync.cuh"

struct QuantizeParams {
    const void* x;
    uint8_t* q;      // [M, K] contiguous
    float* scale;
    int64_t x_stride;      // elements between rows of x
    int64_t scale_stride;  // elements between groups
    int m;
    int k;
};

namespace moe_fp8 {

constexpr int kThreadsPerGroup = 16;
constexpr int kPerThread = kBlockK / kThreadsPerGroup;
constexpr int kRows = NUM_THREADS / kThreadsPerGroup;
constexpr float kFp8Max = 448.0f;
static_assert(CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");

DEVICE void load_values(const QuantizeParams& p, int64_t offset, float (&v)[kPerThread]) {
#if IN_DTYPE == 2
    const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + offset);
    const float4 a = source[0], b = source[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
#else
    const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + offset);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if IN_DTYPE == 0
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
            : "r"(words[i]));
#endif
    }
#endif
}

// Maximum that keeps NaN, so that a NaN in a group shows in its scale.
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

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS) quantize_fp8(const __grid_constant__ QuantizeParams p) {
    using namespace moe_fp8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int groups = p.k / kBlockK;
    const int part = static_cast<int>(threadIdx.x) % kThreadsPerGroup;
    const int64_t tiles = static_cast<int64_t>(ceil_div(p.m, kRows)) * groups;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int block = static_cast<int>(tile / groups), group = static_cast<int>(tile - static_cast<int64_t>(block) * groups);
        const int row = block * kRows + static_cast<int>(threadIdx.x) / kThreadsPerGroup;
        const int column = group * kBlockK + part * kPerThread;
        const bool inside = row < p.m;

        float v[kPerThread] = {};
        if (inside) load_values(p, row * p.x_stride + column, v);
        float amax = 1e-10f;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) amax = max_nan(amax, fabsf(v[i]));
#pragma unroll
        for (int distance = 1; distance < kThreadsPerGroup; distance *= 2) {
            amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        }
        float scale = __fdiv_rn(amax, kFp8Max);
#if POWER_OF_TWO
        // Round up: any mantissa bit carries into the exponent. Scales are normal numbers (amax >= 1e-10).
        if (amax < __int_as_float(0x7f800000)) {
            scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
        }
#endif
        const float inverse = __fdiv_rn(1.0f, scale);
        if (inside) {
            uint2 packed;
            packed.x = pack_fp8(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
            packed.y = pack_fp8(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse);
            *reinterpret_cast<uint2*>(p.q + static_cast<int64_t>(row) * p.k + column) = packed;
            if (part == 0) p.scale[group * p.scale_stride + row] = scale;
        }
    }
}
