// Bulk tensor copies (TMA) between global and shared memory. Each load completes by counting its bytes on `barrier`. A reader waits
// on that barrier and needs no further fence. One thread issues a copy.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

namespace moe_fp8::ptx {

// L2 eviction priorities, as createpolicy encodes them for a fraction of 1.0.
enum class CacheHint : uint64_t {
    kNormal = 0x1000000000000000ull,
    kEvictFirst = 0x12F0000000000000ull,
    kEvictLast = 0x14F0000000000000ull,
};

DEVICE void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Brings the line at a global address into L2, with the translation of the address.
DEVICE void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory"); }

DEVICE void tma_load_2d(const TensorMap* map, Barrier* barrier, void* destination, int x, int y, CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(hint)
        : "memory");
}

// Loads to the same offset in every CTA of `mask`. Each of these CTAs counts the bytes on its barrier at the same offset.
DEVICE void tma_load_2d_multicast(const TensorMap* map, Barrier* barrier, void* destination, int x, int y,
                                  uint16_t mask, CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(mask), "l"(hint)
        : "memory");
}

DEVICE void tma_load_3d(const TensorMap* map, Barrier* barrier, void* destination, int x, int y, int z,
                        CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(hint)
        : "memory");
}

// Loads to the same offset in every CTA of `mask`, as `tma_load_2d_multicast` does.
DEVICE void tma_load_3d_multicast(const TensorMap* map, Barrier* barrier, void* destination, int x, int y, int z, uint16_t mask,
                                  CacheHint hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(mask), "l"(hint)
        : "memory");
}

// Stores a box from shared to global memory, in this thread's current bulk group. x runs along the innermost dimension.
DEVICE void tma_store_2d(const TensorMap* map, const void* source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(source)), "r"(x), "r"(y)
                 : "memory");
}

DEVICE void tma_store_3d(const TensorMap* map, const void* source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(source)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Closes this thread's bulk group.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until every bulk group of this thread has read its sources.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders this thread's accesses of shared memory before later bulk copies and wgmma that read it.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace moe_fp8::ptx
