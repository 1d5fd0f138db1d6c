// The fragments of a GEMM whose tokens and weights both have a scale for each row.
#pragma once

#include "mma/fragments.cuh"

namespace moe_fp8::mma {

// An fp32 sum lies in shared memory in boxes of kSumRows rows (those of a warpgroup) by kSumColumns columns, 128 bytes a row,
// swizzled as TMA expects it.
constexpr int kSumRows = 64, kSumColumns = 32, kSumBoxBytes = kSumRows * kSumColumns * sizeof(float);

// Weights with a scale for each row lie in a stage in another order, so that a thread has four consecutive weight rows and not twice
// two. The even rows of each kWoven rows come first. So a thread's columns of wgmma, 2q and 2q + 1 of group j and of the group that lies
// kWoven/2 columns further on, are the rows 16j + 4q to 16j + 4q + 3, where q is lane % 4.
constexpr int kWoven = 128, kQuadRows = 16;

// Tokens and weights both have a scale for each row. A thread's columns have scales of their own, for which there are no registers:
// `promote` reads them from the stage, a few quads ahead, so the stage is handed back after it (`Promoted`).
template <int kBlockM, int kBlockN>
struct RowScaled : TokensOnM<kBlockM, kBlockN> {
    using Base = TokensOnM<kBlockM, kBlockN>;
    using Sum = typename Base::Sum;
    static constexpr bool kHasStaging = false;
    static constexpr int kQuads = Base::kColumns / kQuadRows;
    static_assert(Base::kColumns == kWoven && kBlockN % kWoven == 0, "a fragment has the rows that are in another order together");
    static constexpr int kAhead = kBlockN > 192 ? 1 : 2;  // quads whose scales are read at once

    struct Scales {
        float upper, lower;
        const float4* weights;  // this thread's rows of the first fragment
        float4 first[kAhead];

        DEVICE void load(const float* token_scales, const float* weight_scales, Owned owned) {
            upper = ptx::load_here(token_scales), lower = ptx::load_here(token_scales + 8);
            weights = reinterpret_cast<const float4*>(weight_scales + owned.weight) + lane_index() % 4;
        }
        DEVICE void complete() {}
        // Reads the scales of fragment kWave from quad kQuad on.
        template <int kWave, int kQuad>
        DEVICE void read(float4 (&there)[kAhead]) const {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) there[i] = ptx::load_here(&weights[(kWave * kQuads + kQuad + i) * 4]);
        }
        // Reads the first scales. They are on their way while the warp waits for the product.
        template <int kWave>
        DEVICE void prepare() { read<kWave, 0>(first); }
        template <typename Visit>
        DEVICE void each(Visit& visit) const { visit(upper), visit(lower); }
    };

    template <int kWave>
    static DEVICE void promote(Sum& sum, const Sum& partial, const Scales& scales) {
        static_assert(kQuads % kAhead == 0, "whole reads");
        promote_from<kWave, 0>(sum, partial, scales, scales.first);
    }

    template <int kWave, int kQuad>
    static DEVICE void promote_from(Sum& sum, const Sum& partial, const Scales& scales, const float4 (&weights)[kAhead]) {
        constexpr bool kMore = kQuad + kAhead < kQuads;
        float4 next[kAhead];
        if constexpr (kMore) scales.template read<kWave, kQuad + kAhead>(next);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const float rows[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                const int at = index(kQuad + i, row);
                sum[at] += partial[at] * (scales.upper * rows[row]);
                sum[at + 2] += partial[at + 2] * (scales.lower * rows[row]);
            }
        }
        if constexpr (kMore) promote_from<kWave, kQuad + kAhead>(sum, partial, scales, next);
    }

    // Returns where a sum has the upper token's product with row `row` of this thread's four rows. The lower token's is two further on.
    static DEVICE constexpr int index(int quad, int row) { return 4 * quad + row % 2 * (kWoven / 4) + row / 2; }

    // The products of this thread's upper (half 0) or lower token with its four rows.
    static DEVICE float4 quad_of(const Sum& d, int quad, int half) {
        const int at = 2 * half;
        return make_float4(d[index(quad, 0) + at], d[index(quad, 1) + at], d[index(quad, 2) + at], d[index(quad, 3) + at]);
    }

    // Writes a sum to the warpgroup's `staging`, or adds it to what is there.
    static DEVICE void leave(const Sum& d, uint8_t* staging, bool add) {
        constexpr int kBoxQuads = kSumColumns / kQuadRows, kAtOnce = 4;
        static_assert(kBoxQuads == 2 && kQuads % kAtOnce == 0, "two quads in each row of a box");
        const int lane = ptx::fresh_lane(), upper = warpgroup_thread() / kWarp * 16 + lane / 4;
        // A thread's rows are eight apart, so both have the same swizzle. Eight lanes, which are two rows, access shared memory at once.
        // The odd row takes the two quads of a box in the other order, because both rows would meet the same banks otherwise.
        const bool swapped = lane / 4 % 2;
        const int chunk = staged_chunk<128>(lane / 4, lane % 4) ^ (swapped ? 64 : 0);
        uint8_t* row = staging + upper * 128;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int first = 0; first < kQuads; first += kAtOnce) {
                float4 sums[kAtOnce];
                float4* there[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int quad = first + i, box = quad / kBoxQuads * kSumBoxBytes;
                    there[i] = reinterpret_cast<float4*>(row + box + half * 8 * 128 + (chunk ^ quad % kBoxQuads * 64));
                    const float4 own = quad_of(d, quad, half), other = quad_of(d, quad ^ 1, half);
                    sums[i] = make_float4(swapped ? other.x : own.x, swapped ? other.y : own.y, swapped ? other.z : own.z,
                                          swapped ? other.w : own.w);
                }
                if (add) {
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const float4 before = *there[i];
                        sums[i].x += before.x, sums[i].y += before.y, sums[i].z += before.z, sums[i].w += before.w;
                    }
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) *there[i] = sums[i];
            }
        }
    }

    // Stores a fragment from registers, or lets memory add it to fp32. No warp waits for that, but L2 adds only 1.2 TB/s on an H200.
    template <typename Out>
    static DEVICE void store(const Sum& d, Out* out, int64_t stride, const typename Base::Region& region, int columns, int accumulate) {
        if constexpr (kAddable<Out>) {
            if (accumulate) return store_quads(d, out, stride, region, columns, [](Out* at, float4 quad) { ptx::add_global(at, quad); });
        }
        store_quads(d, out, stride, region, columns, [](Out* at, float4 quad) { ptx::store_quad_as(at, quad); });
    }

    // (N is a multiple of 64. If each quad had its own test, ptxas would keep the results in registers.)
    template <typename Out, typename Put>
    static DEVICE void store_quads(const Sum& d, Out* out, int64_t stride, const typename Base::Region& region, int columns, Put put) {
        constexpr int kTested = 64;
        static_assert(kBlockN % kTested == 0, "whole stores");
        const int lane = ptx::fresh_lane(), upper = warpgroup_thread() / kWarp * 16 + lane / 4;
        const int right = min(region.right, columns);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = upper + 8 * half;
            if (token < region.begin || token >= region.end) continue;
            Out* quads = out + token * stride + lane % 4 * 4;
#pragma unroll
            for (int first = 0; first < Base::kColumns; first += kTested) {
                if (first >= right) continue;
#pragma unroll
                for (int column = first; column < first + kTested; column += kQuadRows) {
                    put(quads + column, quad_of(d, column / kQuadRows, half));
                }
            }
        }
        __syncwarp();  // `WeightsOnM::store` says why
    }

    // A sum that was computed from every scale that `promote` has read.
    struct Promoted {
        const Sum& sum;
        template <typename Visit>
        DEVICE void each(Visit& visit) const {
#pragma unroll
            for (int quad = 0; quad < kQuads; quad += 2) visit(sum[4 * quad], sum[4 * quad + 6]);
        }
    };
};

}  // namespace moe_fp8::mma
