// The main loop of a math warpgroup.
#pragma once

#include "gemm/shape.cuh"
#include "ptx/wgmma.cuh"
#include "sched/release.cuh"

namespace moe_fp8 {

// Tells every producer that writes to this stage that this warp has read it.
template <typename... Read>
DEVICE void release_stage(Shared& shared, uint32_t stage, const Read&... read) {
    if constexpr (!kPaired) {
        sched::release(&shared.empty[stage], read...);
    } else {
        sched::release_cluster<kCluster>(&shared.empty[stage], read...);
    }
}

// Sums the part of one tile that a warpgroup owns, over the tile's range of K: `num_blocks` > 0 stages. A stage's scales are read
// before the tensor core gets work. While the tensor core is busy, the scales would wait for shared memory, and then the tensor
// core would wait for the scales.
class Accumulator {
    using Sum = Fragments::Sum;

   public:
    DEVICE Accumulator(Shared& shared, int warpgroup) : shared_(shared), warpgroup_(warpgroup) {
        if (kAlternate && warpgroup == 1) ring_.step();
    }

    // `first_done` is called with the first of two fragments as soon as that fragment is whole. A single fragment is the last of
    // `sum`.
    template <typename FirstDone>
    DEVICE void run(int num_blocks, mma::Owned owned, Fragments::Sum (&sum)[kWaves], FirstDone first_done) {
        owned_ = owned;
        clear(sum);
        if constexpr (kAlternate) {
            const int mine = (num_blocks + (next_ == warpgroup_)) / 2;
            next_ ^= num_blocks & 1;
            if (mine > 0) run_block_by_block(mine, sum[kLast]);
        } else if (owned.fragments == 1) {
            if constexpr (kWaves == 1 && kMathWarpgroups <= 2) {
                run_block_by_block(num_blocks, sum[kLast]);
            } else {
                run_one_by_one(num_blocks, sum[kLast]);
            }
        } else if constexpr (kBothPartials) {
            run_side_by_side(num_blocks, sum);
            first_done(sum[0]);
        }
    }

    // `begin` and `finish` are for two fragments with registers for only one partial sum: one warpgroup promotes while the other
    // multiplies. `begin` gives the tensor core the first product. It leaves `partial` and `scales` to `finish`.
    DEVICE void begin(mma::Owned owned, Fragments::Sum& partial, Fragments::Scales& scales) {
        owned_ = owned;
        wait(ring_, scales);
        broadcast(scales);
        multiply<0>(partial, ring_);
    }

    template <typename FirstDone>
    DEVICE void finish(int num_blocks, mma::Owned owned, Fragments::Sum (&sum)[kWaves], Fragments::Sum& partial,
                       Fragments::Scales& scales, FirstDone first_done) {
        owned_ = owned;
        clear(sum);
        while (true) {
            prepare<0>(scales);
            collect<0, 0>(partial);
            Fragments::promote<0>(sum[0], partial, scales);
            multiply<kLast>(partial, ring_);
            prepare<kLast>(scales);
            if (--num_blocks == 0) break;
            collect<0, kLast>(partial);
            const uint32_t slot = ring_.slot;
            if constexpr (!kRowScales) release_stage(shared_, slot, partial[0], scales);
            ring_.step();
            const Scales done = scales;
            wait(ring_, scales);
            Fragments::promote<kLast>(sum[kLast], partial, done);
            if constexpr (kRowScales) release_promoted(slot, sum[0], sum[kLast]);
            broadcast(scales);
            multiply<0>(partial, ring_);
        }
        first_done(sum[0]);
        collect<0, kLast>(partial);
        const uint32_t slot = ring_.slot;
        if constexpr (!kRowScales) release_stage(shared_, slot, partial[0], scales);
        ring_.step();
        Fragments::promote<kLast>(sum[kLast], partial, scales);
        if constexpr (kRowScales) release_promoted(slot, sum[0], sum[kLast]);
    }

    // Lets a tile pass in which this warpgroup owns nothing. (If this loop is unrolled, ptxas takes the warps of a 128 x 192 tile to be
    // diverged. Then 12 R2UR stand among the four wgmma of a block, and a tile takes 5% longer.)
    DEVICE void skip(int num_blocks) {
#pragma unroll 1
        for (; num_blocks > 0; --num_blocks, ring_.step()) {
            ptx::barrier_wait(&shared_.full[ring_.slot], ring_.phase);
            release_stage(shared_, ring_.slot, sched::NothingRead{});
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

    // This loop is for one fragment. A block is promoted while the next block is multiplied into the other of two partial sums. The
    // block's stage is handed back while loads of the next block's scales are still on their way; they read another stage. Before
    // that the warp looks whether the stage after the next has come. If it has, the products of that stage begin some 40 cycles
    // sooner. (In a ring of few stages it has not.)
    DEVICE void run_block_by_block(int num_blocks, Sum& sum) {
        Sum partial[2];
        Scales scales[2];
        wait(ring_, scales[0]);
        multiply<0>(partial[0], ring_);
        broadcast(scales[0]);
        bool come = false;  // whether the next stage has come
        auto step = [&](int done, int next) {
            Ring ahead = ring_;
            step_ring(ahead);
            if (!come) ptx::barrier_wait(&shared_.full[ahead.slot], ahead.phase);
            load(ahead, scales[next]);
            multiply<0>(partial[next], ahead);
            broadcast(scales[next]);
            prepare<0>(scales[done]);
            collect<1>(partial[done]);
            if constexpr (kStages >= 6) {
                step_ring(ahead);
                come = ptx::barrier_done(&shared_.full[ahead.slot], ahead.phase);
            }
            finish_block(sum, partial[done], scales[done]);
        };
        int block = 0;
        for (; block + 2 < num_blocks; block += 2) {
            step(0, 1);
            step(1, 0);
        }
        if (block + 1 < num_blocks) {
            step(0, 1);
            prepare<0>(scales[1]);
            collect<0>(partial[1]);
            finish_block(sum, partial[1], scales[1]);
        } else {
            prepare<0>(scales[0]);
            collect<0>(partial[0]);
            finish_block(sum, partial[0], scales[0]);
        }
    }

    // This loop is for one fragment in two cases. If a tile of the kernel can have two fragments, the ring has few stages, so each
    // stage is handed back before the next block is begun. If there are three warpgroups, they have no registers for a second
    // partial sum, and each promotes while the others multiply.
    DEVICE void run_one_by_one(int num_blocks, Sum& sum) {
        Sum partial;
        Scales scales;
        wait(ring_, scales);
        while (true) {
            broadcast(scales);
            multiply<0>(partial, ring_);
            prepare<0>(scales);
            collect<0>(partial);
            const uint32_t slot = ring_.slot;
            if constexpr (!kRowScales) release_stage(shared_, slot, partial[0], scales);
            ring_.step();
            const Scales done = scales;
            if (--num_blocks > 0) wait(ring_, scales);
            Fragments::promote<0>(sum, partial, done);
            if constexpr (kRowScales) release_promoted(slot, sum);
            if (num_blocks == 0) return;
        }
    }

    DEVICE void finish_block(Sum& sum, const Sum& partial, const Scales& scales) {
        if constexpr (!kRowScales) release_stage(shared_, ring_.slot, scales);
        Fragments::promote<0>(sum, partial, scales);
        if constexpr (kRowScales) release_promoted(ring_.slot, sum);
        step_ring(ring_);
    }

    // Hands back a stage whose scales were read by the promotions to these sums. (Only kRowScales calls it.)
    template <typename... Sums>
    DEVICE void release_promoted(uint32_t slot, const Sums&... sums) {
#if ROW_SCALES
        release_stage(shared_, slot, Fragments::Promoted{sums}...);
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
        wait(ring_, scales);
        for (;;) {
            broadcast(scales);
            multiply<0>(first, ring_);
            multiply<kLast>(last, ring_);
            collect<1, 0>(first);
            Fragments::promote<0>(sum[0], first, scales);
            collect<0, kLast>(last);
            release_stage(shared_, ring_.slot, last[0], scales);
            ring_.step();
            const Scales done = scales;
            if (--num_blocks > 0) wait(ring_, scales);
            Fragments::promote<kLast>(sum[kLast], last, done);
            if (num_blocks == 0) return;
        }
    }

    DEVICE void wait(const Ring& ring, Scales& scales) {
        ptx::barrier_wait(&shared_.full[ring.slot], ring.phase);
        load(ring, scales);
    }
    DEVICE void load(const Ring& ring, Scales& scales) {
        scales.load(shared_.token_scales[ring.slot], shared_.weight_scales[ring.slot], owned_, kPaired || lane_index() == 0);
    }
    // A warp's first lane hands the warp's stages back. So this lane alone reads the weights' scales, which a lane of the producers
    // stored. (All lanes could read them, since `__syncwarp` comes between. But `__syncwarp` leaves no machine code if the compiler
    // knows that the warp is converged, and then racecheck reports a race. Pairs store asynchronously, and racecheck takes such
    // stores to be ordered by their barrier.)
    DEVICE static void broadcast(Scales& scales) {
        if constexpr (!kPaired) scales.broadcast();
    }

    // Reads the first of the scales for which there are no registers over the product.
    template <int kWave>
    DEVICE static void prepare(Scales& scales) {
#if ROW_SCALES
        scales.template prepare<kWave>();
#endif
    }

    // Returns the registers of a sum that fragment kWave uses.
    template <int kWave>
    DEVICE static auto used(Sum& sum) -> float (&)[Fragments::kColumnsOf<kWave> / 2] {
        return reinterpret_cast<float(&)[Fragments::kColumnsOf<kWave> / 2]>(sum);
    }

    template <int kWave>
    DEVICE void multiply(Sum& partial, const Ring& ring) {
        const uint8_t* weights = shared_.weights[ring.slot] + kWave * Fragments::kWaveRows * kBlockK;
        const uint8_t* tokens = shared_.tokens[ring.slot];
        const uint64_t a = ptx::wgmma_descriptor<kBlockK>(Fragments::m_operand(weights, tokens, owned_));
        const uint64_t b = ptx::wgmma_descriptor<kBlockK>(Fragments::n_operand(weights, tokens, owned_));
        ptx::Wgmma<Fragments::kColumnsOf<kWave>>::template start<kBlockK / 32>(used<kWave>(partial), a, b);
    }

    // Waits for a product that `multiply` began before the last kPending products.
    template <int kPending, int kWave = 0>
    DEVICE static void collect(Sum& partial) {
        ptx::wgmma_wait<kPending>();
        ptx::wgmma_pin(used<kWave>(partial));
    }

    Shared& shared_;
    const int warpgroup_;
    int next_ = 0;  // the warpgroup that takes the next block, if the warpgroups alternate
    mma::Owned owned_;
    Ring ring_;
};

}  // namespace moe_fp8
