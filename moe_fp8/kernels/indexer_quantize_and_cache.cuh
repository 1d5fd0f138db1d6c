// Quantizes index keys k [T, HEAD_DIM] to FP8 e4m3 with one scale a row, and writes them into the pages of the indexer's cache. A
// page is (1 << page_shift) rows of FP8 bytes, then as many fp32 scales. common/quantize.cuh has the formula. Row t goes to slot
// slot_mapping[t] = page * page size + offset, and nowhere if the slot is negative or past the last page. HEAD_DIM / 8 threads
// share a row.
//
// The page size is no macro: its logarithm is a run-time shift, and costs nothing.
//
// The kernel is specialized by HEAD_DIM, IN_DTYPE and POWER_OF_TWO.
#pragma once

#include "common/quantize.cuh"
#include "common/types.cuh"
#include "ptx/sync.cuh"

struct IndexerCacheParams {
    const void* k;
    uint8_t* kv_cache;
    const void* slot_mapping;  // [T] int64 if wide_slots, else int32
    int64_t k_stride;          // elements between rows of k
    int64_t page_stride;       // bytes between pages
    int64_t num_pages;
    int num_rows;
    int page_shift;
    int wide_slots;
};

namespace moe_fp8 {

constexpr int kThreadsPerRow = HEAD_DIM / kQuantizeValues;
constexpr int kRows = NUM_THREADS / kThreadsPerRow;
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128, "see ops/indexer/checks.py");
static_assert(NUM_THREADS % kWarp == 0 && CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    indexer_quantize_and_cache(const __grid_constant__ IndexerCacheParams p) {
    using namespace moe_fp8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int within = static_cast<int>(threadIdx.x) % kThreadsPerRow;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kThreadsPerRow;

    // The values of a row that is skipped are read too, so that no load waits for the slot.
    float v[kQuantizeValues] = {};
    int64_t slot = -1;
    if (row < p.num_rows) {
        slot = p.wide_slots ? static_cast<const int64_t*>(p.slot_mapping)[row] : static_cast<const int*>(p.slot_mapping)[row];
        load_values<static_cast<InDtype>(IN_DTYPE)>(p.k, row * p.k_stride + within * kQuantizeValues, v);
    }
    uint32_t packed[kQuantizeValues / 4];
    const float scale = quantize_group<kThreadsPerRow, POWER_OF_TWO != 0>(v, packed);

    // As an unsigned number a negative slot lies past every page.
    const uint64_t page = static_cast<uint64_t>(slot) >> p.page_shift;
    if (page < static_cast<uint64_t>(p.num_pages)) {
        const int offset = static_cast<int>(slot) & ((1 << p.page_shift) - 1);
        uint8_t* keys = p.kv_cache + static_cast<int64_t>(page) * p.page_stride;
        float* scales = reinterpret_cast<float*>(keys + (HEAD_DIM << p.page_shift));
        *reinterpret_cast<uint2*>(keys + offset * HEAD_DIM + within * kQuantizeValues) = make_uint2(packed[0], packed[1]);
        if (within == 0) scales[offset] = scale;
    }
}
