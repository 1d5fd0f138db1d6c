// Shape and shared memory of the MQA-logits kernels: a ring of key stages, and two query tiles with a task each.
#pragma once

#include "common/types.cuh"
#include "mma/score.cuh"
#include "ptx/mbarrier.cuh"
#include "sched/ring.cuh"

namespace moe_fp8 {

constexpr int kBlockKv = 64;  // keys of a stage; math warpgroups take turns with stages
constexpr int kMathWarpgroups = 3;
constexpr int kMathWarps = kMathWarpgroups * 4;
// At a query tile's barriers every lane arrives that has written or read, so that racecheck sees the order too.
constexpr int kQueryArrivals = 1 + kWarp;  // one of the lane that announces copies, the others of the warp that writes the task
static_assert(NUM_THREADS == (1 + kMathWarpgroups) * kWarpgroup && CLUSTER_SIZE == 1, "see heuristics/mqa.py");

// Barriers. The phase is the lap of the ring, which holds key stages or the two query tiles:
//
//   key_full[stage]    1 arrival: the key warp that announces the copies' bytes. The four warps of the warpgroup whose turn it is wait.
//   key_empty[stage]   4 arrivals: one for each of these four warps. The key warp waits.
//   query_full[slot]   33 arrivals: the lane that announces the copies' bytes, and every lane of the first query warp. All warps that
//                      read the tile wait.
//   terms_full[slot]   Every lane of every query warp arrives, if there are terms. Math warps wait.
//   query_empty[slot]  Every lane of every math warp arrives. The first query warp waits.
//   early[warp]        1 arrival: the key warp itself, for the stage that it copies before it knows the ranges (prefill, one item a
//                      CTA).
//
// The map says who overwrites each buffer, after which arrival, and why every read is done by then:
//
//   keys                 TMA copies overwrite them after `key_empty` of the stage. Only wgmma reads them, and a warp arrives after
//                        `wgmma_wait`.
//   key_scales           TMA copies overwrite them after `key_empty` of the stage. The arrival takes the scale.
//   queries              TMA copies overwrite them after `query_empty`, and query warps store terms. wgmma reads them, and a warp
//                        arrives after the `wgmma_wait` of its last stage. Query warps also read queries for the terms. The values
//                        that they read are in the values that they store before `terms_full`, and math warps wait for `terms_full`
//                        before they arrive.
//   weights, term_scales TMA copies and stores of query warps overwrite them after `query_empty`. The arrival takes the last sums,
//                        in which both are.
//   tasks                The first query warp overwrites them after `query_empty`. The arrival takes the row. By then a token's range
//                        has decided which scores are stored, and the number of stages has decided when the task ends.
//
// A pass takes all tokens of a tile, or half of them if the tile has more than 128 columns. A copy brings the rows of one pass.
template <int kTokens, int kHeads>
constexpr int kPassesOf = kTokens * kHeads > 128 ? 2 : 1;
template <int kTokens, int kHeads>
constexpr int kHeadColumnsOf = kTokens / kPassesOf<kTokens, kHeads> * kHeads;

// A query tile has kTokens x kHeads columns. A wide tile is multiplied in two passes of half of the tokens each, since there are not
// enough registers for one pass. Behind the columns of a pass's heads are the columns of its terms (`mma/score.cuh`), if kWithTerms.
template <int kTokens_, int kHeads_, int kHeadDim_, int kStages_, bool kWithTerms_>
struct QueryTile {
    static constexpr int kTokens = kTokens_, kHeads = kHeads_, kHeadDim = kHeadDim_, kStages = kStages_;
    static constexpr bool kWithTerms = kWithTerms_;
    static constexpr int kColumns = kTokens * kHeads;
    static constexpr int kPasses = kPassesOf<kTokens, kHeads>;
    static constexpr int kPassTokens = kTokens / kPasses;
    static constexpr int kHeadColumns = kHeadColumnsOf<kTokens, kHeads>;
    static constexpr int kPassColumns = kHeadColumns + mma::kTermColumns<kPassTokens, kWithTerms>;
    static constexpr int kPassBytes = kPassColumns * kHeadDim;

    // Some warps of the first warpgroup copy keys, and some prepare queries. With terms, most of the work is to prepare queries.
    static constexpr int kKeyWarps = kWithTerms ? 1 : 3;
    static constexpr int kQueryWarps = 4 - kKeyWarps;

    // A thread gets so many scores of a pass and a key. `token` gives the token of each score.
    static constexpr int kPassScores = mma::kTokensPerThread<kPassTokens>;
    static DEVICE int token(int i) { return mma::score_token<kPassTokens>() + i * mma::kScoreStep<kPassTokens>; }

    // A run of keys for the tokens of one tile.
    struct Task {
        int row;         // row of the tile's first token
        int first_key;   // first key of the run, counted in the row
        int num_stages;  // 0: there are no more tasks
        alignas(8) int2 all;               // the keys that all tokens take, counted from first_key, as below
        int begin[kTokens], end[kTokens];  // the keys that each token takes; none if there is no such token
    };

    struct Shared {
        // A warpgroup tells a stage's laps by parity, so all laps of a stage must be its own. Otherwise it could take a stage for
        // full a lap early when copies land out of order.
        static_assert(kStages % kMathWarpgroups == 0, "see heuristics/mqa.py");
        uint8_t queries[2][kPasses * kPassBytes];
        uint8_t keys[kStages][kBlockKv * kHeadDim];
        alignas(128) float weights[2][align_up(kColumns, 32)];  // TMA writes at multiples of 128 bytes
        alignas(128) float key_scales[kStages][kBlockKv];
        float term_scales[2][kTokens][mma::kTerms];
        Task tasks[2];
        ptx::Barrier query_full[2];
        ptx::Barrier terms_full[2];
        ptx::Barrier query_empty[2];
        ptx::Barrier key_full[kStages];
        ptx::Barrier key_empty[kStages];

        // One thread of each of `num_warps` warps makes some of the barriers. A CTA barrier must follow.
        DEVICE void init(int warp, int num_warps) {
            for (int i = warp; i < kStages; i += num_warps) {
                ptx::barrier_init(&key_full[i], 1);
                ptx::barrier_init(&key_empty[i], 4);
            }
            for (int i = num_warps - 1 - warp; i < 2; i += num_warps) {
                ptx::barrier_init(&query_full[i], kQueryArrivals);
                ptx::barrier_init(&terms_full[i], kQueryWarps * kWarp);
                ptx::barrier_init(&query_empty[i], kMathWarps * kWarp);
            }
            ptx::fence_barrier_init();
        }
    };
};

// Visits every kTakers-th stage, counted over all tasks, from the `taker`-th stage on.
template <int kStages, int kTakers>
class Stages {
   public:
    static_assert(kStages % kTakers == 0, "each slot is always the same taker's");
    DEVICE explicit Stages(int taker) : offset_(taker) {
        ring_.slot = static_cast<uint32_t>(taker);
    }
    // Calls `each(cursor, number within the task)` for the taker's stages of a task of `num_stages`.
    template <typename Each>
    DEVICE void visit(int num_stages, Each each) {
#pragma unroll 1
        for (; offset_ < num_stages; offset_ += kTakers) {
            each(ring_, offset_);
            ring_.skip(kTakers);
        }
        offset_ -= num_stages;
    }

   private:
    sched::RingCursor<kStages> ring_;
    int offset_;
};

}  // namespace moe_fp8
