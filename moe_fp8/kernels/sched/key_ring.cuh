// Shared memory of the MQA-logits kernels: a ring of key stages and two buffers of query tiles with their weights.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "sched/ring.cuh"

namespace moe_fp8::sched {

constexpr int kBlockKv = 64;  // keys of a stage, which is for one math warpgroup: they take turns
constexpr int kMathWarpgroups = 3;
constexpr int kMathWarps = kMathWarpgroups * 4;
static_assert(NUM_THREADS == (1 + kMathWarpgroups) * kWarpgroup && CLUSTER_SIZE == 1, "see heuristics/mqa.py");

template <int kColumns, int kHeadDim, int kStages>
struct MqaShared {
    // A warpgroup tells a stage's laps by parity, so all of them must be its own: else it could take one for full a lap early,
    // when copies land out of order.
    static_assert(kStages % kMathWarpgroups == 0, "see heuristics/mqa.py");
    uint8_t queries[2][kColumns * kHeadDim];
    uint8_t keys[kStages][kBlockKv * kHeadDim];
    alignas(128) float weights[2][align_up(kColumns, 32)];  // TMA writes at multiples of 128 bytes
    alignas(128) float key_scales[kStages][kBlockKv];
    ptx::Barrier query_full[2];
    ptx::Barrier query_empty[2];
    ptx::Barrier key_full[kStages];
    ptx::Barrier key_empty[kStages];

    // One thread; follow with a CTA barrier.
    DEVICE void init() {
        for (int i = 0; i < 2; ++i) {
            ptx::barrier_init(&query_full[i], 1);
            ptx::barrier_init(&query_empty[i], kMathWarps);
        }
        for (int i = 0; i < kStages; ++i) {
            ptx::barrier_init(&key_full[i], 1);
            ptx::barrier_init(&key_empty[i], 4);
        }
        ptx::fence_barrier_init();
    }
};

// The whole warp has read the slot.
DEVICE void release(ptx::Barrier* empty) {
    __syncwarp();
    if (lane_index() == 0) ptx::barrier_arrive(empty);
}

}  // namespace moe_fp8::sched
