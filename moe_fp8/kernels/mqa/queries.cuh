// Some warps prepare query tiles: they post tasks, copy queries and weights, and write for each token the terms of sum_h weight[h]
// * q[h] as FP8 rows behind the rows of the heads.
#pragma once

#include "common/quantize.cuh"
#include "common/types.cuh"
#include "mma/score.cuh"
#include "mqa/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace moe_fp8 {

// Returns the bits that a row's number flips in the addresses of the row's bytes. The tile is K-major, and its rows of kRowBytes
// are swizzled over kRowBytes.
template <int kRowBytes>
DEVICE constexpr int swizzle(int row) {
    return row % 8 / (128 / kRowBytes) * 16;
}

// Each thread of the kQueryWarps takes four elements of a token at a time.
template <typename Tile>
DEVICE void write_terms(typename Tile::Shared& shared, int slot, int warp) {
    constexpr int kHeadDim = Tile::kHeadDim, kHeads = Tile::kHeads;
    constexpr int kThreads = kHeadDim / 4;  // threads of a token
    constexpr int kAtOnce = Tile::kQueryWarps * kWarp / kThreads;
    const int thread = warp * kWarp + lane_index(), byte = thread % kThreads * 4;
#pragma unroll 1
    for (int first = 0; first < Tile::kTokens; first += kAtOnce) {
        // Threads past the last token take part in the exchange.
        const bool mine = first + thread / kThreads < Tile::kTokens;
        const int token = mine ? first + thread / kThreads : 0, within = token % Tile::kPassTokens;
        uint8_t* rows = &shared.queries[slot][token / Tile::kPassTokens * Tile::kPassBytes];
        const float4* weights = reinterpret_cast<const float4*>(&shared.weights[slot][token * kHeads]);

        // Rows of a head group begin at multiples of the swizzle's period.
        uint32_t group = ptx::shared_address(rows + within * kHeads * kHeadDim) + byte;
        float sum[4] = {};
#pragma unroll 1
        for (int head = 0; head < kHeads; head += 8, group += 8 * kHeadDim) {
            uint32_t packed[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) packed[i] = ptx::load_shared((group ^ swizzle<kHeadDim>(i)) + i * kHeadDim);
            const float4 low = weights[head / 4], high = weights[head / 4 + 1];
            const float each[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float q[4];
                unpack_fp8(q, packed[i]);
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] += each[i] * q[e];
            }
        }

        float amax = fmaxf(fmaxf(fabsf(sum[0]), fabsf(sum[1])), fmaxf(fabsf(sum[2]), fabsf(sum[3])));
#pragma unroll
        for (int distance = 1; distance < kThreads; distance *= 2) {
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        }
        // This power of two brings the largest element to between 128 and 256, while FP8 goes up to 448.
        const int exponent = max(__float_as_int(amax) >> 23, 8);
        const float inverse = __int_as_float((261 - exponent) << 23);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] *= inverse;
#pragma unroll
        for (int term = 0; term < mma::kTerms; ++term) {
            const float scale = __int_as_float(max(exponent - 7 - 4 * term, 0) << 23);
            if (mine && byte == 0) shared.term_scales[slot][token][term] = scale;
            const uint32_t packed = pack_fp8(sum[0], sum[1], sum[2], sum[3]);
            const int row = Tile::kHeadColumns + mma::term_column(within, term);
            if (mine) *reinterpret_cast<uint32_t*>(rows + row * kHeadDim + (byte ^ swizzle<kHeadDim>(row))) = packed;
            float taken[4];
            unpack_fp8(taken, packed);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] = (sum[e] - taken[e]) * 16.0f;
        }
    }
    ptx::fence_async_proxy();
}

// Hands tasks to the math warps, each task once there is room for its tile. The first query warp runs it.
template <typename Tile, typename Params>
class Tasks {
   public:
    using Shared = typename Tile::Shared;

    DEVICE Tasks(const Params& p, Shared& shared, ptx::CacheHint hint) : p_(p), shared_(shared), hint_(hint) {}

    // Copies queries and weights of the tokens from `row` on. `post` or `end` follows. A second call for the same row before `post`
    // does nothing.
    DEVICE void copy(int row) {
        if (copied_) return;
        copied_ = true;
        ptx::Barrier* full = &shared_.query_full[ring_.slot];
        ptx::barrier_wait(&shared_.query_empty[ring_.slot], ring_.phase ^ 1);
        if (ptx::elect_one()) {
            ptx::barrier_arrive_expect(full, Tile::kColumns * (Tile::kHeadDim + sizeof(float)));
#pragma unroll
            for (int pass = 0; pass < Tile::kPasses; ++pass) {
                ptx::tma_load_2d(&p_.q, full, &shared_.queries[ring_.slot][pass * Tile::kPassBytes], 0,
                                 row * Tile::kHeads + pass * Tile::kHeadColumns, hint_);
            }
            ptx::tma_load_2d(&p_.weights, full, shared_.weights[ring_.slot], 0, row, hint_);
        }
        __syncwarp();
    }

    // Posts the keys [key_begin, key_end) for the tokens of the last copy. Lane t < kTokens gives the range of the t-th token,
    // which is empty if there is no such token.
    DEVICE void post(int row, int key_begin, int key_end, int lane_begin, int lane_end) {
        typename Tile::Task& task = shared_.tasks[ring_.slot];
        const bool token = lane_index() < Tile::kTokens;
        const int begin = lane_begin - key_begin, end = max(min(lane_end, key_end), key_begin) - key_begin;
        const int all_begin = __reduce_max_sync(0xffffffffu, token ? begin : -0x7fffffff);
        const int all_end = __reduce_min_sync(0xffffffffu, token ? end : 0x7fffffff);
        if (token) task.begin[lane_index()] = begin, task.end[lane_index()] = end;
        if (lane_index() == 0) {
            task.row = row, task.first_key = key_begin, task.num_stages = ceil_div(key_end - key_begin, kBlockKv);
            task.all = make_int2(all_begin, all_end);
        }
        ptx::barrier_arrive(&shared_.query_full[ring_.slot]);
        if constexpr (Tile::kWithTerms) {
            ptx::barrier_wait(&shared_.query_full[ring_.slot], ring_.phase);
            write_terms<Tile>(shared_, ring_.slot, 0);
            ptx::barrier_arrive(&shared_.terms_full[ring_.slot]);
        }
        copied_ = false;
        ring_.step();
    }

    DEVICE void end() {
        ptx::barrier_wait(&shared_.query_empty[ring_.slot], ring_.phase ^ 1);
        if (lane_index() == 0) {
            shared_.tasks[ring_.slot].num_stages = 0;
            if (!copied_) ptx::barrier_arrive(&shared_.query_full[ring_.slot]);  // in place of the lane that announces copies
        }
        ptx::barrier_arrive(&shared_.query_full[ring_.slot]);
    }

   private:
    const Params& p_;
    Shared& shared_;
    ptx::CacheHint hint_;
    bool copied_ = false;
    sched::RingCursor<2> ring_;
};

// The other query warps do this part of the work on terms.
template <typename Tile>
DEVICE void help_with_terms(typename Tile::Shared& shared, int warp) {
    if (!Tile::kWithTerms) return;
    sched::RingCursor<2> ring;
    while (true) {
        ptx::barrier_wait(&shared.query_full[ring.slot], ring.phase);
        if (shared.tasks[ring.slot].num_stages == 0) return;
        write_terms<Tile>(shared, ring.slot, warp);
        ptx::barrier_arrive(&shared.terms_full[ring.slot]);
        ring.step();
    }
}

}  // namespace moe_fp8
