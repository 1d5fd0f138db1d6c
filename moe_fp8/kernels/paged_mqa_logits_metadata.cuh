// Schedule of the paged logits kernel: worker s of `workers` takes the chunks from floor(s * total / workers) on, where
// `total` counts the chunks of CHUNK_KV keys of all requests in order. Row s is (request, chunk within it); row
// `workers` is (batch, 0). One CTA.
#pragma once

#include "common/types.cuh"
#include "ptx/sync.cuh"
#include "sched/context_lens.cuh"

struct PagedMqaLogitsMetadataParams {
    moe_fp8::sched::ContextLens context_lens;
    int2* metadata;  // [workers + 1]
    int batch;
    int workers;
};

namespace moe_fp8 {

static_assert(NUM_THREADS % kWarp == 0 && NUM_THREADS <= 1024 && CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");
constexpr int kWarps = NUM_THREADS / kWarp;

// Inclusive prefix sum over the CTA; `total` is the sum over all threads.
DEVICE int block_scan(int value, int (&warp_sums)[kWarps], int& total) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, value, distance);
        if (lane_index() >= distance) value += below;
    }
    __syncthreads();
    if (lane_index() == kWarp - 1) warp_sums[threadIdx.x / kWarp] = value;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < static_cast<int>(threadIdx.x) / kWarp) before += warp_sums[warp];
        total += warp_sums[warp];
    }
    return value + before;
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    paged_mqa_logits_metadata(const __grid_constant__ PagedMqaLogitsMetadataParams p) {
    using namespace moe_fp8;
    __shared__ int warp_sums[kWarps];
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    auto chunks = [&](int request) {
        return request < p.batch ? ceil_div(max(p.context_lens.longest(request), 0), CHUNK_KV) : 0;
    };

    int mine = 0, total = 0;
    for (int request = threadIdx.x; request < p.batch; request += NUM_THREADS) mine += chunks(request);
    block_scan(mine, warp_sums, total);

    __shared__ int ends[NUM_THREADS];  // of this round's requests, in flattened chunks
    int before = 0;
    for (int base = 0; base < p.batch; base += NUM_THREADS) {
        int sum;
        const int end = before + block_scan(chunks(base + static_cast<int>(threadIdx.x)), warp_sums, sum);
        ends[threadIdx.x] = end;
        __syncthreads();
        for (int s = threadIdx.x; s < p.workers; s += NUM_THREADS) {
            const int target = static_cast<int>(static_cast<int64_t>(s) * total / p.workers);
            if (target < before || target >= before + sum) continue;
            int low = 0, high = NUM_THREADS - 1;  // the first request that ends after the target
            while (low < high) {
                const int middle = (low + high) / 2;
                if (ends[middle] > target) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            p.metadata[s] = make_int2(base + low, target - (low == 0 ? before : ends[low - 1]));
        }
        before += sum;
    }
    for (int s = total == 0 ? threadIdx.x : p.workers + threadIdx.x; s <= p.workers; s += NUM_THREADS) {
        p.metadata[s] = make_int2(p.batch, 0);
    }
}
