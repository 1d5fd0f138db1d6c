// The two ways a GEMM tile of kBlockM tokens x kBlockN weight rows is laid over wgmma. wgmma's M is always 64, its N any
// multiple of 8, so:
//
//   WeightsOnM  few tokens: they are the columns, so that 8 tokens cost 8 columns and not 64 padded rows.
//   TokensOnM   many tokens: a thread's rows are two tokens, so promotion needs two token scales and not one a column.
//
// Each of two warpgroups owns kWaves fragments, 64 x kColumns, each within one 128-row scale block of the weights.
// `promote` is the second level of accumulation: the tensor core's sum over 128 of K enters the fp32 sum times both
// scales. `Scales` holds the products of both, read ahead of the wait for the tensor core.
//
// `store` writes one fragment's tokens [begin, end), counted from the tile's first, and `columns` weight rows, a multiple
// of 64, from the fragment's `weight_row` on. `out` is the first token's element there; `staging` has kStagingBytes for
// each warpgroup.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace moe_fp8::mma {

// A staged token is 64 bf16 in eight chunks of 16 bytes, permuted by the token so that no two rows of an 8x8 matrix meet
// in a bank.
constexpr int kStagedTokenBytes = 64 * 2;
DEVICE int staged_chunk(int token, int chunk) { return (chunk ^ token % 8) * 16; }

// Read anew at each call: the addresses that an epilogue derives from it are not kept in registers over the main loop.
DEVICE int fresh_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

DEVICE int warpgroup_thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }

template <int kBlockM, int kBlockN>
struct WeightsOnM {
    static constexpr int kColumns = kBlockM;
    static constexpr int kWaves = 1;
    static constexpr int kStagingBytes = kBlockM * kStagedTokenBytes;
    static_assert(kBlockM <= 64 && kBlockN == 128, "64 weight rows for each warpgroup");
    using Sum = float[kColumns / 2];

    static DEVICE int weight_row(int warpgroup, int) { return warpgroup * 64; }
    static DEVICE const uint8_t* m_operand(const uint8_t* weights, const uint8_t*, int warpgroup) {
        return weights + warpgroup * 64 * kBlockK;
    }
    static DEVICE const uint8_t* n_operand(const uint8_t*, const uint8_t* tokens) { return tokens; }

    struct Scales {
        float2 pairs[kColumns / 8];

        DEVICE Scales(const float* token_scales, float weight_scale, int) {
            const float2* source = reinterpret_cast<const float2*>(token_scales) + lane_index() % 4;
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                const float2 pair = source[j * 4];
                pairs[j] = make_float2(pair.x * weight_scale, pair.y * weight_scale);
            }
        }
    };

    static DEVICE void promote(Sum& sum, const Sum& partial, const Scales& scales) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            sum[4 * j + 0] += partial[4 * j + 0] * scales.pairs[j].x;
            sum[4 * j + 1] += partial[4 * j + 1] * scales.pairs[j].y;
            sum[4 * j + 2] += partial[4 * j + 2] * scales.pairs[j].x;
            sum[4 * j + 3] += partial[4 * j + 3] * scales.pairs[j].y;
        }
    }

    // Transposed through `staging`, so that a token's 64 columns leave as 128 consecutive bytes.
    static DEVICE void store(const Sum& d, uint16_t* out, int64_t stride, int begin, int end, int columns,
                             void* staging, int warpgroup) {
        if (columns <= 0) return;
        const int thread = warpgroup_thread(), warp = thread / kWarp, lane = thread % kWarp;
        // Matrix lane/8 of an x4 store: tokens of group j + lane/16, weight rows from 8 * (lane/8 % 2).
        const uint32_t address = ptx::shared_address(staging) + (lane / 16 * 8 + lane % 8) * kStagedTokenBytes +
                                 staged_chunk(lane, warp * 2 + lane / 8 % 2);
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
                const char* source =
                    static_cast<const char*>(staging) + token * kStagedTokenBytes + staged_chunk(token, part);
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
    static constexpr int kWaves = kBlockN / kColumns;
    static constexpr int kStagingBytes = 64 * kStagedTokenBytes;
    static_assert(kBlockM == 128 && kBlockN == kColumns * kWaves, "64 tokens for each warpgroup");
    using Sum = float[kColumns / 2];

    static DEVICE int weight_row(int, int wave) { return wave * kColumns; }
    static DEVICE const uint8_t* m_operand(const uint8_t*, const uint8_t* tokens, int warpgroup) {
        return tokens + warpgroup * 64 * kBlockK;
    }
    static DEVICE const uint8_t* n_operand(const uint8_t* weights, const uint8_t*) { return weights; }

    // This thread's upper token within the tile; its lower one is 8 further on.
    static DEVICE int upper_token(int warpgroup) {
        return warpgroup * 64 + warpgroup_thread() / kWarp * 16 + lane_index() / 4;
    }

    struct Scales {
        float upper, lower;

        DEVICE Scales(const float* token_scales, float weight_scale, int warpgroup)
            : upper(token_scales[upper_token(warpgroup)] * weight_scale),
              lower(token_scales[upper_token(warpgroup) + 8] * weight_scale) {}
    };

    static DEVICE void promote(Sum& sum, const Sum& partial, const Scales& scales) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            sum[4 * j + 0] += partial[4 * j + 0] * scales.upper;
            sum[4 * j + 1] += partial[4 * j + 1] * scales.upper;
            sum[4 * j + 2] += partial[4 * j + 2] * scales.lower;
            sum[4 * j + 3] += partial[4 * j + 3] * scales.lower;
        }
    }

    // 64 columns at a time through `staging`, where each warp keeps to its own 16 tokens.
    static DEVICE void store(const Sum& d, uint16_t* out, int64_t stride, int begin, int end, int columns,
                             void* staging, int warpgroup) {
        const int warp = warpgroup_thread() / kWarp, lane = fresh_lane();
        char* rows = static_cast<char*>(staging) + warp * 16 * kStagedTokenBytes;
        // Matrix lane/8 of an x4 store: tokens from 8 * (lane/8 % 2), columns of group j + lane/16.
        const uint32_t address = ptx::shared_address(rows) + (lane / 8 % 2 * 8 + lane % 8) * kStagedTokenBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half * 64 >= columns) return;
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float* group = &d[half * 32 + 4 * j];
                ptx::stmatrix_x4(address + staged_chunk(lane, j + lane / 16), ptx::pack_bf16(group[0], group[1]),
                                 ptx::pack_bf16(group[2], group[3]), ptx::pack_bf16(group[4], group[5]),
                                 ptx::pack_bf16(group[6], group[7]));
            }
            __syncwarp();
#pragma unroll
            for (int first = 0; first < 16; first += 4) {
                const int row = first + lane / 8, token = warpgroup * 64 + warp * 16 + row;
                if (begin <= token && token < end) {
                    *reinterpret_cast<uint4*>(out + token * stride + half * 64 + lane % 8 * 8) =
                        *reinterpret_cast<const uint4*>(rows + row * kStagedTokenBytes + staged_chunk(row, lane % 8));
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

// A warpgroup's 64 tokens of one stage as wgmma's A operand in registers.
struct TokenRegisters {
    uint32_t k32[kBlockK / 32][4];

    DEVICE void load(const uint8_t* tokens) {
        const int lane = lane_index();
        // Matrix lane/8: rows from 8 * (lane/8 % 2), bytes from 16 * (lane/16); TMA has swizzled the row's 16-byte chunks.
        const int row = warpgroup_thread() / kWarp * 16 + lane % 16;
        const uint32_t address = ptx::shared_address(tokens + row * kBlockK);
#pragma unroll
        for (int i = 0; i < kBlockK / 32; ++i) {
            ptx::ldmatrix_x4(k32[i], address + ((i * 2 + lane / 16) ^ row % 8) * 16);
        }
    }
};

}  // namespace moe_fp8::mma
