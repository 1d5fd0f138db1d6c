// What the top-k kernel takes from CUDA, for fibers of one host thread; see topk_walk.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;
using std::sqrt;

#define DEVICE inline __attribute__((always_inline))
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes)

struct Index {
    unsigned x;
};
extern Index threadIdx, blockIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// A barrier: whoever comes last opens it.
struct Gate {
    int arrived = 0;
    unsigned generation = 0;
    void meet(int members);
};
struct Exchange {
    unsigned values[32];
};

struct IndexerTopkParams;

namespace host {

constexpr int kWarpsOfCta = NUM_THREADS / 32;
constexpr int kStaticBytes = 4096;
struct Gates {
    Gate all;
    Gate warps[kWarpsOfCta];
};
inline Gates gates[CLUSTER_SIZE];
inline Gate cluster_gate;
inline Exchange exchanges[CLUSTER_SIZE][kWarpsOfCta];
inline const IndexerTopkParams* params;
extern char (*dynamic_memory)[SMEM_BYTES];
extern char (*static_memory)[kStaticBytes];
extern int cta;

Gate& warp_gate();
Gate& cta_gate();
Exchange& warp_exchange();

// The same place in the memory of another CTA.
template <typename T>
const T* of_rank(const T* pointer, unsigned rank) {
    const char* at = reinterpret_cast<const char*>(pointer);
    const char* base = *dynamic_memory;
    size_t size = SMEM_BYTES;
    if (at < base || at >= base + SMEM_BYTES * CLUSTER_SIZE) base = *static_memory, size = kStaticBytes;
    return reinterpret_cast<const T*>(base + rank * size + (at - base) % size);
}

template <typename Read>
auto exchange(unsigned value, Read read) {
    Exchange& place = warp_exchange();
    place.values[threadIdx.x % 32] = value;
    const Index own = threadIdx;
    const Index block = blockIdx;
    const int rank = cta;
    warp_gate().meet(32);
    threadIdx = own, blockIdx = block, cta = rank;
    const auto result = read(place.values);
    warp_gate().meet(32);
    threadIdx = own, blockIdx = block, cta = rank;
    return result;
}

inline void meet(Gate& gate, int members) {
    const Index own = threadIdx;
    const Index block = blockIdx;
    const int rank = cta;
    gate.meet(members);
    threadIdx = own, blockIdx = block, cta = rank;
}

}  // namespace host

inline void __syncthreads() { host::meet(host::cta_gate(), NUM_THREADS); }
inline void __syncwarp() { host::meet(host::warp_gate(), 32); }
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
    return host::exchange(value, [=](const unsigned* values) { return values[lane]; });
}
inline unsigned __shfl_up_sync(unsigned, unsigned value, int distance) {
    const int lane = threadIdx.x % 32;
    return host::exchange(value, [=](const unsigned* values) { return lane >= distance ? values[lane - distance] : value; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return host::exchange(value, [](const unsigned* values) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= values[lane] << lane;
        return bits;
    });
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
    return host::exchange(value, [=](const unsigned* values) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= unsigned(values[lane] == value) << lane;
        return bits;
    });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return host::exchange(value, [](const unsigned* values) {
        unsigned sum = 0;
        for (int lane = 0; lane < 32; ++lane) sum += values[lane];
        return sum;
    });
}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at += value;
    return before;
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at |= value;
    return before;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
template <typename T>
T __ldg(const T* at) {
    return *at;
}

namespace moe_fp8::ptx {

inline void grid_dependency_wait() {}
inline void launch_dependents() {}
inline unsigned cluster_rank() { return host::cta; }
inline void cluster_sync() { host::meet(host::cluster_gate, NUM_THREADS * CLUSTER_SIZE); }
template <typename T>
T load_cluster(const T* pointer, unsigned rank) {
    return *host::of_rank(pointer, rank);
}

}  // namespace moe_fp8::ptx
