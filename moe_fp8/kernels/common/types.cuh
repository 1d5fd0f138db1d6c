// Integer names, the tensor-map type and small constexpr helpers. NVRTC compiles without any system header.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

#define DEVICE __device__ __forceinline__

namespace moe_fp8 {

// The 128-byte opaque object that cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// The codes of IN_DTYPE, the type of the values that a kernel reads.
enum class InDtype { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// The type `First` if `kFirst`, and otherwise the type `Second`.
template <bool kFirst, typename First, typename Second>
struct Choose {
    using Type = First;
};
template <typename First, typename Second>
struct Choose<false, First, Second> {
    using Type = Second;
};

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

// Elements of K that share one scale.
constexpr int kBlockK = 128;

// Rows between segment starts of the aligned grouped layouts.
constexpr int kSegmentAlignment = 128;

template <typename T>
DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
DEVICE constexpr T align_up(T a, T b) {
    return ceil_div(a, b) * b;
}

DEVICE int warp_index() {
    // The broadcast tells the compiler that the index is uniform over the warp.
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
}

DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }

}  // namespace moe_fp8
