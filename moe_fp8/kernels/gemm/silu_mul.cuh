// This file takes a math warpgroup's sums of gates and ups to memory: SiLU(gate) * up in FP8, and its scales.
#pragma once

#include "common/quantize.cuh"
#include "common/silu.cuh"
#include "gemm/shape.cuh"

namespace moe_fp8 {

#if SILU_MUL
static_assert(kBlockN == 2 * kBlockK && kWaves == 2 && kParts == 1 && !kPaired, "a tile has the outputs that share a scale");
static_assert(kLayout == sched::Layout::kOffsets, "rows of experts follow one another");

constexpr int kChunk = 16, kChunks = kBlockK / kChunk;  // the bytes of one store, and the stores of a token

// Returns where an output of a token lies in staging.
DEVICE int staged_output(int token, int output) {
    return token * kBlockK + ((output / kChunk) ^ (token % kChunks)) * kChunk + output % kChunk;
}

// Both sums are rounded to bf16 first, as if the GEMM had stored them.
DEVICE float silu_mul_rounded(const GemmParams& p, float gate, float up) {
    return silu_mul<ROUNDED != 0>(round_to_bf16(gate), round_to_bf16(up), p.limit);
}

DEVICE uint32_t to_fp8(float low, float high) { return pack_fp8(low, high, 0.0f, 0.0f); }

// Stores the scale of token `token` of a tile.
DEVICE void store_scale(const GemmParams& p, const Tile& tile, int token, float scale) {
    if (token >= tile.begin_row && token < tile.end_row) {
        p.out_scale[tile.n / kBlockN * p.out_scale_stride + tile.row + token] = scale;
    }
}

// Copies staged tokens [first, first + kTokens) to memory, as thread `thread` of kThreads. `staging` has token `first` first.
template <int kTokens, int kThreads>
DEVICE void store_tokens(const GemmParams& p, const Tile& tile, const uint8_t* staging, int first, int thread) {
    static_assert(kChunks == 8, "a shift");
#pragma unroll
    for (int i = 0; i < kTokens * kChunks; i += kThreads) {
        const int local = (i + thread) / kChunks, chunk = (i + thread) % kChunks, token = first + local;
        if (local >= kTokens || token < tile.begin_row || token >= tile.end_row) continue;
        uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.row + token) * p.out_stride + tile.n / 2 + chunk * kChunk;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(staging + staged_output(local, chunk * kChunk));
    }
}

// Few tokens: lane/4 is one of eight outputs of the warp, and a thread has two tokens of each column group.
DEVICE void store_few_tokens(const GemmParams& p, Shared& shared, const Tile& tile, int warpgroup, Fragments::Sum (&sum)[kWaves]) {
    constexpr int kMathThreads = kMathWarpgroups * kWarpgroup, kMathWarps = kMathThreads / kWarp;
    const int thread = warpgroup * kWarpgroup + mma::warpgroup_thread(), warp = thread / kWarp, lane = lane_index();
    uint8_t* staging = shared.staging[0];
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
        const int at = i / 2 * 4 + i % 2;  // in column group i/2
        float most = kLeastMaximum;
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
            sum[wave][at] = silu_mul_rounded(p, sum[wave][at], sum[wave][at + 2]);
            most = max_nan(most, fabsf(sum[wave][at]));
        }
#pragma unroll
        for (int distance = 4; distance < kWarp; distance *= 2) {
            most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, distance));
        }
        if (lane < 4) shared.maxima[warp][i / 2 * 8 + lane * 2 + i % 2] = most;
    }
    ptx::named_barrier<1, kMathThreads>();
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
        const int at = i / 2 * 4 + i % 2, token = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float most = shared.maxima[0][token];
#pragma unroll
        for (int other = 1; other < kMathWarps; ++other) most = max_nan(most, shared.maxima[other][token]);
        const float scale = group_scale<POWER_OF_TWO != 0>(most), inverse = __fdiv_rn(1.0f, scale);
        if (warp == 0 && lane < 4) store_scale(p, tile, token, scale);
        const uint32_t both = to_fp8(sum[0][at] * inverse, sum[1][at] * inverse);
        // The warpgroup has 64 outputs, each fragment 32, each warp eight.
        const int output = warpgroup * 64 + warp % 4 * 8 + lane / 4;
        staging[staged_output(token, output)] = static_cast<uint8_t>(both);
        staging[staged_output(token, output + 32)] = static_cast<uint8_t>(both >> 8);
    }
    ptx::named_barrier<1, kMathThreads>();
    store_tokens<kBlockM, kMathThreads>(p, tile, staging, 0, thread);
}

// Many tokens: four lanes have all outputs of two tokens, pairs of outputs of each 16 columns.
DEVICE void store_many_tokens(const GemmParams& p, Shared& shared, const Tile& tile, mma::Owned owned, int warpgroup,
                              Fragments::Sum (&sum)[kWaves]) {
    constexpr int kTokens = 16;  // a warp's tokens
    const int warp = mma::warpgroup_thread() / kWarp, lane = lane_index();
    const int first = owned.token + warp * kTokens;
    uint8_t* staging = shared.staging[warpgroup] + warp * kTokens * kBlockK;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        float most = kLeastMaximum;
#pragma unroll
        for (int i = 0; i < kBlockK / 4; ++i) {
            const int wave = i / 16, at = i % 16 / 2 * 8 + 2 * lower + i % 2;
            sum[wave][at] = silu_mul_rounded(p, sum[wave][at], sum[wave][at + 4]);
            most = max_nan(most, fabsf(sum[wave][at]));
        }
        most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float scale = group_scale<POWER_OF_TWO != 0>(most), inverse = __fdiv_rn(1.0f, scale);
        const int again = ptx::fresh_lane();  // sixteen addresses that were kept since `most` would take too many registers
        const int local = again / 4 + lower * 8;
        if (again % 4 == 0) store_scale(p, tile, first + local, scale);
#pragma unroll
        for (int i = 0; i < kBlockK / 8; ++i) {
            const int wave = i / 8, at = i % 8 * 8 + 2 * lower, output = i * 8 + again % 4 * 2;
            const uint32_t both = to_fp8(sum[wave][at] * inverse, sum[wave][at + 1] * inverse);
            *reinterpret_cast<uint16_t*>(staging + staged_output(local, output)) = static_cast<uint16_t>(both);
        }
    }
    __syncwarp();
    store_tokens<kTokens, kWarp>(p, tile, staging, first, lane);
    __syncwarp();
}

DEVICE void store_silu_mul(const GemmParams& p, Shared& shared, const Tile& tile, mma::Owned owned, int warpgroup,
                           Fragments::Sum (&sum)[kWaves]) {
    if constexpr (kAcrossWarps) {
        store_few_tokens(p, shared, tile, warpgroup, sum);
    } else {
        store_many_tokens(p, shared, tile, owned, warpgroup, sum);
    }
}
#endif

}  // namespace moe_fp8
