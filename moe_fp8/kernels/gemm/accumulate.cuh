// The main loop of a math warpgroup.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/wgmma.cuh"
#include "sched/release.cuh"

namespace moe_fp8 {

// These are the shared-memory addresses of one stage's parts, as a math thread needs them.
struct Stage {
    uint32_t weights, tokens;              // wgmma_address of what the warpgroup owns
    uint32_t weight_scales, token_scales;  // the tile's first weight scale, and this thread's first token scale
    uint32_t full, empty;                  // barriers
};

// Sums the part of one tile that a warpgroup owns, over the tile's range of K: `num_blocks` > 0 stages. A stage's scales are read
// before the tensor core gets work. While the tensor core is busy, the scales would wait for shared memory, and then the tensor
// core would wait for the scales.
class Accumulator {
    using Sum = Fragments::Sum;

   public:
    DEVICE Accumulator(Shared& shared, int warpgroup) : shared_(shared), warpgroup_(warpgroup) {
        if (kAlternate && warpgroup == 1) ring_.step();
    }

    // A single fragment is the last of `sum`.
    DEVICE void run(int num_blocks, mma::Owned owned, Fragments::Sum (&sum)[kWaves]) {
        owned_ = owned;
        clear(sum);
        if constexpr (kAlternate) {
            const int mine = (num_blocks + (next_ == warpgroup_)) / 2;
            next_ ^= num_blocks & 1;
            if (mine > 0) run_block_by_block(mine, sum[kLast]);
        } else if constexpr (kTwoPartials) {
            run_block_by_block(num_blocks, sum[kLast]);
        } else if (kWaves == 1 || owned.fragments == 1) {
            run_one_by_one(num_blocks, sum[kLast]);
        } else if constexpr (kWaves > 1 && !kOnePartial) {
            run_side_by_side(num_blocks, sum);
        }
    }

    // `begin` and `finish` are for two fragments with registers for only one partial sum: one warpgroup promotes while the other
    // multiplies. `begin` gives the tensor core the first product. It leaves `partial` and `scales` to `finish`. `first_done` is
    // called with the first fragment as soon as that fragment is whole.
    DEVICE void begin(mma::Owned owned, Fragments::Sum& partial, Fragments::Scales& scales) {
        owned_ = owned;
        wait(at(ring_), ring_.phase);
        load(at(ring_), scales);
        multiply<0>(partial, at(ring_));
    }

    template <typename FirstDone>
    DEVICE void finish(int num_blocks, mma::Owned owned, Fragments::Sum (&sum)[kWaves], Fragments::Sum& partial,
                       Fragments::Scales& scales, FirstDone first_done) {
        owned_ = owned;
        clear(sum);
        while (true) {
            prepare<0>(scales);
            collect<0>(partial);
            Fragments::promote<0>(sum[0], partial, scales);
            multiply<kLast>(partial, at(ring_));
            prepare<kLast>(scales);
            if (--num_blocks == 0) break;
            collect<0>(partial);
            const Stage stage = at(ring_);
            if constexpr (!kRowScales) release(stage, partial[0], scales);
            ring_.step();
            const Scales done = scales;
            wait(at(ring_), ring_.phase);
            load(at(ring_), scales);
            Fragments::promote<kLast>(sum[kLast], partial, done);
            if constexpr (kRowScales) release_promoted(stage, sum[0], sum[kLast]);
            multiply<0>(partial, at(ring_));
        }
        first_done(sum[0]);
        collect<0>(partial);
        const Stage stage = at(ring_);
        if constexpr (!kRowScales) release(stage, partial[0], scales);
        ring_.step();
        Fragments::promote<kLast>(sum[kLast], partial, scales);
        if constexpr (kRowScales) release_promoted(stage, sum[0], sum[kLast]);
    }

    // Lets a tile pass in which this warpgroup owns nothing. (When 128 x 192 was two fragments and this loop was unrolled, ptxas took its
    // warps to be diverged. Then 12 R2UR stood among the four wgmma of a block, and a tile took 5% longer.)
    DEVICE void skip(int num_blocks) {
#pragma unroll 1
        for (; num_blocks > 0; --num_blocks, ring_.step()) {
            ptx::barrier_wait(&shared_.full[ring_.slot], ring_.phase);
            arrive(sched::after(&shared_.empty[ring_.slot], sched::NothingRead{}));
        }
    }

    // The sum over no block.
    DEVICE static void clear(Sum (&sum)[kWaves]) {
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
            for (int i = 0; i < Fragments::kColumns / 2; ++i) sum[wave][i] = 0.0f;
        }
    }

   private:
    using Scales = Fragments::Scales;
    static constexpr int kLast = kWaves - 1;

    // A block of K in work: its stage, its product, and its scales.
    struct Block {
        Stage stage;
        Sum partial;
        Scales scales;
    };

    // This loop is for one fragment. A block is promoted while the next block is multiplied into the other of two partial sums. The
    // block's stage is handed back while loads of the next block's scales are still on their way; they read another stage.
    DEVICE void run_block_by_block(int num_blocks, Sum& sum) {
        Block blocks[2];
        blocks[0].stage = at(ring_);
        wait(blocks[0].stage, ring_.phase);
        load(blocks[0].stage, blocks[0].scales);
        multiply<0>(blocks[0].partial, blocks[0].stage);
        blocks[0].scales.complete();
        step_ring(ring_);
        Stage ahead = at_here(ring_);
        bool come = false;  // whether the next stage has come
        auto step = [&](Block& done, Block& next, bool more) {
            next.stage = ahead;
            if (!come) wait(next.stage, ring_.phase);
            load(next.stage, next.scales);
            multiply<0>(next.partial, next.stage);
            next.scales.complete();
            step_ring(ring_);
            ahead = at_here(ring_);
            come = finish_block<1>(sum, done, ahead.full, more);
        };
        int block = 0;
        for (; block + 2 < num_blocks; block += 2) {
            step(blocks[0], blocks[1], true);
            step(blocks[1], blocks[0], block + 3 < num_blocks);
        }
        if (block + 1 < num_blocks) {
            step(blocks[0], blocks[1], false);
            finish_block<0>(sum, blocks[1], ahead.full, false);
        } else {
            finish_block<0>(sum, blocks[0], ahead.full, false);
        }
    }

    // This loop is for one fragment if there are no registers for two partial sums. Each warpgroup promotes while others multiply, so
    // the loop is a chain: a stage comes, it is multiplied, and it is promoted. All that does not need to stand in the
    // chain is done while the product is computed.
    DEVICE void run_one_by_one(int num_blocks, Sum& sum) {
        Block block;
        block.stage = at(ring_);
        wait(block.stage, ring_.phase);
        while (true) {
            load(block.stage, block.scales);
            multiply<0>(block.partial, block.stage);
            block.scales.complete();
            ring_.step();
            const Stage next = at_here(ring_);
            const bool more = --num_blocks > 0;
            const bool come = finish_block<0>(sum, block, next.full, more);
            if (!more) return;
            if (!come) wait(next, ring_.phase);
            block.stage = next;
        }
    }

    // Waits for the product that was begun before the last kPending products, hands its stage back and promotes it. If there is
    // `more`, it meanwhile waits a little for the stage whose barrier is `next`, and returns true if that stage has come.
    template <int kPending>
    DEVICE bool finish_block(Sum& sum, Block& block, uint32_t next, bool more) {
        prepare<0>(block.scales);
        ptx::Barrier* empty = barrier(block.stage.empty);
        if constexpr (!kRowScales) empty = sched::after(empty, block.scales);
        collect<kPending>(block.partial);
        if constexpr (!kRowScales) arrive(empty);
        const bool come = ptx::barrier_passed_if(more, barrier(next), ring_.phase);
        Fragments::promote<0>(sum, block.partial, block.scales);
        if constexpr (kRowScales) release_promoted(block.stage, sum);
        return come;
    }

    // Hands back a stage whose scales were read by the promotions to these sums. (Only kRowScales calls it.)
    template <typename... Sums>
    DEVICE static void release_promoted(const Stage& stage, const Sums&... sums) {
#if ROW_SCALES
        release(stage, Fragments::Promoted{sums}...);
#endif
    }

    DEVICE static void step_ring(Ring& ring) {
        ring.step();
        if constexpr (kAlternate) ring.step();
    }

    // This loop is for two fragments with a partial sum each: one fragment is promoted while the other is multiplied.
    DEVICE void run_side_by_side(int num_blocks, Sum (&sum)[kWaves]) {
        Sum first, last;
        Scales scales;
        Stage stage = at(ring_);
        wait(stage, ring_.phase);
        load(stage, scales);
        for (;;) {
            multiply<0>(first, stage);
            multiply<kLast>(last, stage);
            collect<1>(first);
            Fragments::promote<0>(sum[0], first, scales);
            collect<0>(last);
            release(stage, last[0], scales);
            ring_.step();
            const Scales done = scales;
            if (--num_blocks > 0) {
                stage = at(ring_);
                wait(stage, ring_.phase);
                load(stage, scales);
            }
            Fragments::promote<kLast>(sum[kLast], last, done);
            if (num_blocks == 0) return;
        }
    }

    DEVICE Stage at(const Ring& ring) const {
        return {ptx::wgmma_address(shared_.weights[ring.slot] + owned_.weight * kBlockK),
                ptx::wgmma_address(shared_.tokens[ring.slot] + owned_.token * kBlockK),
                ptx::shared_address(shared_.weight_scales[ring.slot]),
                ptx::shared_address(shared_.token_scales[ring.slot] + Fragments::first_token_scale(owned_)),
                ptx::shared_address(&shared_.full[ring.slot]),
                ptx::shared_address(&shared_.empty[ring.slot])};
    }

    // The same, worked out where the call stands.
    DEVICE Stage at_here(const Ring& ring) const {
        Stage stage = at(ring);
        asm volatile("" : "+r"(stage.weights), "+r"(stage.tokens), "+r"(stage.weight_scales), "+r"(stage.token_scales),
                     "+r"(stage.full), "+r"(stage.empty));
        return stage;
    }

    DEVICE static ptx::Barrier* barrier(uint32_t address) { return ptx::shared_pointer<ptx::Barrier>(address); }

    DEVICE static void wait(const Stage& stage, uint32_t phase) { ptx::barrier_wait(barrier(stage.full), phase); }

    // Tells every producer that writes to this stage that this lane has read it, or in a pair that this warp has. `empty` is from
    // `sched::after`.
    DEVICE static void arrive(ptx::Barrier* empty) {
        if constexpr (kPaired) {
            sched::arrive_cluster<kCluster>(empty);
        } else {
            ptx::barrier_arrive(empty);
        }
    }

    template <typename... Read>
    DEVICE static void release(const Stage& stage, const Read&... read) {
        arrive(sched::after(barrier(stage.empty), read...));
    }

    DEVICE void load(const Stage& stage, Scales& scales) const {
        scales.load(ptx::shared_pointer<float>(stage.token_scales), ptx::shared_pointer<float>(stage.weight_scales), owned_);
    }

    // Reads the first of the scales for which there are no registers over the product.
    template <int kWave>
    DEVICE static void prepare(Scales& scales) {
#if ROW_SCALES
        scales.template prepare<kWave>();
#endif
    }

    template <int kWave>
    DEVICE static void multiply(Sum& partial, const Stage& stage) {
        const uint64_t weights = ptx::wgmma_descriptor<kBlockK>(stage.weights + kWave * (Fragments::kWaveRows * kBlockK / 16));
        const uint64_t tokens = ptx::wgmma_descriptor<kBlockK>(stage.tokens);
        const uint64_t a = Fragments::kWeightsAreM ? weights : tokens, b = Fragments::kWeightsAreM ? tokens : weights;
        ptx::Wgmma<Fragments::kColumns>::template start<kBlockK / 32>(partial, a, b);
    }

    // Waits for a product that `multiply` began before the last kPending products.
    template <int kPending>
    DEVICE static void collect(Sum& partial) {
        ptx::wgmma_wait<kPending>();
        ptx::wgmma_pin(partial);
    }

    Shared& shared_;
    const int warpgroup_;
    int next_ = 0;  // the warpgroup that takes the next block, if the warpgroups alternate
    mma::Owned owned_;
    Ring ring_;
};

}  // namespace moe_fp8
