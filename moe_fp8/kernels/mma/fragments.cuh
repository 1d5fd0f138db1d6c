// There are two ways to lay a GEMM tile of kBlockM tokens x kBlockN weight rows over wgmma. wgmma's M is always 64, and its N is
// any multiple of 8, so:
//
//   WeightsOnM  few tokens: they are the columns, so that 8 tokens cost 8 columns and not 64 padded rows.
//   TokensOnM   many tokens: a thread's rows are two tokens, so promotion needs two token scales, not a token scale for each column.
//
// Each math warpgroup owns a part of the tile, in kWaves fragments of 64 x kColumns. `promote` is the second level of accumulation:
// the tensor core's sum over 128 of K enters the fp32 sum times both scales.
//
// `store` writes one fragment to `out`, which points at the fragment's first token and first weight row. Only the first `columns`
// of its weight rows exist. With `accumulate`, fp32 is added to what is there. If tokens are many, bf16 goes through shared memory
// (kHasStaging): `stage` writes a warp's tokens of one fragment to the warpgroup's staging. There each kBoxRows weight rows have a
// box of kStagedTokens tokens x kBoxBytes, swizzled as TMA expects it.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace moe_fp8::mma {

// The weight rows, counted from a tile's first, that have one scale. (A tile begins at a multiple of its own size.)
template <int kBlockN>
constexpr int kScaleRows = kBlockN % 128 == 0 ? 128 : kBlockN % 64 == 0 ? 64 : 32;

// Returns where `chunk` of 16 bytes lies among the kBytes of a staged token. The swizzle is kBytes wide.
template <int kBytes>
DEVICE int staged_chunk(int token, int chunk) {
    static_assert(kBytes == 128 || kBytes == 64, "swizzles of TMA");
    return (chunk ^ (kBytes == 128 ? token % 8 : token / 2 % 4)) * 16;
}

template <typename Out>
constexpr bool kAddable = sizeof(Out) == sizeof(float);

DEVICE int warpgroup_thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }

// A warpgroup owns `fragments` fragments of a tile, from this token and this weight row on.
struct Owned {
    int token, weight, fragments;
};

// Tokens [begin, end) and weight rows [left, right) of a fragment are stored.
struct Stored {
    int begin, end, left, right;
};

// If gate and up rows are interleaved (kInterleaved: eight rows of the gate, then eight of up), a tile of 256 weight rows has 128
// gates, whose weights have the first scale, and 128 ups, which have the second.
template <int kBlockM, int kBlockN, bool kInterleaved = false>
struct WeightsOnM {
    static constexpr int kColumns = kBlockM;
    static constexpr int kWaves = kBlockN == 256 ? 2 : 1;
    static constexpr int kWaveRows = 64;  // weight rows from a fragment to the next
    static constexpr bool kWeightsAreM = true;
    static constexpr bool kHasStaging = false;
    static_assert(kBlockM <= 32 && (kBlockN == 128 || kBlockN == 64 || (kBlockN == 256 && kInterleaved)),
                  "64 or 128 weight rows for each warpgroup, or 64 for both");
    using Sum = float[kColumns / 2];

    // The region of the column groups [first, end).
    struct Region : Stored {
        DEVICE Region(int begin, int end, int first_group, int end_group)
            : Stored{max(begin, first_group * 8), min(end, end_group * 8), 0, 64} {}
    };

    static DEVICE Owned whole(int warpgroup) { return {0, kBlockN == 64 ? 0 : warpgroup * (kBlockN / 2), kWaves}; }
    static DEVICE Owned owned(int warpgroup, int, int) { return whole(warpgroup); }
    // This thread's first scale among a tile's token scales.
    static DEVICE int first_token_scale(Owned) { return lane_index() % 4 * 2; }

    static constexpr int kUp = kInterleaved ? 1 : 0;  // the scale of up rows

    struct Scales {
        float2 tokens[kColumns / 8];
        float weights[kUp + 1];

        // Loads a stage's scales: those of tokens from `first_token_scale` on.
        DEVICE void load(const float* token_scales, const float* weight_scales, Owned) {
            const float2* source = reinterpret_cast<const float2*>(token_scales);
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) tokens[j] = ptx::load_here(&source[j * 4]);
#pragma unroll
            for (int i = 0; i <= kUp; ++i) weights[i] = ptx::load_here(&weight_scales[i]);
        }
        // It is called when the product is on its way. Some fragments then multiply the tokens' scales by the weights'.
        DEVICE void complete() {}
        template <typename Visit>
        DEVICE void each(Visit& visit) const { visit(tokens), visit(weights); }
    };

    template <int>
    static DEVICE void promote(Sum& sum, const Sum& partial, const Scales& scales) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const float2 token = scales.tokens[j];
            sum[4 * j + 0] += partial[4 * j + 0] * (token.x * scales.weights[0]);
            sum[4 * j + 1] += partial[4 * j + 1] * (token.y * scales.weights[0]);
            sum[4 * j + 2] += partial[4 * j + 2] * (token.x * scales.weights[kUp]);
            sum[4 * j + 3] += partial[4 * j + 3] * (token.y * scales.weights[kUp]);
        }
    }

    // Eight lanes write consecutive weight rows of a token. For so few tokens this is as fast as going through shared memory, and
    // 300 cycles sooner.
    template <typename Out>
    static DEVICE void store(const Sum& sum, Out* out, int64_t stride, const Region& region, int columns, int accumulate) {
        if (columns <= 0) return;
        const int lane = ptx::fresh_lane();
        Out* row = out + warpgroup_thread() / kWarp * 16 + lane / 4;
        Sum d;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[i] = sum[i];
        if constexpr (kAddable<Out>) {
            if (accumulate) add_there(d, row, stride, region, lane);
        }
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int token = j * 8 + lane % 4 * 2 + odd;
                if (token < region.begin || token >= region.end) continue;
                ptx::store_as(row + token * stride, d[4 * j + odd]);
                ptx::store_as(row + token * stride + 8, d[4 * j + 2 + odd]);
            }
        }
        __syncwarp();  // without it the compiler takes the warp to be diverged, and the main loop's addresses leave the uniform registers
    }

    // Adds what is there to `d`. All of it is loaded before anything is stored, so that the warp waits once.
    static DEVICE void add_there(Sum& d, const float* row, int64_t stride, const Region& region, int lane) {
        Sum there;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
            const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
            there[i] = region.begin <= token && token < region.end ? row[token * stride + i % 4 / 2 * 8] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[i] += there[i];
    }
};

// The weight rows of a box of a staged output, for tiles of kBlockN weight rows.
template <int kBlockN>
constexpr int kBoxRowsOf = kBlockN % 64 == 0 ? 64 : 32;

// In tiles of 64 tokens each warpgroup has 64 weight rows, or the only warpgroup has all 96. If one of the widest tiles has no more
// than 64 tokens, the warpgroups take the same tokens, and each takes its own half of the weight rows. If such a tile also has only
// half of the weight rows, one warpgroup rests.
template <int kBlockM, int kBlockN, bool kInterleaved = false>
struct TokensOnM {
    static constexpr int kColumns = kBlockM == 64 && kBlockN % 64 == 0 ? 64 : kBlockN <= 192 ? kBlockN : 128;
    static constexpr int kWaveRows = kColumns;
    static constexpr int kWaves = kBlockM == 64 ? 1 : kBlockN / kColumns;
    static constexpr bool kWeightsAreM = false;
    static constexpr int kScaleColumns = kScaleRows<kBlockN>;
    static constexpr int kScales = kBlockN / kScaleColumns;
    static constexpr bool kHasStaging = true;
    static constexpr int kStagedTokens = 64;
    static constexpr int kBoxRows = kBoxRowsOf<kBlockN>, kBoxBytes = kBoxRows * 2, kBoxes = kColumns / kBoxRows;
    static constexpr int kStagedBoxBytes = kStagedTokens * kBoxBytes;
    static_assert(kBlockM % 64 == 0 && kBlockN % 32 == 0 && kBlockN <= 256, "64 tokens for each warpgroup");
    static_assert(kBlockM > 64 || kBlockN == 64 || kBlockN == 96 || kBlockN == 128, "64 weight rows for each warpgroup, or all 96");
    using Sum = float[kColumns / 2];

    // The region of the column groups [first, end).
    struct Region : Stored {
        DEVICE Region(int begin, int end, int first_group, int end_group)
            : Stored{begin, end, first_group * 8, end_group * 8} {}
    };

    // Both return the part that a warpgroup owns: `whole` of a whole tile, `owned` of a tile of so many tokens and weight rows.
    static DEVICE Owned whole(int warpgroup) {
        return kBlockM == 64 ? Owned{0, warpgroup * 64, 1} : Owned{warpgroup * 64, 0, kWaves};
    }
    static DEVICE Owned owned(int warpgroup, int tokens, int width) {
        if (kInterleaved) return whole(warpgroup);
        if (kBlockN == 256 && width == kColumns) return {warpgroup * 64, 0, 1};
        return kBlockN == 256 && tokens <= 64 ? Owned{0, warpgroup * kColumns, 1} : whole(warpgroup);
    }
    // Returns this thread's upper token within the owned part. Its lower token is 8 further on.
    static DEVICE int upper_token() { return warpgroup_thread() / kWarp * 16 + lane_index() / 4; }

    static DEVICE int first_token_scale(Owned owned) { return owned.token + upper_token(); }

    // The scales of this thread's two tokens and of the weights. If no tile of the kernel has two fragments, `complete` replaces those of
    // the tokens by their products with those of the weights. (With two, the second wgmma of a block would wait for these products.)
    struct Scales {
        static constexpr bool kCompleted = kWaves == 1;
        static constexpr int kProducts = kCompleted ? kScales : 1;
        float upper[kProducts], lower[kProducts], weights[kScales];

        DEVICE void load(const float* token_scales, const float* weight_scales, Owned owned) {
            upper[0] = ptx::load_here(token_scales), lower[0] = ptx::load_here(token_scales + 8);
            if constexpr (kScales == 3) {
                const float4 all = ptx::load_here(reinterpret_cast<const float4*>(weight_scales));
                weights[0] = all.x, weights[1] = all.y, weights[2] = all.z;
            } else {
#pragma unroll
                for (int i = 0; i < kScales; ++i) {
                    weights[i] = ptx::load_here(&weight_scales[i == 0 ? owned.weight / kScaleColumns : i]);
                }
            }
        }
        DEVICE void complete() {
            const float upper_token = upper[0], lower_token = lower[0];
#pragma unroll
            for (int i = 0; kCompleted && i < kProducts; ++i) {
                upper[i] = ptx::multiply_here(upper_token, weights[i]), lower[i] = ptx::multiply_here(lower_token, weights[i]);
            }
        }
        DEVICE float upper_product(int i) const { return kCompleted ? upper[i] : upper[0] * weights[i]; }
        DEVICE float lower_product(int i) const { return kCompleted ? lower[i] : lower[0] * weights[i]; }
        template <typename Visit>
        DEVICE void each(Visit& visit) const {
            visit(upper), visit(lower);
            if (!kCompleted) visit(weights);
        }
    };

    template <int kWave>
    static DEVICE void promote(Sum& sum, const Sum& partial, const Scales& scales) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const int at = kInterleaved ? j % 2 : (kWave * kColumns + j * 8) / kScaleColumns;
            const float upper = scales.upper_product(at), lower = scales.lower_product(at);
            sum[4 * j + 0] += partial[4 * j + 0] * upper;
            sum[4 * j + 1] += partial[4 * j + 1] * upper;
            sum[4 * j + 2] += partial[4 * j + 2] * lower;
            sum[4 * j + 3] += partial[4 * j + 3] * lower;
        }
    }

    static DEVICE void stage(const Sum& d, uint8_t* staging) {
        const int lane = ptx::fresh_lane();
        // Matrix lane/8 of an x4 store has the tokens from 8 * (lane/8 % 2) on, and the weight rows of group j + lane/16.
        const uint32_t row = ptx::shared_address(staging) + (warpgroup_thread() / kWarp * 16 + lane % 16) * kBoxBytes;
        const uint32_t chunk = staged_chunk<kBoxBytes>(lane, lane / 16);
        constexpr int kGroups = kBoxRows / 8;  // column groups of a box
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
            const float* group = &d[4 * j];
            ptx::stmatrix_x4(row + j / kGroups * kStagedTokens * kBoxBytes + (chunk ^ j % kGroups * 16),
                             ptx::pack_bf16(group[0], group[1]), ptx::pack_bf16(group[2], group[3]),
                             ptx::pack_bf16(group[4], group[5]), ptx::pack_bf16(group[6], group[7]));
        }
    }

    // It stores fp32. (`store_fragment` also names it in kernels that stage bf16, but does not call it there.)
    template <typename Out>
    static DEVICE void store(const Sum& sum, Out* out, int64_t stride, const Region& region, int columns, int accumulate) {
        static_assert(kAddable<Out>, "bf16 is staged");
        const int lane = ptx::fresh_lane(), upper = warpgroup_thread() / kWarp * 16 + lane / 4, lower = upper + 8;
        float* pairs = out + lane % 4 * 2;
        Sum d;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[i] = sum[i];
        if (accumulate) add_there(d, pairs, stride, region, upper, columns);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            if (8 * j < region.left || 8 * j >= min(region.right, columns)) continue;
            if (region.begin <= upper && upper < region.end) {
                *reinterpret_cast<float2*>(pairs + upper * stride + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
            }
            if (region.begin <= lower && lower < region.end) {
                *reinterpret_cast<float2*>(pairs + lower * stride + 8 * j) = make_float2(d[4 * j + 2], d[4 * j + 3]);
            }
        }
    }

    // Adds what is there to `d`. It is loaded for eight groups of columns at once, so that a warp seldom waits.
    static DEVICE void add_there(Sum& d, const float* pairs, int64_t stride, const Region& region, int upper, int columns) {
        constexpr int kGroups = kColumns / 8, kAtOnce = kGroups % 8 == 0 ? 8 : kGroups;
        const int right = min(region.right, columns);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = upper + 8 * half;
            const bool stored = region.begin <= token && token < region.end;
            const float* row = pairs + token * stride;
#pragma unroll
            for (int first = 0; first < kGroups; first += kAtOnce) {
                float2 there[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int column = 8 * (first + i);
                    there[i] = make_float2(0.0f, 0.0f);
                    if (stored && column >= region.left && column < right) {
                        there[i] = *reinterpret_cast<const float2*>(row + column);
                    }
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int at = 4 * (first + i) + 2 * half;
                    d[at] += there[i].x, d[at + 1] += there[i].y;
                }
            }
        }
    }
};

}  // namespace moe_fp8::mma
