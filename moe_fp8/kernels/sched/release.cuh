// A warp that has read shared memory hands it back here to whoever overwrites it next.
//
// An arrival says "I have read this memory". But ptxas issues an arrival while loads that come before it are still on their way.
// Behind stores that wait in the memory system, such a load came after the next copy had overwritten the values that it reads:
// prefill logits had the scales of keys twelve stages later. So every arrival that hands memory back takes the values that were read
// there, or values that were computed from them. It cannot be issued before they are in registers. `tests/cpu/test_machine_code.py`
// checks this in the machine code of every kernel.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace moe_fp8::sched {

// A warp that let the memory pass without reading it gives this to its arrival.
struct NothingRead {
    template <typename Visit>
    DEVICE void each(Visit&) const {}
};

// This zero is known only when all values that it was given are known. The values are waited for in their order: if the first comes
// last, no other value holds up the instructions before the arrival. (It is written in PTX, since the compiler would find an order
// of its own.)
class Zero {
   public:
    DEVICE void operator()(uint32_t value) { asm("and.b32 %0, %0, %1;" : "+r"(zero_) : "r"(value)); }
    DEVICE void operator()(int value) { (*this)(static_cast<uint32_t>(value)); }
    DEVICE void operator()(float value) { (*this)(__float_as_uint(value)); }
    DEVICE void operator()(float2 value) { (*this)(value.x), (*this)(value.y); }
    // Two values take one instruction.
    DEVICE void operator()(float one, float other) {
        asm("lop3.b32 %0, %0, %1, %2, 0x80;" : "+r"(zero_) : "r"(__float_as_uint(one)), "r"(__float_as_uint(other)));
    }
    template <typename T, int kCount>
    DEVICE void operator()(const T (&values)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) (*this)(values[i]);
    }
    template <typename T>
    DEVICE void operator()(const T& value) {
        value.each(*this);
    }
    DEVICE uint32_t value() const { return zero_; }

   private:
    uint32_t zero_ = ptx::unknown_zero();
};

// Returns the barrier, at an address that is known when all values are known.
template <typename... Read>
DEVICE ptx::Barrier* after(ptx::Barrier* barrier, const Read&... read) {
    static_assert(sizeof...(Read) > 0, "name what was read, or NothingRead");
    Zero zero;
    (zero(read), ...);
    return ptx::shared_pointer<ptx::Barrier>(ptx::shared_address(barrier) | zero.value());
}

// This is one arrival for the warp. Every lane gives the values that it has read.
template <typename... Read>
DEVICE void release(ptx::Barrier* barrier, const Read&... read) {
    barrier = after(barrier, read...);
    __syncwarp();
    if (lane_index() == 0) ptx::barrier_arrive(barrier);
}

// This is the same arrival on the barrier of each of the first kCtas CTAs of the cluster, for a barrier that the lane has got from
// `after`.
template <int kCtas>
DEVICE void arrive_cluster(ptx::Barrier* barrier) {
    __syncwarp();
    if (lane_index() < kCtas) ptx::barrier_arrive_cluster(barrier, lane_index());
}

template <int kCtas, typename... Read>
DEVICE void release_cluster(ptx::Barrier* barrier, const Read&... read) {
    arrive_cluster<kCtas>(after(barrier, read...));
}

// This is one arrival for each lane.
template <typename... Read>
DEVICE void release_each(ptx::Barrier* barrier, const Read&... read) {
    ptx::barrier_arrive(after(barrier, read...));
}

}  // namespace moe_fp8::sched
