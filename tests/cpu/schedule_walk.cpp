// The kernel of paged_mqa_logits_metadata on the host (cta_host.h), with random lengths, against plain counting in 64 bits.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "host.h"

#include "paged_mqa_logits_metadata.cuh"

using host::demand;
using host::random_up_to;

namespace {

// A length of one of four kinds: up to 300, none, negative, near the largest number that an int holds.
int random_length() {
    switch (host::random_bits() % 8) {
        case 0: return 0;
        case 1: return -random_up_to(1, 1000);
        case 2: return INT32_MAX - random_up_to(0, 130);
        default: return random_up_to(1, 300);
    }
}

}  // namespace

int main() {
    std::vector<host::Fiber> fibers = host::fibers();
    gridDim.x = 1;
    for (int number = 0; number < CASES; ++number) {
        const int batch = random_up_to(1, 3 * NUM_THREADS), next_n = random_up_to(1, 3), workers = random_up_to(1, 2 * NUM_THREADS);
        const bool per_token = host::random_bits() % 2;
        const int of_request = per_token ? next_n : 1;
        std::vector<int> lens(batch * of_request);
        // (Chunks are counted in 31 bits, so 63 requests may have the largest length.)
        for (size_t i = 0; i < lens.size(); ++i) lens[i] = number % 3 && i < 63 ? random_length() : random_up_to(-20, 300);

        std::vector<int2> schedule(workers + 2, int2{-9, -9});
        PagedMqaLogitsMetadataParams p{};
        p.context_lens.lens = lens.data(), p.context_lens.next_n = next_n, p.context_lens.per_token = per_token;
        p.metadata = schedule.data(), p.batch = batch, p.workers = workers;
        host::run(0, fibers, [&] { paged_mqa_logits_metadata(p); });

        std::vector<int64_t> ends;
        int64_t total = 0;
        for (int request = 0; request < batch; ++request) {
            int64_t longest = 0;
            for (int i = 0; i < of_request; ++i) longest = max<int64_t>(longest, lens[request * of_request + i]);
            ends.push_back(total += (longest + CHUNK_KV - 1) / CHUNK_KV);
        }
        int request = 0;
        for (int s = 0; s <= workers; ++s) {
            const int64_t target = s * total / workers;
            while (request < batch && ends[request] <= target) ++request;
            const int64_t before = request == batch ? target : request == 0 ? 0 : ends[request - 1];
            demand(schedule[s].x == request, "a worker's request", number);
            demand(schedule[s].y == target - before, "a worker's chunk", number);
        }
        demand(schedule[workers + 1].x == -9, "written behind the end", number);
    }
    return 0;
}
