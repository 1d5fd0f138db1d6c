// A math warpgroup works on its stages of every task, from products to stored logits.
#pragma once

#include "common/logit.cuh"
#include "mma/score.cuh"
#include "mqa/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "sched/release.cuh"

namespace moe_fp8 {

// Row i of `logits` belongs to token i. Compressed rows start at the token's first key.
template <typename Tile, bool kCompressed>
DEVICE void score_tasks(typename Tile::Shared& shared, Logit* logits, int64_t stride, int math_warp) {
    Stages<Tile::kStages, kMathWarpgroups> stages(math_warp / 4);
    sched::RingCursor<2> queries;
    while (true) {
        const typename Tile::Task& task = shared.tasks[queries.slot];
        ptx::barrier_wait(&shared.query_full[queries.slot], queries.phase);
        const int num_stages = ptx::uniform(task.num_stages);
        if (num_stages == 0) return;
        const int all_begin = ptx::uniform(task.all.x), all_end = ptx::uniform(task.all.y);

        if (Tile::kWithTerms) ptx::barrier_wait(&shared.terms_full[queries.slot], queries.phase);
        const float* term_scales = shared.term_scales[queries.slot][0];
        Logit* row = logits + (task.row + Tile::token(0)) * stride + (kCompressed ? 0 : task.first_key);
        asm volatile("" : "+l"(row));  // otherwise the compiler works it out anew for each store

        float weights[Tile::kColumns / 4], sums[Tile::kPassTokens] = {};
        // Exchanges and stores the sums of a pass. It runs beside the next product, whose result takes no registers until then.
        const auto finish = [&](int pass, int number) {
            const int first = number * kBlockKv, key = first + mma::score_key(math_warp);
            float scores[Tile::kPassScores];
            mma::score_exchange<Tile::kPassTokens>(scores, sums);
            const bool inside = all_begin <= first && first + kBlockKv <= all_end;  // whether the stage lies inside every token's range
#pragma unroll
            for (int k = 0; k < Tile::kPassScores; ++k) {
                const int i = pass * Tile::kPassScores + k, token = Tile::token(i);
                const bool taken = inside || (task.begin[token] <= key && key < task.end[token]);
                const int column = kCompressed ? key - task.begin[token] : key;
                if (taken && mma::score_owner<Tile::kPassTokens>()) {
                    store_logit(row + column + i * (mma::kScoreStep<Tile::kPassTokens> * stride), scores[k]);
                }
            }
        };

        int last = -1;
        stages.visit(num_stages, [&](const sched::RingCursor<Tile::kStages>& ring, int number) {
            ptx::barrier_wait(&shared.key_full[ring.slot], ring.phase);
            const float k_scale = ptx::load_here(&shared.key_scales[ring.slot][mma::score_key(math_warp)]);
#pragma unroll
            for (int pass = 0; pass < Tile::kPasses; ++pass) {
                float products[Tile::kPassColumns / 2];
                mma::score_mma<Tile::kPassColumns, Tile::kHeadDim>(
                    products, shared.keys[ring.slot], &shared.queries[queries.slot][pass * Tile::kPassBytes]);
                if (pass > 0) {
                    finish(pass - 1, number);
                } else if (last >= 0) {
                    finish(Tile::kPasses - 1, last);
                } else {
                    mma::load_weights<Tile::kColumns>(weights, shared.weights[queries.slot]);
                }
                ptx::wgmma_wait<0>();
                ptx::wgmma_pin(products);
                if (pass == Tile::kPasses - 1) sched::release(&shared.key_empty[ring.slot], k_scale);
                mma::score_sum<Tile::kPassTokens, Tile::kHeads, Tile::kWithTerms>(
                    sums, products, weights + pass * Tile::kHeadColumns / 4,
                    term_scales + pass * Tile::kPassTokens * mma::kTerms + lane_index() % mma::kTerms, k_scale);
            }
            last = number;
        });
        if (last >= 0) finish(Tile::kPasses - 1, last);
        sched::release_each(&shared.query_empty[queries.slot], sums, task.row);
        queries.step();
    }
}

}  // namespace moe_fp8
