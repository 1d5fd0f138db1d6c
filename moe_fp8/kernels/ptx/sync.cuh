// Registers of warpgroups, the order of grids, barriers of CTAs and clusters, and values that hold for a whole warp.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::ptx {

// Gives registers back; every warp of the warpgroup executes it.
template <int kRegisters>
DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Blocks until the registers are free.
template <int kRegisters>
DEVICE void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits until the kernel before has ended and its writes are visible to this grid (programmatic dependent launch). Since a grid may
// begin before these writes, no kernel reads global memory by `__ldg`, which takes memory to be constant for as long as the grid runs.
DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream begin as SMs fall free, once a thread of every block has called this. It is called after
// grid_dependency_wait, so that whatever a kernel does ahead of its wait comes after all kernels except the kernel before.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Every thread of the cluster arrives, and waits before it arrives again. This orders no memory accesses, since ordering costs a
// fence at GPU scope. It serves for barriers that fence_barrier_init has published, and for the end, when all copies and arrivals
// have been waited for.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// This is a barrier of all threads of the cluster, and every warp executes it converged. A thread may store before it, in shared
// memory of any of the CTAs or in global memory, and every thread of the cluster may load the stored values after it.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// This is a barrier of kThreads threads of the CTA, in whole warps. __syncthreads is barrier 0.
template <int kBarrier, int kThreads>
DEVICE void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The lane is read anew at each call, so that values derived from it are not kept in registers from call to call.
DEVICE uint32_t fresh_lane() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Returns a value that all lanes have, in a uniform register. Every lane calls it.
DEVICE int uniform(int value) { return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(value))); }

// Returns zero, since grids have one dimension here. The compiler does not know this.
DEVICE uint32_t unknown_zero() {
    uint32_t size;
    asm("mov.u32 %0, %%nctaid.z;" : "=r"(size));
    return size - 1;
}

// Elects one lane of a converged warp. Copies that this lane issues get their operands from uniform registers. It is not for values
// that a lane keeps from call to call, since the compiler may repeat the election where fewer lanes are left.
DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}" : "=r"(elected));
    return elected != 0;
}

// Loads from L2, since a line of L1 may be older. The value is right even if this thread has not waited for the kernel before, as long
// as that kernel does not write it: all earlier kernels have ended before this grid begins (`launch_dependents`).
DEVICE int load_fresh(const int* address) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

}  // namespace moe_fp8::ptx
