// wgmma: D[64,N] (+)= A[64,32] @ B[N,32]^T, FP8 e4m3 operands in shared memory (both K-major), fp32 accumulators
// in the registers of a warpgroup.
//
// Thread t of the warpgroup holds, for j < N/8: d[4j], d[4j+1] = row t/32*16 + t%32/4, columns 8j + t%4*2 and the next column;
// d[4j+2], d[4j+3] = the row 8 below.
#pragma once

#include "common/types.cuh"
#include "ptx/shared.cuh"

namespace moe_fp8::ptx {

// Waits until at most `kPending` groups are in flight. Accumulators of completed groups may then be read.
template <int kPending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of an accumulator across asynchronous wgmma.
template <int kCount>
DEVICE void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Returns the address that a descriptor holds: in units of 16 bytes.
DEVICE uint32_t wgmma_address(const void* tile) { return (shared_address(tile) & 0x3FFFF) >> 4; }

// Returns the descriptor of a K-major tile whose rows are `kRowBytes` (32, 64 or 128) long and swizzled over that many bytes. Eight
// rows form one swizzle atom, so the stride between groups of eight rows is 8 * kRowBytes. The other stride, bits 16 to 29, means
// nothing for such tiles. The tile starts at a multiple of 8 * kRowBytes.
template <int kRowBytes>
DEVICE uint64_t wgmma_descriptor(uint32_t address) {
    static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "row length is the swizzle width");
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
    return address | uint64_t(8 * kRowBytes >> 4) << 32 | kSwizzle << 62;
}

// start<kSteps> begins d = A @ B^T over the first kSteps * 32 of K, as a group of its own. The old values of `d` are lost, and the
// product is there after `wgmma_wait` and `wgmma_pin`. (All is one statement: with a statement for each wgmma, and `d` pinned
// before, NVVM takes an eighth longer over a kernel.)
template <int kN>
struct Wgmma;

#define D1(i) "+f"(d[i])
#define D4(i) D1(i), D1(i + 1), D1(i + 2), D1(i + 3)
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)

// WGMMA is the first instruction of a group, and WGMMA_AT is an instruction that lies UNITS of 16 bytes further along K. WGMMA_1,
// WGMMA_2 and WGMMA_4 are groups of one, two and four instructions.
#define WGMMA(kColumns, REGISTERS, A, B, ACCUMULATE)                                                             \
    "wgmma.mma_async.sync.aligned.m64n" #kColumns "k32.f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B ", " ACCUMULATE \
    ", 1, 1;\n"
#define WGMMA_AT(UNITS, kColumns, REGISTERS, A, B)                 \
    "add.s64 a, " A ", " UNITS ";\nadd.s64 b, " B ", " UNITS ";\n" \
    WGMMA(kColumns, REGISTERS, "a", "b", "1")
#define WGMMA_GROUP(WGMMAS, ...)                                                                                \
    asm volatile("{\n.reg .b64 a, b;\nwgmma.fence.sync.aligned;\n" WGMMAS "wgmma.commit_group.sync.aligned;\n}" \
                 : __VA_ARGS__                                                                                  \
                 : "l"(a), "l"(b)                                                                               \
                 : "memory")
#define WGMMA_1(...) WGMMA(__VA_ARGS__, "0")
#define WGMMA_2(...) WGMMA_1(__VA_ARGS__) WGMMA_AT("2", __VA_ARGS__)
#define WGMMA_4(...) WGMMA_2(__VA_ARGS__) WGMMA_AT("4", __VA_ARGS__) WGMMA_AT("6", __VA_ARGS__)

#define DEFINE_WGMMA(kColumns, kRegisters, REGISTERS, A, B, ...)                                     \
    template <>                                                                                      \
    struct Wgmma<kColumns> {                                                                         \
        template <int kSteps>                                                                        \
        static DEVICE void start(float (&d)[kRegisters], uint64_t a, uint64_t b) {                   \
            static_assert(kSteps == 1 || kSteps == 2 || kSteps == 4, "a row has 32 to 128 bytes");   \
            if constexpr (kSteps == 1) WGMMA_GROUP(WGMMA_1(kColumns, REGISTERS, A, B), __VA_ARGS__); \
            if constexpr (kSteps == 2) WGMMA_GROUP(WGMMA_2(kColumns, REGISTERS, A, B), __VA_ARGS__); \
            if constexpr (kSteps == 4) WGMMA_GROUP(WGMMA_4(kColumns, REGISTERS, A, B), __VA_ARGS__); \
        }                                                                                            \
    }

#define REGISTERS_4 \
    "%0, %1, %2, %3"
#define REGISTERS_8 REGISTERS_4 \
    ", %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32 REGISTERS_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 REGISTERS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 REGISTERS_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_68 REGISTERS_64 \
    ", %64, %65, %66, %67"
#define REGISTERS_72 REGISTERS_68 \
    ", %68, %69, %70, %71"
#define REGISTERS_80 REGISTERS_72 \
    ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_96 REGISTERS_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

DEFINE_WGMMA(8, 4, REGISTERS_4, "%4", "%5", D4(0));
DEFINE_WGMMA(16, 8, REGISTERS_8, "%8", "%9", D4(0), D4(4));
DEFINE_WGMMA(32, 16, REGISTERS_16, "%16", "%17", D16(0));
DEFINE_WGMMA(64, 32, REGISTERS_32, "%32", "%33", D32(0));
DEFINE_WGMMA(96, 48, REGISTERS_48, "%48", "%49", D16(0), D32(16));
DEFINE_WGMMA(128, 64, REGISTERS_64, "%64", "%65", D64(0));
DEFINE_WGMMA(136, 68, REGISTERS_68, "%68", "%69", D64(0), D4(64));
DEFINE_WGMMA(144, 72, REGISTERS_72, "%72", "%73", D64(0), D4(64), D4(68));
DEFINE_WGMMA(160, 80, REGISTERS_80, "%80", "%81", D64(0), D16(64));
DEFINE_WGMMA(192, 96, REGISTERS_96, "%96", "%97", D64(0), D32(64));

#undef D1
#undef D4
#undef D16
#undef D32
#undef D64
#undef WGMMA
#undef WGMMA_AT
#undef WGMMA_GROUP
#undef WGMMA_1
#undef WGMMA_2
#undef WGMMA_4
#undef DEFINE_WGMMA
#undef REGISTERS_4
#undef REGISTERS_8
#undef REGISTERS_16
#undef REGISTERS_32
#undef REGISTERS_48
#undef REGISTERS_64
#undef REGISTERS_68
#undef REGISTERS_72
#undef REGISTERS_80
#undef REGISTERS_96

}  // namespace moe_fp8::ptx
