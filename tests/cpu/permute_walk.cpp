// The kernel of moe_permute on the host (cta_host.h), with random FP8 tokens, ids and maps, against plain counting.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "host.h"

#include "moe_permute.cuh"

using host::demand;
using host::random_up_to;

int main() {
    std::vector<host::Fiber> fibers = host::fibers();
    for (int number = 0; number < CASES; ++number) {
        const int tokens = random_up_to(1, number % 2 ? 40 : 120), topk = random_up_to(1, 9), k = 128 * random_up_to(1, 5);
        const int experts = random_up_to(1, 70), everyone = experts * random_up_to(1, 3);
        const int ids_stride = topk + random_up_to(0, 3), x_stride = k + 16 * random_up_to(0, 2), rows = tokens * topk + 3;
        const int pitch = (rows + 3) / 4 * 4, groups = k / 128;

        std::vector<int> map(everyone, -1);
        for (int e = 0; e < experts; ++e) map[e * (everyone / experts)] = e;
        const bool mapped = everyone > experts;
        std::vector<IdType> ids(static_cast<size_t>(tokens) * ids_stride);
        for (auto& id : ids) id = random_up_to(-1, everyone);  // both ends are no experts
        std::vector<uint8_t> x(static_cast<size_t>(tokens) * x_stride), a(static_cast<size_t>(rows) * k, 0xcc);
        for (auto& value : x) value = static_cast<uint8_t>(host::random_bits());
        std::vector<float> x_scale(static_cast<size_t>(tokens) * groups), a_scale(static_cast<size_t>(pitch) * groups, -7);
        for (auto& scale : x_scale) scale = static_cast<float>(random_up_to(1, 1000));
        std::vector<int> offsets(experts + 1, -9), places(static_cast<size_t>(tokens) * topk, -9);

        MoePermuteParams p{};
        p.x = x.data(), p.x_scale = x_scale.data(), p.ids = ids.data(), p.expert_map = mapped ? map.data() : nullptr;
        p.a = a.data(), p.a_scale = a_scale.data(), p.offsets = offsets.data(), p.rows = places.data();
        p.x_stride = x_stride, p.x_scale_stride = groups, p.x_group_stride = 1, p.ids_stride = ids_stride;
        p.a_scale_stride = pitch, p.num_tokens = tokens, p.topk = topk, p.k = k, p.num_experts = experts;
        p.num_ids = mapped ? everyone : experts;
        p.tokens = random_up_to(1, 12), p.splits = random_up_to(1, groups);
        const int blocks = (tokens + p.tokens - 1) / p.tokens * p.splits;
        gridDim.x = blocks;
        for (int block = 0; block < blocks; ++block) host::run(block, fibers, [&] { moe_permute(p); });

        int next = 0;
        std::vector<bool> used(rows, false);
        for (int e = 0; e < experts; ++e) {
            demand(offsets[e] == next, "offsets", number);
            for (int i = 0; i < tokens * topk; ++i) {
                const int64_t id = ids[static_cast<size_t>(i / topk) * ids_stride + i % topk];
                const int expert = id < 0 || id >= p.num_ids ? -1 : mapped ? map[id] : static_cast<int>(id);
                if (expert != e) continue;
                demand(places[i] == next, "rows", number);
                const size_t token = i / topk;
                demand(std::memcmp(&a[static_cast<size_t>(next) * k], &x[token * x_stride], k) == 0, "values", number);
                for (int g = 0; g < groups; ++g) {
                    demand(a_scale[static_cast<size_t>(g) * pitch + next] == x_scale[token * groups + g], "scales", number);
                }
                places[i] = -1;  // seen
                used[next++] = true;
            }
        }
        demand(offsets[experts] == next, "the last offset", number);
        for (int place : places) demand(place == -1, "places without an expert", number);
        for (int row = 0; row < rows; ++row) {
            for (int column = 0; !used[row] && column < k; ++column) {
                demand(a[static_cast<size_t>(row) * k + column] == 0xcc, "a row of nobody is written", number);
            }
            for (int g = 0; !used[row] && g < groups; ++g) {
                demand(a_scale[static_cast<size_t>(g) * pitch + row] == -7, "a scale of nobody is written", number);
            }
        }
    }
    return 0;
}
