// Finds the columns of the k greatest logits of each row [M, N] among starts[i] <= j < ends[i]. The result is exact: of equal
// logits the lower column ranks first, and NaN ranks above +inf. A cluster works on one row.
//
// A row is read about once. A sample of the row gives a bound that a few more than k logits reach. These candidates are put into
// shared memory, and all further steps look at the candidates alone. A bound may be bad: too few logits reach it, or too many to
// hold, as with many ties. Then the row is read again for each step of the search instead.
//
// The threads of the CTA that read candidates, histograms and counters also overwrite them. They do so each time after a barrier:
// of the CTA, or of the cluster if other CTAs of the cluster read them. Nothing is handed back by an arrival, and nothing is copied
// there asynchronously.
//
// k, M, N, the order and whether values are stored are no macros, since none of these touches the pass over the row.
//
// Loops whose time matters little say `unroll 1`: when the compiler unrolled them by four, they took a fifth of the compile time.
//
// The kernel is specialized by IN_DTYPE (bf16 or fp32), CAPACITY (candidates of one CTA), MAX_K, CLUSTER_SIZE and NUM_THREADS.
#pragma once

#include "ptx/sync.cuh"
#include "topk/emit.cuh"
#include "topk/sort.cuh"

struct IndexerTopkParams {
    const void* logits;
    const int* starts;  // [M], or null for 0
    const int* ends;    // [M], or null for N
    int* out;           // [M, k]
    void* values;       // [M, k], or null
    const int* carried;  // [M, num_carried]: the numbers by which the last columns are called, or null
    int64_t stride;     // elements between rows of logits
    int num_columns;
    int k;
    int sorted;
    int first_column;  // the number by which column 0 is called
    int num_carried;
};

namespace moe_fp8::topk {

static_assert(MAX_K <= kCapacity, "the chosen are sorted where the candidates were");

// Searches the threshold among all logits of the slice, which are read again for each step.
DEVICE Threshold search_whole(const State& state, const Slice& slice, int k, int level) {
    Interval in(kLowestKey, kLargestKey, kLargestKey);
    for (int rank = k;;) {
        Threshold threshold;
        const Bin bin = narrow<true>(state, level++, in, rank, Whole{slice});
        if (found(bin, threshold)) return threshold;
        in = Interval(bin.low, bin.high, bin.high);
        rank = bin.rank;
    }
}

// Searches the threshold among few logits in shared memory. A sample of a long slice, narrowed down twice, gives the bound for the
// list of candidates. A short slice is listed whole. `count` gets the length of the list. (One loop does both, since the functions
// that it calls are compiled for every place that calls them.)
DEVICE Threshold search_listed(const State& state, const Slice& slice, int k, int& level, int& count) {
    Interval in(kLowestKey, kLargestKey, kLargestKey);
    int rank = k, narrowings = 0;
    // This condition is alike in all CTAs of the row, as is everything that decides whether a barrier comes next.
    if (int64_t(slice.most_vectors) * kVector + slice.edges > kCapacity) {
        const int stride = sample_stride(slice);
        count = take_sample(state, slice, stride);
        rank = sample_rank(k, stride);
        narrowings = 2;
    }
    uint32_t bound = kLowestKey, top = kLargestKey;
    for (bool listed = false;;) {
        if (narrowings == 0 && !listed) {
            collect(state, slice, bound);
            listed = true;
            rank = k;
            in = Interval(bound, kLargestKey, top);
        }
        __syncthreads();
        if (listed) count = static_cast<int>(min(*state.collected, uint32_t(kCapacity)));
        const Bin bin = narrow<false>(state, level++, in, rank, Listed{state, count});
        if (bin.rank == 0) return {false, 0, 0};
        if (listed) {
            if (bin.overflow) return {false, 0, 0};
            Threshold threshold;
            if (found(bin, threshold)) return threshold;
        } else if (--narrowings == 1) {
            top = bin.top;
        }
        bound = bin.low;
        in = Interval(bin.low, bin.high, bin.high);
        rank = bin.rank;
    }
}

// Chooses the k greatest of a range of more than k logits. `out` belongs to the row.
DEVICE void select(const State& state, const Slice& slice, int k, int rank, int* out) {
    int level = 0, count = 0;
    Threshold threshold = search_listed(state, slice, k, level, count);
    const bool listed = threshold.found;
    if (!listed) threshold = search_whole(state, slice, k, level);
    emit(state, slice, threshold, listed, count, rank, out);
}

}  // namespace moe_fp8::topk

// 64 registers suffice: two CTAs of 512 threads share an SM.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, NUM_THREADS <= 512 ? 2 : 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    indexer_topk(const __grid_constant__ IndexerTopkParams p) {
    using namespace moe_fp8;
    using namespace moe_fp8::topk;
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ uint32_t counters[3];
    __shared__ uint32_t warp_sums[kWarps];
    __shared__ Bin bin;
    State state;
    state.keys = reinterpret_cast<uint32_t*>(dynamic);
    state.numbers = state.keys + kCapacity;
    state.bins = state.numbers + kCapacity;
    state.collected = &counters[0];
    state.greater = &counters[1];
    state.equal = &counters[2];
    state.warp_sums = warp_sums;
    state.bin = &bin;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kBins; i += kThreads) state.bins[i] = 0;
    if (threadIdx.x < 3) counters[threadIdx.x] = 0;
    __syncthreads();

    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int row = static_cast<int>(blockIdx.x / kCluster);
    const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    const int begin = p.starts == nullptr ? 0 : min(max(p.starts[row], 0), p.num_columns);
    const int end = p.ends == nullptr ? p.num_columns : min(max(p.ends[row], begin), p.num_columns);
    const Slice slice(p.logits, row * p.stride, begin, end, rank);
    int* out = p.out + static_cast<int64_t>(row) * p.k;

    const int count = min(p.k, slice.length);
    const int thread = rank * kThreads + static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = count + thread; i < p.k; i += kCluster * kThreads) {
        out[i] = -1;
        if (p.values != nullptr) static_cast<Bits*>(p.values)[int64_t(row) * p.k + i] = kMinusInfinity;
    }
    if (slice.length <= p.k) {
#pragma unroll 1
        for (int i = thread; i < count; i += kCluster * kThreads) out[i] = begin + i;
    } else {
        select(state, slice, p.k, rank, out);
    }

    if (p.sorted) {
        row_sync();
        if (rank == 0) sort_by_value(state, slice.row, out, count);
    }
    if (p.values != nullptr || p.first_column != 0 || p.num_carried > 0) {
        row_sync();
        const int split = p.num_columns - p.num_carried;
        for (int i = thread; i < count; i += kCluster * kThreads) {
            const int column = out[i];
            if (p.values != nullptr) static_cast<Bits*>(p.values)[int64_t(row) * p.k + i] = slice.row[column];
            out[i] = column < split ? p.first_column + column : p.carried[int64_t(row) * p.num_carried + column - split];
        }
    }
    // A peer may still read this CTA's memory.
    if constexpr (kCluster > 1) row_sync();
}
