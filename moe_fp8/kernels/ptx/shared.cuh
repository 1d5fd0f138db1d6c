// Accesses of shared memory in this CTA and in its cluster, stores that round to bf16, additions in global memory.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::ptx {

// Returns the 32-bit address in the shared window of this CTA.
DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns the pointer of such an address.
template <typename T>
DEVICE T* shared_pointer(uint32_t address) {
    return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Loads where the call stands: the compiler neither moves this load down to its use nor merges it with another load.
DEVICE float load_here(const float* pointer) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(pointer)) : "memory");
    return value;
}

DEVICE float2 load_here(const float2* pointer) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(shared_address(pointer))
                 : "memory");
    return value;
}

DEVICE float4 load_here(const float4* pointer) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(shared_address(pointer))
                 : "memory");
    return value;
}

// Multiplies where the call stands, rounding to nearest even.
DEVICE float multiply_here(float a, float b) {
    float product;
    asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

DEVICE uint32_t load_shared(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Loads from the same offset in CTA `rank` of the cluster. Only cluster_sync orders such loads, and no CTA may end before others
// have read its memory.
DEVICE uint32_t load_cluster(const uint32_t* pointer, uint32_t rank) {
    uint32_t value;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [remote];\n"
        "}" : "=r"(value)
        : "r"(shared_address(pointer)), "r"(rank)
        : "memory");
    return value;
}

DEVICE uint2 load_cluster(const uint2* pointer, uint32_t rank) {
    uint2 value;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "ld.shared::cluster.v2.u32 {%0, %1}, [remote];\n"
        "}" : "=r"(value.x), "=r"(value.y)
        : "r"(shared_address(pointer)), "r"(rank)
        : "memory");
    return value;
}

// Stores sixteen bytes if `on`.
DEVICE void store_if(bool on, float4* pointer, const float4& value) {
    asm volatile(
        "{\n"
        ".reg .pred on;\n"
        "setp.ne.b32 on, %5, 0;\n"
        "@on st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"r"(shared_address(pointer)),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(int(on))
        : "memory");
}

// If `on`, stores sixteen bytes to the same offset in CTA `rank` of the cluster (it may be this CTA), and as many transaction bytes
// to the same barrier there. A thread that waits for that barrier's phase sees the bytes.
DEVICE void store_cluster_async(bool on, const float4* pointer, const float4& value, const uint64_t* barrier,
                                uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .pred on;\n"
        ".reg .b32 remote, remote_barrier;\n"
        "setp.ne.b32 on, %7, 0;\n"
        "mapa.shared::cluster.u32 remote, %0, %6;\n"
        "mapa.shared::cluster.u32 remote_barrier, %1, %6;\n"
        "@on st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%2, %3, %4, %5}, [remote_barrier];\n"
        "}" ::"r"(shared_address(pointer)),
        "r"(shared_address(barrier)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(rank), "r"(int(on))
        : "memory");
}

// Stores four bytes to shared memory of this CTA, which is part of a cluster, and as many transaction bytes to a barrier there.
DEVICE void store_async(float* pointer, float value, uint64_t* barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     shared_address(pointer)),
                 "f"(value), "r"(shared_address(barrier))
                 : "memory");
}

// Stores four 8x8 matrices of 16-bit elements. Lane 8*i+r gives the address of row r of matrix i. Other threads see the matrices
// after a barrier among the threads.
DEVICE void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// Stores an element of fp32, or of bf16 rounded to nearest even.
DEVICE void store_as(float* element, float value) { *element = value; }

DEVICE void store_as(uint16_t* element, float value) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*element) : "f"(value));
}

// Adds to four neighbouring floats in global memory. Each sum is rounded to nearest even. No later instruction waits for it.
DEVICE void add_global(float* quad, const float4& value) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(quad), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
}

// Packs two floats as bf16, rounded to nearest even. `low` lands in the low half.
DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Stores four neighbouring elements, as `store_as` does.
DEVICE void store_quad_as(float* quad, const float4& value) { *reinterpret_cast<float4*>(quad) = value; }
DEVICE void store_quad_as(uint16_t* quad, const float4& value) {
    *reinterpret_cast<uint2*>(quad) = make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w));
}

}  // namespace moe_fp8::ptx
