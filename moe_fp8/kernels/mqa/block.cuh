// What a block of the MQA-logits kernels does around its loops.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "sched/key_ring.cuh"

namespace moe_fp8 {

// `produce(shared)` runs in the first warp, `consume(shared, math_warp)` in the math warpgroups.
template <typename Shared, typename Params, typename Produce, typename Consume>
DEVICE void run_block(const Params& p, Produce produce, Consume consume) {
    extern __shared__ uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic + (1024 - ptx::shared_address(dynamic) % 1024) % 1024);
    const int warp = warp_index();
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&p.q);
        ptx::prefetch_tensor_map(&p.k);
        ptx::prefetch_tensor_map(&p.k_scale);
        ptx::prefetch_tensor_map(&p.weights);
        shared.init();
    }
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    __syncthreads();
    if (warp < 4) {
        ptx::registers_release<32>();
        if (warp == 0) produce(shared);
    } else {
        ptx::registers_acquire<160>();
        consume(shared, warp - 4);
    }
}

}  // namespace moe_fp8
