// Epilogue of weights x tokens fragments: D is tokens x weights, so a fragment leaves transposed.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace moe_fp8::mma {

// Tokens staged at once, and the bytes of one staged token: 64 bf16 and 16 bytes against bank conflicts.
template <int kTokens>
constexpr int kStagedTokens = kTokens < 64 ? kTokens : 64;
constexpr int kStagedTokenBytes = 64 * 2 + 16;

// bf16: one warpgroup stores 64 weight rows of tokens [begin, end) at `out`, where token 0 is (token stride in elements),
// through `staging` of kStagedTokens * kStagedTokenBytes. `barrier` is the warpgroup's named barrier.
template <int kTokens>
DEVICE void store_fragment(const float (&d)[kTokens / 2], uint16_t* out, int64_t stride, int begin, int end,
                           void* staging, int barrier) {
    constexpr int kChunk = kStagedTokens<kTokens>;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int warp = thread / kWarp, lane = thread % kWarp;
    const uint32_t base = ptx::shared_address(staging);
    // Matrix lane/8 of an x4 store: tokens of group j + (lane/16), weight rows 8 * (lane/8 % 2).
    const uint32_t address = base + (lane / 16 * 8 + lane % 8) * kStagedTokenBytes + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int first = 0; first < kTokens; first += kChunk) {
        ptx::named_barrier(barrier, kWarpgroup);
#pragma unroll
        for (int j = first / 8; j < (first + kChunk) / 8; j += 2) {
            const uint32_t target = address + (j * 8 - first) * kStagedTokenBytes;
            const uint32_t r0 = ptx::pack_bf16(d[4 * j], d[4 * j + 1]), r1 = ptx::pack_bf16(d[4 * j + 2], d[4 * j + 3]);
            if constexpr (kChunk == 8) {
                ptx::stmatrix_x2_trans(target, r0, r1);
            } else {
                ptx::stmatrix_x4_trans(target, r0, r1, ptx::pack_bf16(d[4 * j + 4], d[4 * j + 5]),
                                       ptx::pack_bf16(d[4 * j + 6], d[4 * j + 7]));
            }
        }
        ptx::named_barrier(barrier, kWarpgroup);
#pragma unroll
        for (int item = thread; item < kChunk * 8; item += kWarpgroup) {
            const int token = item / 8, part = item % 8;
            if (begin <= first + token && first + token < end) {
                const uint4 value = *reinterpret_cast<const uint4*>(static_cast<const char*>(staging) +
                                                                    token * kStagedTokenBytes + part * 16);
                *reinterpret_cast<uint4*>(out + (first + token) * stride + part * 8) = value;
            }
        }
    }
}

// fp32: straight from the registers; eight lanes write 32 consecutive bytes of a token.
template <int kTokens>
DEVICE void store_fragment(const float (&d)[kTokens / 2], float* out, int64_t stride, int begin, int end, void*,
                           int) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    float* column = out + thread / kWarp * 16 + thread % kWarp / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
        const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
        if (begin <= token && token < end) column[token * stride + i / 2 % 2 * 8] = d[i];
    }
}

}  // namespace moe_fp8::mma
