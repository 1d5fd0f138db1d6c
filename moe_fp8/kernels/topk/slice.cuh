// A CTA has one slice of a row's range, and walks over it. A row may start at any element. The 16-byte vectors that lie wholly in
// the range are divided among the CTAs of the cluster. The few logits before the vectors go to the first CTA, and the few logits
// after them to the last CTA. Nothing outside the range is read.
//
// Logits have a number within the slice, in order of columns. The numbers of vector i start at (i + 1) * kVector, and the numbers
// of the logits before the first vector end below kVector. So a vector's numbers never straddle a multiple of kVector.
#pragma once

#include "topk/key.cuh"

namespace moe_fp8::topk {

constexpr int kCluster = CLUSTER_SIZE;
constexpr int kThreads = NUM_THREADS;
constexpr int kWarps = kThreads / kWarp;

// A thread loads so many vectors before it looks at the first vector: 1024 threads have 64 KiB in flight.
constexpr int kUnroll = 4;

struct Slice {
    const Bits* row;       // column 0
    const uint4* vectors;  // vectors of this slice
    int num_vectors;
    int most_vectors;   // most vectors of any slice of the row
    uint32_t column;    // column of number 0, modulo 2^32
    int head, tail;     // logits before and after the vectors
    int tail_column;    // column of the first logit after the vectors
    int begin, length;  // the row's whole range
    int edges;          // logits of the range that are in no vector

    DEVICE Slice(const void* logits, int64_t offset, int begin_, int end, int rank) {
        row = static_cast<const Bits*>(logits) + offset;
        begin = begin_;
        length = end - begin_;
        const int misaligned = static_cast<int>(reinterpret_cast<uint64_t>(row + begin) / sizeof(Bits) % kVector);
        const int before = min(length, (kVector - misaligned) % kVector);
        const int whole = (length - before) / kVector;
        edges = length - whole * kVector;
        most_vectors = ceil_div(whole, kCluster);
        const int first = min(rank * most_vectors, whole);
        num_vectors = min(most_vectors, whole - first);
        const int first_column = begin + before + first * kVector;
        vectors = reinterpret_cast<const uint4*>(row + begin + before) + first;
        column = static_cast<uint32_t>(first_column) - kVector;
        head = rank == 0 ? before : 0;
        tail_column = first_column + num_vectors * kVector;
        tail = rank == kCluster - 1 ? begin + length - tail_column : 0;
    }

    // Returns one more than the greatest number.
    DEVICE uint32_t extent() const { return static_cast<uint32_t>(num_vectors + 1) * kVector + tail; }

    // Calls visit(valid, number of the first value, kVector values) for vectors [first, last), by whole warps. `visit` is inlined
    // kInlined times for kUnroll vectors. Fewer copies compile sooner, but cost moves of the loaded vectors. These moves matter for
    // fp32 (4% of a long row). They do not matter for bf16, whose vectors have twice as many logits.
    template <int kInlined = 1, typename Visit>
    DEVICE void each_vector(int first, int last, Visit visit) const {
        const int lane = lane_index();
        for (int base = first + static_cast<int>(threadIdx.x) - lane; base < last; base += kThreads * kUnroll) {
            uint4 loaded[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int i = base + u * kThreads + lane;
                loaded[u] = i < last ? vectors[i] : make_uint4(0, 0, 0, 0);
            }
#pragma unroll kInlined
            for (int u = 0; u < kUnroll; ++u) {
                const int i = base + u * kThreads + lane;
                if (i - lane >= last) break;
                float values[kVector];
                unpack(loaded[0], values);
                visit(i < last, static_cast<uint32_t>(i + 1) * kVector, values);
#pragma unroll
                for (int j = 1; j < kUnroll; ++j) loaded[j - 1] = loaded[j];
            }
        }
    }

    // Calls visit(valid, number, one value) for the logits before and after the vectors, by the whole first warp.
    template <typename Visit>
    DEVICE void each_at_the_edges(Visit visit) const {
        static_assert(2 * kVector <= kWarp);
        if (threadIdx.x >= kWarp || head + tail == 0) return;
        const int lane = lane_index();
        const bool before = lane < kVector;
        const int at = before ? lane : lane - kVector;
        const bool valid = at < (before ? head : tail);
        const uint32_t number = before ? kVector - head + at : static_cast<uint32_t>(num_vectors + 1) * kVector + at;
        const float values[1] = {valid ? value_of(row[static_cast<int>(column + number)]) : 0.0f};
        visit(valid, number, values);
    }
};

}  // namespace moe_fp8::topk
