// mbarrier: transaction barriers in shared memory. Phases alternate 0, 1, 0, ...; a wait names the parity of
// the phase that must have completed, so a wait for parity 1 passes on a fresh barrier.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace moe_fp8::ptx {

using Barrier = uint64_t;

// The init is not ordered against other threads: fence_barrier_init and a CTA (or cluster) barrier must follow.
DEVICE void barrier_init(Barrier* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes preceding inits visible to the async proxy and to the cluster.
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// This is one arrival with release semantics at CTA scope.
DEVICE void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// This is one arrival on the same barrier of CTA `rank` of the cluster. It releases at CTA scope only. That scope is enough to hand
// back memory that was read, but not to publish data. (Release at cluster scope costs a fence: 282 us and not 195 for m4096 n4096
// k7168, H200.)
DEVICE void barrier_arrive_cluster(Barrier* barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// This is one arrival. `bytes` more must come from asynchronous copies before the phase may complete.
DEVICE void barrier_arrive_expect(Barrier* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Blocks until the phase of the given parity has completed, and acquires at CTA scope. This scope also covers bulk copies, from
// whichever CTA they were issued; and a peer's arrival that says "I have read this stage" orders no data of ours. (Acquire at
// cluster scope would invalidate L1 at every wait: 240 us and not 224 for 32 experts of 4 rows, H200.)
DEVICE void barrier_wait(Barrier* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// If `on`, waits for a limited time. It returns true if the phase has completed, and then it acquires as barrier_wait does. If not `on`,
// it returns false. (A branch around the wait would keep its result in a register, and not in a predicate.)
DEVICE bool barrier_passed_if(bool on, Barrier* barrier, uint32_t parity) {
    uint32_t passed;
    asm volatile(
        "{\n"
        ".reg .pred on, done;\n"
        "setp.ne.b32 on, %3, 0;\n"
        "setp.ne.b32 done, 0, 0;\n"
        "@on mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}" : "=r"(passed)
        : "r"(shared_address(barrier)), "r"(parity), "r"(int(on))
        : "memory");
    return passed != 0;
}

DEVICE bool barrier_passed(Barrier* barrier, uint32_t parity) { return barrier_passed_if(true, barrier, parity); }

}  // namespace moe_fp8::ptx
