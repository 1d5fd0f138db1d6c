// What device code takes from CUDA, on the host: every thread of a cluster is a fiber of one host thread, and the fibers run in
// random order from one barrier to the next, so that a missing barrier shows. Included once, with NUM_THREADS, CLUSTER_SIZE and
// SMEM_BYTES defined.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

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
inline Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct int2 {
    int x, y;
};
struct float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
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

namespace host {

constexpr int kWarpsOfCta = NUM_THREADS / 32;
constexpr int kStaticBytes = 16384;
struct Gates {
    Gate all;
    Gate warps[kWarpsOfCta];
};
inline Gates gates[CLUSTER_SIZE];
inline Gate cluster_gate;
inline Exchange exchanges[CLUSTER_SIZE][kWarpsOfCta];
inline char (*dynamic_memory)[SMEM_BYTES];
inline char (*static_memory)[kStaticBytes];
inline int cta;

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    std::vector<char> stack;
    bool started = false;
    int thread, cta;
    bool done = false;
    Gate* waits = nullptr;
    unsigned generation = 0;
};

inline std::mt19937 random_bits(7);
inline jmp_buf scheduler;
inline Fiber* current;
inline std::function<void()> body;

// Lets a fiber run until it waits or is done. (`swapcontext` would save the signal mask at each switch, by a system call that takes
// most of the time.)
inline void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// Goes back to the scheduler. The call returns when the fiber runs again.
inline void leave() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

inline Gate& warp_gate() { return gates[current->cta].warps[current->thread / 32]; }
inline Gate& cta_gate() { return gates[current->cta].all; }
inline Exchange& warp_exchange() { return exchanges[current->cta][current->thread / 32]; }

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

namespace host {

inline int random_up_to(int least, int most) { return least + static_cast<int>(random_bits() % unsigned(most - least + 1)); }

// Ends the program with the exit code of a fault, unless what it tells of case `number` is right.
inline void demand(bool right, const char* what, int number) {
    if (right) return;
    std::printf("case %d: %s\n", number, what);
    std::exit(1);
}

// Of one cluster, and its shared memory.
inline std::vector<Fiber> fibers() {
    dynamic_memory = static_cast<char(*)[SMEM_BYTES]>(std::aligned_alloc(16, SMEM_BYTES * CLUSTER_SIZE));
    static_memory = static_cast<char(*)[kStaticBytes]>(std::aligned_alloc(16, kStaticBytes * CLUSTER_SIZE));
    std::vector<Fiber> fibers(NUM_THREADS * CLUSTER_SIZE);
    for (auto& fiber : fibers) fiber.stack.resize(64 << 10);
    return fibers;
}

inline void run_thread() {
    body();
    current->done = true;
    leave();
}

// `work` in every thread of cluster `index`.
inline void run(int index, std::vector<Fiber>& fibers, std::function<void()> work) {
    body = work;
    for (auto& gates : gates) gates = {};
    cluster_gate = {};
    std::memset(dynamic_memory, 0xa5, sizeof(*dynamic_memory) * CLUSTER_SIZE);
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = fiber.started = false;
        fiber.waits = nullptr;
        fiber.thread = static_cast<int>(i) % NUM_THREADS;
        fiber.cta = static_cast<int>(i) / NUM_THREADS;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.start, run_thread, 0);
    }
    size_t left = fibers.size();
    std::vector<int> order(fibers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    unsigned late = 0;
    bool by_lane = false;
    auto draw = [&] {
        std::shuffle(order.begin(), order.end(), random_bits);
        late = random_bits() % 2 ? random_bits() : 0;
        by_lane = random_bits() % 2;
    };
    draw();
    while (left > 0) {
        bool moved = false;
        // Now and then another order, and half of the time half of the warps, or half of the lanes, fall behind until then.
        if (random_bits() % 64 == 0) draw();
        for (int i : order) {
            Fiber& fiber = fibers[i];
            if (late >> (by_lane ? i : i / 32) % 32 & 1) {
                moved = true;
                continue;
            }
            if (fiber.done || (fiber.waits != nullptr && fiber.waits->generation == fiber.generation)) continue;
            fiber.waits = nullptr;
            moved = true;
            threadIdx.x = fiber.thread;
            blockIdx.x = index * CLUSTER_SIZE + fiber.cta;
            cta = fiber.cta;
            resume(fiber);
            left -= fiber.done;
        }
        if (!moved) {  // with nobody late
            std::puts("a barrier that not all threads reach");
            std::exit(1);
        }
    }
}

}  // namespace host

inline void Gate::meet(int members) {
    if (++arrived == members) {
        arrived = 0;
        ++generation;
        return;
    }
    host::current->waits = this;
    host::current->generation = generation;
    host::leave();
}

inline void __syncthreads() { host::meet(host::cta_gate(), NUM_THREADS); }
inline void __syncwarp() { host::meet(host::warp_gate(), 32); }
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
    return host::exchange(value, [=](const unsigned* values) { return values[lane]; });
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    const int lane = threadIdx.x % 32;
    bits = host::exchange(bits, [=](const unsigned* values) { return values[lane ^ mask]; });
    std::memcpy(&value, &bits, 4);
    return value;
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
inline int __reduce_max_sync(unsigned, int value) {
    return host::exchange(value, [](const unsigned* values) {
        int most = static_cast<int>(values[0]);
        for (int lane = 1; lane < 32; ++lane) most = max(most, static_cast<int>(values[lane]));
        return most;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return host::exchange(value, [](const unsigned* values) { return *std::max_element(values, values + 32); });
}
inline int __reduce_min_sync(unsigned, int value) {
    return host::exchange(value, [](const unsigned* values) {
        int least = static_cast<int>(values[0]);
        for (int lane = 1; lane < 32; ++lane) least = min(least, static_cast<int>(values[lane]));
        return least;
    });
}
template <typename T, typename Value>
T atomicAdd(T* at, Value value) {
    const T before = *at;
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
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
// The device's quotient is wrong by up to two units in its last place.
inline float __fdividef(float a, float b) {
    const float exact = a / b;
    unsigned bits;
    std::memcpy(&bits, &exact, 4);
    bits += host::random_bits() % 5 - 2;
    std::memcpy(&a, &bits, 4);
    return a;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
template <typename T>
T __ldg(const T* at) {
    return *at;
}

namespace moe_fp8::ptx {

inline void grid_dependency_wait() {}
inline void launch_dependents() {}
inline unsigned fresh_lane() { return threadIdx.x % 32; }
inline unsigned cluster_rank() { return host::cta; }
inline void cluster_sync() { host::meet(host::cluster_gate, NUM_THREADS * CLUSTER_SIZE); }
template <typename T>
T load_cluster(const T* pointer, unsigned rank) {
    return *host::of_rank(pointer, rank);
}
inline int load_fresh(const int* address) { return *address; }

}  // namespace moe_fp8::ptx
