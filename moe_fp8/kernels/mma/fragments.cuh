// The two ways a GEMM tile of kBlockM tokens x kBlockN weight rows is laid over wgmma. wgmma's M is always 64, its N any
// multiple of 8, so:
//
//   WeightsOnM  few tokens: they are the columns, so that 8 tokens cost 8 columns and not 64 padded rows.
//   TokensOnM   many tokens: a thread's rows are two tokens, so promotion needs two token scales and not one a column.
//
// Both split the tile between two warpgroups and each warpgroup's part into waves: fragments of 64 x kColumns, each within
// one 128-row scale block of the weights. `promote` is the second level of accumulation: the tensor core's sum over 128 of
// K enters the fp32 accumulator times both scales. `store` writes a fragment's tokens [begin, end), counted from the tile's
// first, and `columns` weight rows, a multiple of 64; `out` is its first token's element at the fragment's first weight row,
// `staging` kStagingBytes of shared memory for each warpgroup.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace moe_fp8::mma {

// A staged token: 64 bf16 and 16 bytes against bank conflicts.
constexpr int kStagedTokenBytes = 64 * 2 + 16;

DEVICE int warpgroup_thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }

template <int kBlockM, int kBlockN>
struct WeightsOnM {
    static constexpr int kColumns = kBlockM;
    static constexpr int kWaves = kBlockN / 128;
    static constexpr int kStagingBytes = kBlockM * kStagedTokenBytes;
    static_assert(kBlockM <= 64 && kBlockN == 128 * kWaves, "a wave is 64 weight rows of each warpgroup");
    using Sum = float[kColumns / 2];

    static DEVICE int weight_row(int warpgroup, int wave) { return (warpgroup * kWaves + wave) * 64; }
    static DEVICE const uint8_t* m_operand(const uint8_t* weights, const uint8_t*, int warpgroup, int wave) {
        return weights + weight_row(warpgroup, wave) * kBlockK;
    }
    static DEVICE const uint8_t* n_operand(const uint8_t*, const uint8_t* tokens, int) { return tokens; }

    static DEVICE void promote(Sum& sum, const Sum& partial, const float* token_scales, float weight_scale, int) {
        const float2* pairs = reinterpret_cast<const float2*>(token_scales) + lane_index() % 4;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const float2 scale = pairs[j * 4];
            const float even = scale.x * weight_scale, odd = scale.y * weight_scale;
            sum[4 * j + 0] += partial[4 * j + 0] * even;
            sum[4 * j + 1] += partial[4 * j + 1] * odd;
            sum[4 * j + 2] += partial[4 * j + 2] * even;
            sum[4 * j + 3] += partial[4 * j + 3] * odd;
        }
    }

    // Transposed through `staging`, so that a token's 64 columns leave as 128 consecutive bytes.
    static DEVICE void store(const Sum& d, uint16_t* out, int64_t stride, int begin, int end, int columns,
                             void* staging, int warpgroup) {
        if (columns <= 0) return;
        const int thread = warpgroup_thread(), warp = thread / kWarp, lane = thread % kWarp;
        // Matrix lane/8 of an x4 store: tokens of group j + lane/16, weight rows from 8 * (lane/8 % 2).
        const uint32_t address = ptx::shared_address(staging) + (lane / 16 * 8 + lane % 8) * kStagedTokenBytes +
                                 warp * 32 + lane / 8 % 2 * 16;
        ptx::named_barrier(1 + warpgroup, kWarpgroup);
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
            const uint32_t target = address + j * 8 * kStagedTokenBytes;
            const uint32_t r0 = ptx::pack_bf16(d[4 * j], d[4 * j + 1]), r1 = ptx::pack_bf16(d[4 * j + 2], d[4 * j + 3]);
            if constexpr (kColumns == 8) {
                ptx::stmatrix_x2_trans(target, r0, r1);
            } else {
                ptx::stmatrix_x4_trans(target, r0, r1, ptx::pack_bf16(d[4 * j + 4], d[4 * j + 5]),
                                       ptx::pack_bf16(d[4 * j + 6], d[4 * j + 7]));
            }
        }
        ptx::named_barrier(1 + warpgroup, kWarpgroup);
#pragma unroll
        for (int item = thread; item < kColumns * 8; item += kWarpgroup) {
            const int token = item / 8, part = item % 8;
            if (begin <= token && token < end) {
                const char* source = static_cast<const char*>(staging) + token * kStagedTokenBytes + part * 16;
                *reinterpret_cast<uint4*>(out + token * stride + part * 8) = *reinterpret_cast<const uint4*>(source);
            }
        }
    }

    // fp32 leaves straight from the registers; eight lanes write 32 consecutive bytes of a token.
    static DEVICE void store(const Sum& d, float* out, int64_t stride, int begin, int end, int columns, void*, int) {
        if (columns <= 0) return;
        const int thread = warpgroup_thread();
        float* column = out + thread / kWarp * 16 + thread % kWarp / 4;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
            const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
            if (begin <= token && token < end) column[token * stride + i / 2 % 2 * 8] = d[i];
        }
    }
};

template <int kBlockM, int kBlockN>
struct TokensOnM {
    static constexpr int kColumns = 128;
    static constexpr int kWaves = kBlockN / 128;
    static constexpr int kStagingBytes = 64 * kStagedTokenBytes;
    static_assert(kBlockM == 128 && kBlockN == 128 * kWaves, "a wave is 64 tokens of each warpgroup x 128 weight rows");
    using Sum = float[kColumns / 2];

    static DEVICE int weight_row(int, int wave) { return wave * 128; }
    static DEVICE const uint8_t* m_operand(const uint8_t*, const uint8_t* tokens, int warpgroup, int) {
        return tokens + warpgroup * 64 * kBlockK;
    }
    static DEVICE const uint8_t* n_operand(const uint8_t* weights, const uint8_t*, int wave) {
        return weights + wave * 128 * kBlockK;
    }

    // This thread's upper token within the tile; its lower one is 8 further on.
    static DEVICE int upper_token(int warpgroup) {
        return warpgroup * 64 + warpgroup_thread() / kWarp * 16 + lane_index() / 4;
    }

    static DEVICE void promote(Sum& sum, const Sum& partial, const float* token_scales, float weight_scale,
                               int warpgroup) {
        const float upper = token_scales[upper_token(warpgroup)] * weight_scale;
        const float lower = token_scales[upper_token(warpgroup) + 8] * weight_scale;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            sum[4 * j + 0] += partial[4 * j + 0] * upper;
            sum[4 * j + 1] += partial[4 * j + 1] * upper;
            sum[4 * j + 2] += partial[4 * j + 2] * lower;
            sum[4 * j + 3] += partial[4 * j + 3] * lower;
        }
    }

    // 64 columns at a time through `staging`, where each warp keeps to its own 16 tokens.
    static DEVICE void store(const Sum& d, uint16_t* out, int64_t stride, int begin, int end, int columns,
                             void* staging, int warpgroup) {
        const int warp = warpgroup_thread() / kWarp, lane = lane_index();
        char* rows = static_cast<char*>(staging) + warp * 16 * kStagedTokenBytes;
        // Matrix lane/8 of an x4 store: tokens from 8 * (lane/8 % 2), columns of group j + lane/16.
        const uint32_t address =
            ptx::shared_address(rows) + (lane / 8 % 2 * 8 + lane % 8) * kStagedTokenBytes + lane / 16 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half * 64 >= columns) return;
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float* group = &d[half * 32 + 4 * j];
                ptx::stmatrix_x4(address + j * 16, ptx::pack_bf16(group[0], group[1]), ptx::pack_bf16(group[2], group[3]),
                                 ptx::pack_bf16(group[4], group[5]), ptx::pack_bf16(group[6], group[7]));
            }
            __syncwarp();
#pragma unroll
            for (int first = 0; first < 16; first += 4) {
                const int row = first + lane / 8, token = warpgroup * 64 + warp * 16 + row;
                if (begin <= token && token < end) {
                    *reinterpret_cast<uint4*>(out + token * stride + half * 64 + lane % 8 * 8) =
                        *reinterpret_cast<const uint4*>(rows + row * kStagedTokenBytes + lane % 8 * 16);
                }
            }
        }
    }

    static DEVICE void store(const Sum& d, float* out, int64_t stride, int begin, int end, int columns, void*,
                             int warpgroup) {
        const int upper = upper_token(warpgroup), lower = upper + 8;
        float* pairs = out + lane_index() % 4 * 2;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            if (8 * j >= columns) return;
            if (begin <= upper && upper < end) {
                *reinterpret_cast<float2*>(pairs + upper * stride + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
            }
            if (begin <= lower && lower < end) {
                *reinterpret_cast<float2*>(pairs + lower * stride + 8 * j) = make_float2(d[4 * j + 2], d[4 * j + 3]);
            }
        }
    }
};

}  // namespace moe_fp8::mma
