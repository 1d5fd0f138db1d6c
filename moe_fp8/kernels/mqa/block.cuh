// This file says which warps do what in a block of the MQA-logits kernels.
#pragma once

#include "mqa/scores.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace moe_fp8 {

// These are the registers of a thread of the first warpgroup, and of a thread of the math warpgroups.
constexpr int kCopyRegisters = 56, kMathRegisters = 152;
static_assert(kWarpgroup * (kCopyRegisters + kMathWarpgroups * kMathRegisters) <= 65536, "the registers of an SM");

// `plan(shared)` runs in all warps once the kernel before has ended. Then `copy_keys(shared, warp)` and `prepare_queries(shared,
// warp)` run in the warps of the first warpgroup. The math warps call `begin_math(math_warp)` and then score.
template <typename Tile, bool kCompressed, typename Shared, typename Params, typename Plan, typename CopyKeys,
          typename PrepareQueries, typename BeginMath>
DEVICE void run_block(const Params& p, Plan plan, CopyKeys copy_keys, PrepareQueries prepare_queries, BeginMath begin_math) {
    extern __shared__ uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic + (1024 - ptx::shared_address(dynamic) % 1024) % 1024);
    const int warp = warp_index();
    if (ptx::elect_one()) {
        if (warp == 0) {
            ptx::prefetch_tensor_map(&p.k);
            ptx::prefetch_tensor_map(&p.q);
            ptx::prefetch_tensor_map(&p.k_scale);
            ptx::prefetch_tensor_map(&p.weights);
        } else {
            shared.init(warp - 1, NUM_THREADS / kWarp - 1);
        }
    }
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    plan(shared);
    __syncthreads();
    if (warp < 4) {
        ptx::registers_release<kCopyRegisters>();
        if (warp < Tile::kKeyWarps) {
            copy_keys(shared, warp);
        } else {
            prepare_queries(shared, warp - Tile::kKeyWarps);
        }
    } else {
        ptx::registers_acquire<kMathRegisters>();
        begin_math(warp - 4);
        score_tasks<Tile, kCompressed>(shared, p.logits, p.logits_stride, warp - 4);
    }
}

}  // namespace moe_fp8
