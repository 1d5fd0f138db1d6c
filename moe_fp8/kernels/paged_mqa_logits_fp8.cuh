// Decode indexer over a paged cache: for each request b and its token t, logits[b * next_n + t, j] = k_scale[j] *
// sum_h relu(q[b,t,h] . k[j]) * weights[b * next_n + t, h] for every cached position j below the token's length.
//
// CTA s works through the (request, chunk of keys) pairs from metadata[s] to metadata[s+1]. The schedule divides keys evenly, so
// that one long request spreads over all SMs. Requests of more than BLOCK_Q tokens take several passes.
//
// The kernel is specialized by NUM_HEADS, HEAD_DIM, PAGE_SIZE (tokens of a cache page), BLOCK_Q, NUM_STAGES, CHUNK_KV and OUT_BF16.
#pragma once

#include "common/logit.cuh"
#include "common/types.cuh"
#include "mqa/block.cuh"
#include "mqa/queries.cuh"
#include "mqa/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "sched/context_lens.cuh"

namespace moe_fp8 {

constexpr int kHeads = NUM_HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kPageSize = PAGE_SIZE;
constexpr int kBlockQ = BLOCK_Q;
constexpr int kStages = NUM_STAGES;
template <int kTokens>
constexpr int kBoxKeysOf = kTokens < kBlockKv ? kTokens : kBlockKv;
constexpr int kBoxKeys = kBoxKeysOf<kPageSize>;  // keys that are copied at once
constexpr int kBoxes = kBlockKv / kBoxKeys;      // boxes of a stage
using Tile = QueryTile<kBlockQ, kHeads, kHeadDim, kStages, false>;
using Shared = Tile::Shared;
static_assert(sizeof(Shared) <= SMEM_BYTES - 1024 && SMEM_BYTES <= sizeof(Shared) + 3072, "see heuristics/mqa.py");
static_assert(CHUNK_KV % kBlockKv == 0, "chunks are whole stages");

}  // namespace moe_fp8

struct PagedMqaLogitsParams {
    moe_fp8::TensorMap q;        // [batch * next_n * heads, head_dim] fp8, box part of a tile x head_dim
    moe_fp8::TensorMap k;        // [pages, page_size, head_dim] fp8, box 1 x kBoxKeys x head_dim
    moe_fp8::TensorMap k_scale;  // [pages, page_size] fp32, box 1 x kBoxKeys
    moe_fp8::TensorMap weights;  // [batch * next_n, heads] fp32, box BLOCK_Q x heads
    moe_fp8::Logit* logits;
    const int* block_table;
    const int2* metadata;  // [workers + 1] of (request, chunk)
    moe_fp8::sched::ContextLens context_lens;
    int64_t logits_stride;
    int64_t block_table_stride;
    int batch;
    int width;  // max_context_len
};

namespace moe_fp8 {

// A run of keys of one request for kBlockQ of its tokens.
struct Item {
    int request;
    int first_token;
    int key_begin, key_end;
};

// Enumerates the items of this CTA. Warps stay converged, since a warp reads context lengths together.
struct Walk {
    const PagedMqaLogitsParams& p;
    int request, chunk, last_request, last_chunk, context_len = 0, first_token = 0;
    bool loaded = false;

    DEVICE explicit Walk(const PagedMqaLogitsParams& params) : p(params) {
        // A broken schedule may name requests and chunks that do not exist. It is clamped, so that the kernel reads and writes
        // nothing out of bounds.
        const int2 begin = p.metadata[blockIdx.x], end = p.metadata[blockIdx.x + 1];
        const int most = ceil_div(p.width, CHUNK_KV);
        request = max(begin.x, 0), chunk = min(max(begin.y, 0), most);
        last_request = end.x, last_chunk = min(max(end.y, 0), most);
    }

    DEVICE bool next(Item& item) {
        while (request < p.batch && (request < last_request || (request == last_request && chunk < last_chunk))) {
            if (!loaded) {
                context_len = min(p.context_lens.longest(request), p.width);
                loaded = true;
            }
            item.request = request;
            item.first_token = first_token;
            item.key_begin = chunk * CHUNK_KV;
            item.key_end = request == last_request ? min(context_len, last_chunk * CHUNK_KV) : context_len;
            first_token += kBlockQ;
            if (first_token >= p.context_lens.next_n) ++request, chunk = 0, first_token = 0, loaded = false;
            if (item.key_begin < item.key_end) return true;
        }
        return false;
    }
};

// Returns the numbers of a request's pages from `page` on, one number in each lane. The numbers behind the request's last page may
// be anything, and are not used.
DEVICE int lane_page(const PagedMqaLogitsParams& p, int request, int page) {
    page += lane_index();
    return request < p.batch && page < ceil_div(p.width, kPageSize) ? p.block_table[request * p.block_table_stride + page] : 0;
}

DEVICE void copy_keys(const PagedMqaLogitsParams& p, Shared& shared, int warp) {
    Stages<kStages, Tile::kKeyWarps> stages(warp);
    Walk walk(p);
    // Page numbers are read 32 at a time, one in each lane, and the next 32 are read ahead. The first numbers are read while the walk
    // waits for the first length.
    const int request = walk.request;
    int window = walk.chunk * CHUNK_KV / kPageSize;
    int pages = lane_page(p, request, window), further = lane_page(p, request, window + kWarp);
    bool first = true;
    Item item;
    while (walk.next(item)) {
        if (!first || item.request != request) {
            window = item.key_begin / kPageSize;
            pages = lane_page(p, item.request, window), further = lane_page(p, item.request, window + kWarp);
        }
        first = false;
        stages.visit(ceil_div(item.key_end - item.key_begin, kBlockKv), [&](const sched::RingCursor<kStages>& ring, int number) {
            const int key = item.key_begin + number * kBlockKv, page = key / kPageSize;
            if (page - window >= kWarp) {
                window += kWarp;
                pages = further, further = lane_page(p, item.request, window + kWarp);
            }
            int numbers[kBoxes];
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) numbers[i] = __shfl_sync(0xffffffffu, pages, page - window + i);
            // No page past the last page in use is touched.
            const int count = min(kBoxes, ceil_div(item.key_end - key, kBoxKeys));
            if (ptx::elect_one()) {
                ptx::Barrier* full = &shared.key_full[ring.slot];
                ptx::barrier_wait(&shared.key_empty[ring.slot], ring.phase ^ 1);
                ptx::barrier_arrive_expect(full, count * kBoxKeys * (kHeadDim + sizeof(float)));
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    if (i < count) {
                        ptx::tma_load_3d(&p.k, full, &shared.keys[ring.slot][i * kBoxKeys * kHeadDim], 0, key % kPageSize,
                                         numbers[i], ptx::CacheHint::kEvictFirst);
                        ptx::tma_load_2d(&p.k_scale, full, &shared.key_scales[ring.slot][i * kBoxKeys], key % kPageSize,
                                         numbers[i], ptx::CacheHint::kEvictFirst);
                    }
                }
            }
            __syncwarp();
        });
    }
}

DEVICE void prepare_queries(const PagedMqaLogitsParams& p, Shared& shared) {
    static_assert(Tile::kQueryWarps == 1, "no terms to help with");
    Tasks<Tile, PagedMqaLogitsParams> tasks(p, shared, ptx::CacheHint::kEvictFirst);
    Walk walk(p);
    Item item;
    while (walk.next(item)) {
        const int row = item.request * p.context_lens.next_n + item.first_token, token = item.first_token + lane_index();
        tasks.copy(row);
        const int end = lane_index() < kBlockQ && token < p.context_lens.next_n ? p.context_lens.of(item.request, token) : 0;
        tasks.post(row, item.key_begin, item.key_end, 0, end);
    }
    tasks.end();
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    paged_mqa_logits_fp8(const __grid_constant__ PagedMqaLogitsParams p) {
    using namespace moe_fp8;
    run_block<Tile, false, Shared>(
        p, [](Shared&) {}, [&](Shared& shared, int warp) { copy_keys(p, shared, warp); },
        [&](Shared& shared, int) { prepare_queries(p, shared); }, [](int) {});
}
