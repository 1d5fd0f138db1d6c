// The main loop of the MQA-logits kernels: one query tile against a run of keys.
#pragma once

#include "mma/score.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "sched/key_ring.cuh"

namespace moe_fp8 {

// The stages of keys that are a math warpgroup's: every kMathWarpgroups-th, counted over all items.
template <int kStages>
class MyStages {
   public:
    DEVICE explicit MyStages(int warpgroup) : offset_(warpgroup) {
        for (int i = 0; i < warpgroup; ++i) ring_.step();
    }
    // Calls `each(cursor, number within the item)` for those of an item of so many.
    template <typename Each>
    DEVICE void visit(int num_stages, Each each) {
        for (; offset_ < num_stages; offset_ += sched::kMathWarpgroups) {
            each(ring_, offset_);
#pragma unroll
            for (int i = 0; i < sched::kMathWarpgroups; ++i) ring_.step();
        }
        offset_ -= num_stages;
    }

   private:
    sched::RingCursor<kStages> ring_;
    int offset_;
};

// A query tile of kTokens x kHeads columns as a math warpgroup sees it. It multiplies a wide one in two parts of half of the
// tokens each, for want of registers.
template <int kTokens, int kHeads, int kHeadDim, int kStages>
class QueryTile {
   public:
    static constexpr int kColumns = kTokens * kHeads;
    static constexpr int kParts = kColumns > 128 ? 2 : 1;
    static constexpr int kPartTokens = kTokens / kParts;
    static constexpr int kMine = mma::kTokensPerThread<kPartTokens>;  // scores of a part and a key that a thread gets
    static constexpr int kScores = kParts * kMine;
    using Shared = sched::MqaShared<kColumns, kHeadDim, kStages>;

    // Token within the tile of this thread's i-th score of kScores, and whether it is this thread that stores it.
    static constexpr int kTokenStep = mma::kScoreStep<kPartTokens>;
    static DEVICE int token(int i) { return mma::score_token<kPartTokens>() + i * kTokenStep; }
    static DEVICE bool owner() { return mma::score_owner<kPartTokens>(); }

    DEVICE QueryTile(Shared& shared, int slot) : shared_(shared), queries_(shared.queries[slot]) {
        mma::load_weights<kColumns>(weights_, shared.weights[slot]);
    }

    // Those of the next `num_stages` stages that are this warpgroup's. `store(i, key, score)` takes this thread's i-th score of
    // a key, counted from the first of all.
    template <typename Store>
    DEVICE void run(int num_stages, MyStages<kStages>& stages, Store store) {
        stages.visit(num_stages, [&](const sched::RingCursor<kStages>& ring, int number) {
            const int row = mma::score_key();
            ptx::barrier_wait(&shared_.key_full[ring.slot], ring.phase);
            const float k_scale = ptx::load_here(&shared_.key_scales[ring.slot][row]);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                float partial[kPartColumns / 2];
                mma::score_mma<kPartColumns, kHeadDim>(partial, shared_.keys[ring.slot],
                                                       queries_ + part * kPartColumns * kHeadDim);
                ptx::wgmma_wait<0>();
                ptx::wgmma_pin(partial);
                if (part == kParts - 1) sched::release(&shared_.key_empty[ring.slot]);
                float score[kMine];
                mma::score_reduce<kPartTokens, kHeads>(score, partial, weights_ + part * kPartColumns / 4, k_scale);
#pragma unroll
                for (int i = 0; i < kMine; ++i) store(part * kMine + i, number * sched::kBlockKv + row, score[i]);
            }
        });
    }

   private:
    static constexpr int kPartColumns = kPartTokens * kHeads;

    Shared& shared_;
    const uint8_t* queries_;
    float weights_[kColumns / 4];
};

}  // namespace moe_fp8
