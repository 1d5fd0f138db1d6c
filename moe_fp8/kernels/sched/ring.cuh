// Position in a pipeline.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

// Position in a ring of kDepth slots; producer and consumers step it alike.
template <int kDepth>
struct RingCursor {
    uint32_t slot = 0, phase = 0;
    DEVICE void step() {
        if (++slot == kDepth) slot = 0, phase ^= 1;
    }
    template <int kSlots>
    DEVICE void skip() {
        slot += kSlots;
        if (slot >= kDepth) slot -= kDepth, phase ^= 1;
    }
};

}  // namespace moe_fp8::sched
