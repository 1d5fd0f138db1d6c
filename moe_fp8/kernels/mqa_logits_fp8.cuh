// Prefill indexer: logits[i,j] = k_scale[j] * sum_h relu(q[i,h] . k[j]) * weights[i,h] for ks[i] <= j < ke[i].
//
// A work item is (chunk of keys, BLOCK_Q query tokens), and chunks go slowest. If there are many items, each CTA finds out how many
// stages of keys all items have. It takes as many stages as the other CTAs, from wherever in an item its run begins to wherever its
// run ends. Some warps of the first warpgroup stream the keys, and some prepare the next query tile. The math warpgroups take turns
// with the stages, so that some multiply while others reduce.
//
// The kernel is specialized by NUM_HEADS, HEAD_DIM, BLOCK_Q, NUM_STAGES, TERMS (the linear part of ReLU is multiplied, see
// `mma/score.cuh`), COMPRESSED (row i of the output starts at ks[i]), FILL (it writes -inf outside a row's range) and OUT_BF16.
#pragma once

#include "common/logit.cuh"
#include "common/types.cuh"
#include "mqa/block.cuh"
#include "mqa/queries.cuh"
#include "mqa/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "sched/even_share.cuh"

namespace moe_fp8 {

constexpr int kHeads = NUM_HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockQ = BLOCK_Q;
constexpr int kStages = NUM_STAGES;
using Tile = QueryTile<kBlockQ, kHeads, kHeadDim, kStages, TERMS>;

struct Shared : Tile::Shared {
    sched::Share share;
    uint32_t warp_sums[NUM_THREADS / kWarp];
    ptx::Barrier early[Tile::kKeyWarps];  // each key warp's first stage has come, if it was copied before the ranges were known

    DEVICE void init(int warp, int num_warps) {
        if (warp < Tile::kKeyWarps) ptx::barrier_init(&early[warp], 1);
        Tile::Shared::init(warp, num_warps);
    }
};
static_assert(sizeof(Shared) <= SMEM_BYTES - 1024 && SMEM_BYTES <= sizeof(Shared) + 3072, "see heuristics/mqa.py");

}  // namespace moe_fp8

struct MqaLogitsParams {
    moe_fp8::TensorMap q;        // [queries * heads, head_dim] fp8, box part of a tile x head_dim
    moe_fp8::TensorMap k;        // [keys, head_dim] fp8, box kBlockKv x head_dim
    moe_fp8::TensorMap k_scale;  // [1, keys] fp32, box 1 x kBlockKv
    moe_fp8::TensorMap weights;  // [queries, heads] fp32, box BLOCK_Q x heads
    moe_fp8::Logit* logits;
    const int* ks;
    const int* ke;
    int64_t logits_stride;  // elements between rows
    int num_queries;
    int num_keys;
    int width;     // columns of the output: num_keys, or max_seqlen_k if compressed
    int chunk_kv;  // keys of a work item, a multiple of kBlockKv
    int query_blocks;
    int num_items;  // query blocks x chunks of keys
    int even;       // CTAs take even shares of the items' stages; else there is a CTA for each item
};

namespace moe_fp8 {

// Keys [begin, end) of a query.
struct Range {
    int begin, end;

    DEVICE Range(const MqaLogitsParams& p, int query) : begin(0), end(0) {
        if (query >= p.num_queries) return;
        begin = max(p.ks[query], 0);
        end = min(p.ke[query], p.num_keys);
        if (COMPRESSED) end = min(end, begin + p.width);
    }
    DEVICE bool empty() const { return begin >= end; }
};

// The keys of one work item's tile, whose queries have keys from `begin` up to `end`. The tile starts at a multiple of 8. (TMA
// needs a multiple of 4, since it reads the keys' scales from multiples of 16 bytes.)
struct TileKeys {
    int begin, end;

    DEVICE TileKeys(const MqaLogitsParams& p, int chunk, int begin, int end)
        : begin(max(begin / 8 * 8, chunk * p.chunk_kv)), end(min(end, (chunk + 1) * p.chunk_kv)) {}
    DEVICE int count() const { return max(end - begin, 0); }
};

// The step to an item takes as long as this number of stages. (On an H200 the step to the next item takes 2,600 cycles with terms
// and 1,300 without; a stage takes 670 cycles with terms and 770 without.)
constexpr int kItemCost = TERMS ? 4 : 1;

DEVICE int item_units(const MqaLogitsParams& p, int index) {
    const int chunk = index / p.query_blocks, first_query = (index - chunk * p.query_blocks) * kBlockQ;
    int begin = 0x7fffffff, end = 0;
#pragma unroll
    for (int i = 0; i < kBlockQ; ++i) {
        const Range range(p, first_query + i);
        if (range.empty()) continue;
        begin = min(begin, range.begin), end = max(end, range.end);
    }
    const int stages = ceil_div(TileKeys(p, chunk, begin, end).count(), kBlockKv);
    return stages > 0 ? stages + kItemCost : 0;
}

// Calls `each(first query, range of this lane's query, first key, end of the keys)` for every item in which this CTA has a part,
// with the keys of that part. Lanes from kBlockQ on have no query. All lanes of a warp call it.
template <typename Each>
DEVICE void visit_items(const MqaLogitsParams& p, const sched::Share& share, Each each) {
    const int first = ptx::uniform(share.item), last = ptx::uniform(share.end_item);
    const int first_stage = ptx::uniform(share.unit) - kItemCost, end_stage = ptx::uniform(share.end_unit) - kItemCost;
#pragma unroll 1
    for (int index = first; index < last || (index == last && end_stage > 0); ++index) {
        const int chunk = index / p.query_blocks, first_query = (index - chunk * p.query_blocks) * kBlockQ;
        const Range own(p, lane_index() < kBlockQ ? first_query + lane_index() : p.num_queries);
        const TileKeys keys(p, chunk, __reduce_min_sync(0xffffffffu, own.empty() ? 0x7fffffff : own.begin),
                            __reduce_max_sync(0xffffffffu, own.empty() ? 0 : own.end));
        const int begin = keys.begin + (index == first ? max(first_stage, 0) * kBlockKv : 0);
        const int end = index == last ? min(keys.end, keys.begin + end_stage * kBlockKv) : keys.end;
        if (begin < end) each(first_query, own, begin, end);
    }
}

// A CTA that has one item copies its first stages and its queries before it knows the ranges of the queries. It copies as if the
// ranges began with the chunk. If they do not, these stages are copied again.
DEVICE void copy_keys(const MqaLogitsParams& p, Shared& shared, int warp) {
    const auto copy = [&](ptx::Barrier* full, int slot, int key) {
        ptx::barrier_arrive_expect(full, kBlockKv * (kHeadDim + sizeof(float)));
        ptx::tma_load_2d(&p.k, full, shared.keys[slot], 0, key, ptx::CacheHint::kEvictLast);
        ptx::tma_load_2d(&p.k_scale, full, shared.key_scales[slot], key, 0, ptx::CacheHint::kEvictLast);
    };
    const int chunk_begin = shared.share.item / p.query_blocks * p.chunk_kv;
    bool pending = !p.even;  // this warp's early copy has not been waited for
    if (pending && ptx::elect_one()) copy(&shared.early[warp], warp, chunk_begin + warp * kBlockKv);

    Stages<kStages, Tile::kKeyWarps> stages(warp);
    visit_items(p, shared.share, [&](int, const Range&, int begin, int end) {
        stages.visit(ceil_div(end - begin, kBlockKv), [&](const sched::RingCursor<kStages>& ring, int number) {
            if (pending) ptx::barrier_wait(&shared.early[warp], 0);
            const bool there = pending && begin == chunk_begin;
            pending = false;
            if (ptx::elect_one()) {
                ptx::Barrier* full = &shared.key_full[ring.slot];
                ptx::barrier_wait(&shared.key_empty[ring.slot], ring.phase ^ 1);
                if (there) {
                    ptx::barrier_arrive(full);
                } else {
                    copy(full, ring.slot, begin + number * kBlockKv);
                }
            }
            __syncwarp();
        });
    });
    if (pending) ptx::barrier_wait(&shared.early[warp], 0);  // no copy outlives its CTA
}

DEVICE void prepare_queries(const MqaLogitsParams& p, Shared& shared, int warp) {
    if (warp > 0) return help_with_terms<Tile>(shared, warp);
    Tasks<Tile, MqaLogitsParams> tasks(p, shared, ptx::CacheHint::kNormal);
    if (!p.even) tasks.copy(shared.share.item % p.query_blocks * kBlockQ);
    visit_items(p, shared.share, [&](int first_query, const Range& own, int begin, int end) {
        tasks.copy(first_query);
        tasks.post(first_query, begin, end, own.begin, own.end);
    });
    tasks.end();
}

// Writes -inf to the columns that lie outside a row's range. A warp takes one row at a time. The CTAs take turns with pieces of
// rows.
DEVICE void fill_outside(const MqaLogitsParams& p, int math_warp) {
    constexpr int kPiece = 4096;
    const int num_pieces = p.query_blocks * ceil_div(p.width, kPiece);
    for (int index = static_cast<int>(blockIdx.x); index < num_pieces; index += static_cast<int>(gridDim.x)) {
        const int piece = index / p.query_blocks, first_query = (index - piece * p.query_blocks) * kBlockQ;
        const int piece_end = min((piece + 1) * kPiece, p.width);
        for (int i = math_warp; i < kBlockQ && first_query + i < p.num_queries; i += kMathWarps) {
            const Range range(p, first_query + i);
            const int end = max(range.end, range.begin);
            const int first = COMPRESSED ? 0 : range.begin, last = COMPRESSED ? end - range.begin : end;
            Logit* row = p.logits + (first_query + i) * p.logits_stride;
            for (int column = piece * kPiece + lane_index(); column < piece_end; column += kWarp) {
                if (column < first || column >= last) row[column] = negative_infinity();
            }
        }
    }
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    mqa_logits_fp8(const __grid_constant__ MqaLogitsParams p) {
    using namespace moe_fp8;
    run_block<Tile, COMPRESSED, Shared>(
        p,
        [&](Shared& shared) {
            if (p.even) {
                sched::find_share<NUM_THREADS>(shared.share, shared.warp_sums, p.num_items,
                                               [&](int index) { return item_units(p, index); });
            } else if (threadIdx.x == 0) {
                const int item = static_cast<int>(blockIdx.x);
                shared.share = {item, 0, item + 1, 0};
            }
        },
        [&](Shared& shared, int warp) { copy_keys(p, shared, warp); },
        [&](Shared& shared, int warp) { prepare_queries(p, shared, warp); },
        [&](int math_warp) {
            if (FILL) fill_outside(p, math_warp);
        });
}
