// Position in a pipeline.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

// A position in a ring of kDepth slots. Producer and consumers step it alike.
template <int kDepth>
struct RingCursor {
    uint32_t slot = 0, phase = 0;
    DEVICE void step() {
        if (++slot == kDepth) slot = 0, phase ^= 1;
    }
    // 0 <= steps <= kDepth.
    DEVICE void skip(int steps) {
        slot += steps;
        if (slot >= kDepth) slot -= kDepth, phase ^= 1;
    }
    // Returns the cursor after so many steps.
    DEVICE RingCursor ahead(int steps) const {
        RingCursor on = *this;
        on.skip(steps);
        return on;
    }
};

}  // namespace moe_fp8::sched
