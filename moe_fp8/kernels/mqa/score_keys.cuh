// The main loop of the MQA-logits kernels: one query tile against a run of keys.
#pragma once

#include "mma/score.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sched/key_ring.cuh"

namespace moe_fp8 {

// A query tile of kTokens x kHeads columns as its math warps see it. A stage of keys is multiplied in kParts parts, so that one
// is reduced while the next is multiplied: of a wide tile half of the tokens, else all of them.
template <int kTokens, int kHeads, int kHeadDim, int kStages>
class QueryTile {
   public:
    static constexpr int kColumns = kTokens * kHeads;
    static constexpr int kParts = kColumns > 128 ? 2 : 1;
    static constexpr int kPartTokens = kTokens / kParts;
    static constexpr int kMine = mma::kTokensPerThread<kPartTokens>;  // scores of a part and a key that a thread gets
    static constexpr int kScores = kParts * kMine;
    using Shared = sched::MqaShared<kColumns, kHeadDim, kStages>;
    using Ring = sched::RingCursor<kStages>;

    // Token within the tile of this thread's i-th score of kScores, and whether it is this thread that stores it.
    static DEVICE int token(int i) { return i / kMine * kPartTokens + mma::score_token<kPartTokens>(i % kMine); }
    static DEVICE bool owner() { return mma::score_owner<kPartTokens>(); }

    DEVICE QueryTile(Shared& shared, int slot, int warpgroup)
        : shared_(shared), queries_(shared.queries[slot]), row_(warpgroup * 64 + mma::score_key()), keys_(warpgroup * 64 * kHeadDim) {
        mma::load_weights<kColumns>(weights_, shared.weights[slot]);
    }

    // The next num_stages > 0 stages. `store(i, key, score)` takes this thread's i-th score of a key, counted from the first of
    // all.
    template <typename Store>
    DEVICE void run(int num_stages, Ring& ring, Store store) {
        ahead_ = ring, key_ = row_;
        begin<0>();
        int left = num_stages * kParts;  // parts to finish
        for (; left > 2; left -= 2) {
            begin<1>();
            finish<0, 1>(ring, store);
            begin<0>();
            finish<1, 1>(ring, store);
        }
        if (left == 2) {
            begin<1>();
            finish<0, 1>(ring, store);
            finish<1, 0>(ring, store);
        } else {
            finish<0, 0>(ring, store);
        }
    }

   private:
    static constexpr int kPartColumns = kPartTokens * kHeads;

    // Parts take turns with two buffers.
    template <int kBuffer>
    DEVICE void begin() {
        constexpr int kPart = kParts == 1 ? 0 : kBuffer;
        if constexpr (kPart == 0) {
            ptx::barrier_wait(&shared_.key_full[ahead_.slot], ahead_.phase);
            k_scale_[kBuffer] = shared_.key_scales[ahead_.slot][row_];
        } else {
            k_scale_[kBuffer] = k_scale_[0];
        }
        mma::score_mma<kPartColumns, kHeadDim>(partial_[kBuffer], &shared_.keys[ahead_.slot][keys_],
                                               queries_ + kPart * kPartColumns * kHeadDim);
        if constexpr (kPart == kParts - 1) ahead_.step();
    }

    template <int kBuffer, int kPending, typename Store>
    DEVICE void finish(Ring& ring, Store store) {
        constexpr int kPart = kParts == 1 ? 0 : kBuffer;
        ptx::wgmma_wait<kPending>();
        ptx::wgmma_pin(partial_[kBuffer]);
        if constexpr (kPart == kParts - 1) {
            sched::release(&shared_.key_empty[ring.slot]);
            ring.step();
        }
        float score[kMine];
        mma::score_reduce<kPartTokens, kHeads>(score, partial_[kBuffer], weights_ + kPart * kPartColumns / 4, k_scale_[kBuffer]);
#pragma unroll
        for (int i = 0; i < kMine; ++i) store(kPart * kMine + i, key_, score[i]);
        if constexpr (kPart == kParts - 1) key_ += sched::kBlockKv;
    }

    Shared& shared_;
    const uint8_t* queries_;
    int row_, keys_;  // this thread's key of a stage, and where the warpgroup's keys begin in it
    float weights_[kColumns / 4];
    float partial_[2][kPartColumns / 2];
    float k_scale_[2];
    Ring ahead_;
    int key_;
};

}  // namespace moe_fp8
