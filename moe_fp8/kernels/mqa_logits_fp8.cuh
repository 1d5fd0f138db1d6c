// Prefill indexer: logits[i,j] = k_scale[j] * sum_h relu(q[i,h] . k[j]) * weights[i,h] for ks[i] <= j < ke[i].
//
// Work items are (chunk of keys, BLOCK_Q query tokens), chunks slowest, dealt round robin to a persistent grid. For
// each item one producer thread loads the query tile once and streams keys; math warpgroups take turns with the stages, so that
// some multiply while others apply ReLU and weights.
//
// Specialised by: NUM_HEADS, HEAD_DIM, BLOCK_Q, NUM_STAGES, COMPRESSED (row i of the output starts at ks[i]), FILL
// (write -inf outside a row's range), OUT_BF16.
#pragma once

#include "common/logit.cuh"
#include "common/types.cuh"
#include "mqa/block.cuh"
#include "mqa/score_keys.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "sched/key_ring.cuh"

namespace moe_fp8 {

constexpr int kHeads = NUM_HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockQ = BLOCK_Q;
constexpr int kStages = NUM_STAGES;
constexpr int kColumns = kBlockQ * kHeads;
constexpr int kBlockKv = sched::kBlockKv;
using Tile = QueryTile<kBlockQ, kHeads, kHeadDim, kStages>;
using Shared = Tile::Shared;
static_assert(sizeof(Shared) <= SMEM_BYTES - 1024 && SMEM_BYTES <= sizeof(Shared) + 3072, "see heuristics/mqa.py");

}  // namespace moe_fp8

struct MqaLogitsParams {
    moe_fp8::TensorMap q;        // [queries * heads, head_dim] fp8, box columns x head_dim
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
    int chunk_kv;  // keys of a work item, a multiple of 128
};

namespace moe_fp8 {

// One work item as every warp sees it: lane t < kBlockQ holds the key range of query t.
struct Item {
    int first_query;
    int chunk_begin;
    int lane_begin, lane_end;
    int key_begin, key_end;  // of the whole tile; a multiple of 8 keys before the first one
};

struct Walk {
    const MqaLogitsParams& p;
    int query_blocks, num_items, index;

    DEVICE explicit Walk(const MqaLogitsParams& params)
        : p(params),
          query_blocks(ceil_div(params.num_queries, kBlockQ)),
          num_items(query_blocks * ceil_div(COMPRESSED ? max(params.num_keys, params.width) : params.num_keys, params.chunk_kv)),
          index(static_cast<int>(blockIdx.x)) {}

    DEVICE bool next(Item& item) {
        if (index >= num_items) return false;
        const int chunk = index / query_blocks;
        item.first_query = (index - chunk * query_blocks) * kBlockQ;
        item.chunk_begin = chunk * p.chunk_kv;
        index += static_cast<int>(gridDim.x);

        const int query = item.first_query + lane_index();
        item.lane_begin = item.lane_end = 0;
        if (lane_index() < kBlockQ && query < p.num_queries) {
            item.lane_begin = max(p.ks[query], 0);
            item.lane_end = min(p.ke[query], p.num_keys);
            if (COMPRESSED) item.lane_end = min(item.lane_end, item.lane_begin + p.width);
        }
        const bool empty = item.lane_begin >= item.lane_end;
        int begin = __reduce_min_sync(0xffffffffu, empty ? 0x7fffffff : item.lane_begin);
        int end = __reduce_max_sync(0xffffffffu, empty ? 0 : item.lane_end);
        item.key_begin = max(begin / 8 * 8, item.chunk_begin);
        item.key_end = min(end, item.chunk_begin + p.chunk_kv);
        return true;
    }
};

DEVICE void produce(const MqaLogitsParams& p, Shared& shared) {
    sched::RingCursor<kStages> keys;
    sched::RingCursor<2> queries;
    Walk walk(p);
    Item item;
    while (walk.next(item)) {
        if (item.key_begin >= item.key_end) continue;
        if (ptx::elect_one()) {
            ptx::Barrier* full = &shared.query_full[queries.slot];
            ptx::barrier_wait(&shared.query_empty[queries.slot], queries.phase ^ 1);
            ptx::barrier_arrive_expect(full, kColumns * (kHeadDim + sizeof(float)));
            ptx::tma_load_2d(&p.q, full, shared.queries[queries.slot], 0, item.first_query * kHeads,
                             ptx::CacheHint::kNormal);
            ptx::tma_load_2d(&p.weights, full, shared.weights[queries.slot], 0, item.first_query,
                             ptx::CacheHint::kNormal);
        }
        queries.step();
#pragma unroll 1
        for (int key = item.key_begin; key < item.key_end; key += kBlockKv) {
            if (ptx::elect_one()) {
                ptx::Barrier* full = &shared.key_full[keys.slot];
                ptx::barrier_wait(&shared.key_empty[keys.slot], keys.phase ^ 1);
                ptx::barrier_arrive_expect(full, kBlockKv * (kHeadDim + sizeof(float)));
                ptx::tma_load_2d(&p.k, full, shared.keys[keys.slot], 0, key, ptx::CacheHint::kEvictLast);
                ptx::tma_load_2d(&p.k_scale, full, shared.key_scales[keys.slot], key, 0, ptx::CacheHint::kEvictLast);
            }
            keys.step();
        }
        __syncwarp();
    }
}

// -inf in the columns of this item's chunk that lie outside a row's range; one warp a row at a time.
DEVICE void fill_outside(const MqaLogitsParams& p, const Item& item, int math_warp) {
    const int chunk_end = min(item.chunk_begin + p.chunk_kv, p.width);
    for (int token = math_warp; token < kBlockQ; token += sched::kMathWarps) {
        const int begin = __shfl_sync(0xffffffffu, item.lane_begin, token);
        const int end = max(__shfl_sync(0xffffffffu, item.lane_end, token), begin);
        const int first = COMPRESSED ? 0 : begin, last = COMPRESSED ? end - begin : end;
        if (item.first_query + token >= p.num_queries) return;
        Logit* row = p.logits + (item.first_query + token) * p.logits_stride;
        for (int column = item.chunk_begin + lane_index(); column < chunk_end; column += kWarp) {
            if (column < first || column >= last) row[column] = negative_infinity();
        }
    }
}

DEVICE void consume(const MqaLogitsParams& p, Shared& shared, int math_warp) {
    MyStages<kStages> keys(math_warp / 4);
    sched::RingCursor<2> queries;
    Walk walk(p);
    Item item;
    while (walk.next(item)) {
        if (FILL) fill_outside(p, item, math_warp);
        if (item.key_begin >= item.key_end) continue;

        // This thread's rows of the output, addressed by key, and the keys it may store there.
        Logit* rows[Tile::kScores];
        int begin[Tile::kScores], end[Tile::kScores];
#pragma unroll
        for (int i = 0; i < Tile::kScores; ++i) {
            const int token = Tile::token(i);
            begin[i] = __shfl_sync(0xffffffffu, item.lane_begin, token);
            end[i] = __shfl_sync(0xffffffffu, item.lane_end, token);
            rows[i] = p.logits + (item.first_query + token) * p.logits_stride - (COMPRESSED ? begin[i] : 0);
            begin[i] = max(begin[i], item.key_begin);
            end[i] = Tile::owner() ? min(end[i], item.key_end) : 0;
        }

        ptx::barrier_wait(&shared.query_full[queries.slot], queries.phase);
        Tile tile(shared, queries.slot);
        tile.run(ceil_div(item.key_end - item.key_begin, kBlockKv), keys, [&](int i, int key, float score) {
            key += item.key_begin;
            if (begin[i] <= key && key < end[i]) rows[i][key] = to_logit(score);
        });
        sched::release(&shared.query_empty[queries.slot]);
        queries.step();
    }
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    mqa_logits_fp8(const __grid_constant__ MqaLogitsParams p) {
    using namespace moe_fp8;
    run_block<Shared>(
        p, [&](Shared& shared) { produce(p, shared); },
        [&](Shared& shared, int math_warp) { consume(p, shared, math_warp); });
}
