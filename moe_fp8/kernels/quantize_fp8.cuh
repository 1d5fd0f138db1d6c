// Quantizes x [M, K] to FP8 e4m3 with one scale for each 1 x 128 group. The scales are MN-major (element (m, g) is at g * stride +
// m), so that a GEMM's TMA reads them as they are. common/quantize.cuh has the formula. Sixteen threads share a group, and a CTA
// takes 16 rows of one group.
//
// The kernel is specialized by IN_DTYPE and POWER_OF_TWO.
#pragma once

#include "common/quantize.cuh"
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

constexpr int kThreadsPerGroup = kBlockK / kQuantizeValues;
constexpr int kRows = NUM_THREADS / kThreadsPerGroup;
static_assert(CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS) quantize_fp8(const __grid_constant__ QuantizeParams p) {
    using namespace moe_fp8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int groups = p.k / kBlockK;
    const int within = static_cast<int>(threadIdx.x) % kThreadsPerGroup;
    const int64_t tiles = static_cast<int64_t>(ceil_div(p.m, kRows)) * groups;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int block = static_cast<int>(tile / groups), group = static_cast<int>(tile - static_cast<int64_t>(block) * groups);
        const int row = block * kRows + static_cast<int>(threadIdx.x) / kThreadsPerGroup;
        const int column = group * kBlockK + within * kQuantizeValues;
        const bool inside = row < p.m;

        float v[kQuantizeValues] = {};
        if (inside) load_values<static_cast<InDtype>(IN_DTYPE)>(p.x, row * p.x_stride + column, v);
        uint32_t packed[kQuantizeValues / 4];
        const float scale = quantize_group<kThreadsPerGroup, POWER_OF_TWO != 0>(v, packed);
        if (inside) {
            *reinterpret_cast<uint2*>(p.q + static_cast<int64_t>(row) * p.k + column) = make_uint2(packed[0], packed[1]);
            if (within == 0) p.scale[group * p.scale_stride + row] = scale;
        }
    }
}
