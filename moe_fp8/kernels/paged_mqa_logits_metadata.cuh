// Schedule of the paged logits kernel: worker s of `workers` takes the chunks from floor(s * total / workers) on, where `total`
// counts the chunks of CHUNK_KV keys of all requests in order. Row s is (request, chunk within the request), and row `workers` is
// (batch, 0). One CTA makes the schedule.
#pragma once

#include "common/scan.cuh"
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

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    paged_mqa_logits_metadata(const __grid_constant__ PagedMqaLogitsMetadataParams p) {
    using namespace moe_fp8;
    __shared__ uint32_t warp_sums[kWarps];
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    auto chunks = [&](int request) {
        return request < p.batch ? ceil_div(static_cast<uint32_t>(max(p.context_lens.longest(request), 0)), uint32_t{CHUNK_KV}) : 0;
    };

    uint32_t mine = 0, total;
    for (int request = threadIdx.x; request < p.batch; request += NUM_THREADS) mine += chunks(request);
    sum_before<kWarps>(mine, warp_sums, total);
    __syncthreads();

    __shared__ int ends[NUM_THREADS];  // ends of this round's requests, in chunks of all requests
    int before = 0;
    for (int base = 0; base < p.batch; base += NUM_THREADS) {
        uint32_t sum;
        const int count = chunks(base + static_cast<int>(threadIdx.x));
        ends[threadIdx.x] = before + static_cast<int>(sum_before<kWarps>(count, warp_sums, sum)) + count;
        __syncthreads();
        for (int s = threadIdx.x; s < p.workers; s += NUM_THREADS) {
            const int target = static_cast<int>(static_cast<int64_t>(s) * total / p.workers);
            if (target < before || target >= before + static_cast<int>(sum)) continue;
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
