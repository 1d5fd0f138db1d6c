// One CTA sorts the chosen columns by value, in the memory of its candidates: the greatest value comes first, and equal values are
// ordered by column.
#pragma once

#include "topk/state.cuh"

namespace moe_fp8::topk {

// This is a bitonic sort in descending order, and `size` is a power of two. Pairs at most a warp apart stay within the 64 elements
// of one warp.
DEVICE void sort_descending(uint64_t* elements, int size) {
#pragma unroll 1
    for (int length = 2; length <= size; length *= 2) {
#pragma unroll 1
        for (int stride = length / 2; stride > 0; stride /= 2) {
#pragma unroll 1
            for (int i = threadIdx.x; i < size / 2; i += kThreads) {
                const int low = 2 * i - (i & (stride - 1));
                const uint64_t a = elements[low], b = elements[low + stride];
                if ((a < b) == ((low & length) == 0)) elements[low] = b, elements[low + stride] = a;
            }
            // After the last step of a length comes a stride of that length.
            if (stride > kWarp || (stride == 1 && length > kWarp)) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
    }
    __syncthreads();
}

DEVICE void sort_by_value(const State& state, const Bits* row, int* out, int count) {
    uint64_t* elements = reinterpret_cast<uint64_t*>(state.keys);
    const int size = count <= 1 ? 1 : 1 << (32 - __clz(count - 1));
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += kThreads) {
        uint64_t element = 0;  // below all others, as no key is 0
        if (i < count) {
            const uint32_t column = static_cast<uint32_t>(out[i]);
            element = static_cast<uint64_t>(key_of(value_of(row[column]))) << 32 | (0xffffffffu - column);
        }
        elements[i] = element;
    }
    __syncthreads();
    sort_descending(elements, size);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
        out[i] = static_cast<int>(0xffffffffu - static_cast<uint32_t>(elements[i]));
    }
}

}  // namespace moe_fp8::topk
