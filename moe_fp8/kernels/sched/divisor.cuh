// Division by a number that is known before the dividend.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

// A positive divisor d with its inverse, floor(2^32 / d) or one less. Once the dividend is known, a quotient takes a quarter of the time
// that `/` takes.
class Divisor {
   public:
    DEVICE explicit Divisor(int value) : value_(value) {
        // The first inverse is too small by at most 2^-19 of it, since the numerator is 2^32 - 2^12, and by less than one from rounding
        // down. Newton's step squares the first of these.
        inverse_ = static_cast<uint32_t>(__fdividef(4294963200.0f, static_cast<float>(value)));
        inverse_ += __umulhi(inverse_, 0u - inverse_ * value);
    }

    DEVICE int value() const { return value_; }

    // Returns dividend / value, for a dividend from 0 on. (The product with the inverse is too small by less than one.) For other dividends
    // the result has no meaning.
    DEVICE int quotient(uint32_t dividend) const {
        const uint32_t about = __umulhi(dividend, inverse_);
        return static_cast<int>(about + (static_cast<int>(dividend - about * value_) >= value_));
    }

   private:
    int value_;
    uint32_t inverse_;
};

}  // namespace moe_fp8::sched
