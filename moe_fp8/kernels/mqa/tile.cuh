// Shape and shared memory of the MQA-logits kernels: a ring of key stages and two query tiles, each with what is to be done.
#pragma once

#include "common/types.cuh"
#include "mma/score.cuh"
#include "ptx/mbarrier.cuh"
#include "sched/ring.cuh"

namespace moe_fp8 {

constexpr int kBlockKv = 64;  // keys of a stage, which is for one math warpgroup: they take turns
constexpr int kMathWarpgroups = 3;
constexpr int kMathWarps = kMathWarpgroups * 4;
// At a query tile's barriers every lane arrives that has written or read: so racecheck sees the order too.
constexpr int kQueryArrivals = 1 + kWarp;  // of whoever copies, and of the warp that writes the task
static_assert(NUM_THREADS == (1 + kMathWarpgroups) * kWarpgroup && CLUSTER_SIZE == 1, "see heuristics/mqa.py");

// Barriers; the phase is that of the ring's lap, of key stages or of the two query tiles:
//
//   key_full[stage]    1 arrival: the key warp that announces the copies' bytes. The four warps wait of the warpgroup whose turn it is.
//   key_empty[stage]   4 arrivals: one for each of those warps. The key warp waits.
//   query_full[slot]   33 arrivals: the lane that announces the copies' bytes, and every lane of the first query warp. All who read wait.
//   terms_full[slot]   every lane of every query warp, if there are terms. Math warps wait.
//   query_empty[slot]  every lane of every math warp. The first query warp waits.
//   early[warp]        1 arrival: the key warp itself, for what it copies before it knows the ranges (prefill, one item a CTA).
//
// Who overwrites what, after which arrival, and why every read is done by then:
//
//   keys                 TMA copies; `key_empty` of the stage. Only wgmma reads them, and a warp arrives after `wgmma_wait`.
//   key_scales           TMA copies; `key_empty` of the stage. The arrival takes the scale.
//   queries              TMA copies, and terms that query warps store; `query_empty`. wgmma reads them, and a warp arrives after the
//                        `wgmma_wait` of its last stage. What query warps read of them for the terms is in what they store before
//                        `terms_full`, for which math warps wait before they arrive.
//   weights, term_scales TMA copies, and stores of query warps; `query_empty`. The arrival takes the last sums, in which both are.
//   tasks                stores of the first query warp; `query_empty`. The arrival takes the row. A token's range has decided by then
//                        which scores are stored, and the number of stages when the task ends.
//
// A query tile of kTokens x kHeads columns. A wide one is multiplied in two passes of half of the tokens each, for want of
// registers; behind the columns of a pass's heads are those of its terms (`mma/score.cuh`), if kWithTerms.
template <int kTokens_, int kHeads_, int kHeadDim_, int kStages_, bool kWithTerms_>
struct QueryTile {
    static constexpr int kTokens = kTokens_, kHeads = kHeads_, kHeadDim = kHeadDim_, kStages = kStages_;
    static constexpr bool kWithTerms = kWithTerms_;
    static constexpr int kColumns = kTokens * kHeads;
    static constexpr int kPasses = kColumns > 128 ? 2 : 1;
    static constexpr int kPassTokens = kTokens / kPasses;
    static constexpr int kHeadColumns = kPassTokens * kHeads;
    static constexpr int kPassColumns = kHeadColumns + mma::kTermColumns<kPassTokens, kWithTerms>;
    static constexpr int kPassBytes = kPassColumns * kHeadDim;

    // Warps of the first warpgroup: those that copy keys, and those that prepare queries, where the terms are the work.
    static constexpr int kKeyWarps = kWithTerms ? 1 : 3;
    static constexpr int kQueryWarps = 4 - kKeyWarps;

    // Scores of a pass and a key that a thread gets, and the token of each.
    static constexpr int kPassScores = mma::kTokensPerThread<kPassTokens>;
    static constexpr int kScores = kPasses * kPassScores;
    static DEVICE int token(int i) { return mma::score_token<kPassTokens>() + i * mma::kScoreStep<kPassTokens>; }

    // A run of keys for the tokens of one tile.
    struct Task {
        int row;         // of its first token
        int first_key;   // of the row
        int num_stages;  // 0: there are no more tasks
        alignas(8) int2 all;               // the keys that all tokens take, counted, as below, from the first one
        int begin[kTokens], end[kTokens];  // that each token takes; none, if there is no such token
    };

    struct Shared {
        // A warpgroup tells a stage's laps by parity, so all of them must be its own: else it could take one for full a lap
        // early, when copies land out of order.
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

        // One thread of each of so many warps makes some of the barriers. Follow with a CTA barrier.
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

// Every kTakers-th of the stages, counted over all tasks, from the `taker`-th on.
template <int kStages, int kTakers>
class Stages {
   public:
    static_assert(kStages % kTakers == 0, "each slot is always the same taker's");
    DEVICE explicit Stages(int taker) : offset_(taker) {
        ring_.slot = static_cast<uint32_t>(taker);
    }
    // Calls `each(cursor, number within the task)` for those of a task of so many.
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
