// Adds the rows that the experts computed for each token, in fp32, and rounds the sum once to bf16:
//
//   out[t] = sum over j of weights[t, j] * y[rows[t, j]], in the order of j; rows that do not exist are left out
//
// A thread takes eight columns of one token. It loads the rows of eight places at once.
#pragma once

#include "common/quantize.cuh"
#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

struct MoeCombineParams {
    const void* y;        // bf16
    const int* rows;      // [num_tokens, topk] contiguous
    const float* weights; // or null: every weight is 1
    uint16_t* out;        // bf16
    int64_t y_stride;     // elements between rows of y
    int64_t weights_stride;
    int64_t out_stride;
    int num_tokens;
    int topk;
    int n;
    int num_rows;  // of y
};

namespace moe_fp8 {

constexpr int kPlacesAtOnce = 8;
static_assert(CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS) moe_combine(const __grid_constant__ MoeCombineParams p) {
    using namespace moe_fp8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const uint16_t* y = static_cast<const uint16_t*>(p.y);
    const int loads = p.n / kQuantizeValues;
    const int64_t items = static_cast<int64_t>(p.num_tokens) * loads;
    const int64_t step = static_cast<int64_t>(gridDim.x) * NUM_THREADS;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * NUM_THREADS + threadIdx.x; item < items; item += step) {
        const int64_t token = item / loads;
        const int64_t column = (item - token * loads) * kQuantizeValues;
        float sum[kQuantizeValues] = {};
        for (int begin = 0; begin < p.topk; begin += kPlacesAtOnce) {
            int row[kPlacesAtOnce];
            float weight[kPlacesAtOnce];
#pragma unroll
            for (int i = 0; i < kPlacesAtOnce; ++i) {
                const int j = begin + i;
                row[i] = j < p.topk ? p.rows[token * p.topk + j] : -1;
                if (row[i] >= p.num_rows) row[i] = -1;
                weight[i] = row[i] < 0 ? 0.0f : p.weights == nullptr ? 1.0f : p.weights[token * p.weights_stride + j];
            }
            uint4 words[kPlacesAtOnce];
#pragma unroll
            for (int i = 0; i < kPlacesAtOnce; ++i) {
                words[i] = make_uint4(0, 0, 0, 0);
                if (row[i] >= 0) words[i] = *reinterpret_cast<const uint4*>(y + row[i] * p.y_stride + column);
            }
#pragma unroll
            for (int i = 0; i < kPlacesAtOnce; ++i) {
                float v[kQuantizeValues];
                unpack_bf16(v, words[i]);
#pragma unroll
                for (int c = 0; c < kQuantizeValues; ++c) sum[c] = fmaf(weight[i], v[c], sum[c]);
            }
        }
        *reinterpret_cast<uint4*>(p.out + token * p.out_stride + column) =
            make_uint4(ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]),
                       ptx::pack_bf16(sum[6], sum[7]));
    }
}
