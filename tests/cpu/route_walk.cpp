// The kernel of route_topk on the host (cta_host.h): reads a call from the file of the first argument, and writes weights and ids to
// the file of the second.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "host.h"

#include "route_topk.cuh"

namespace {

template <typename T>
std::vector<T> read(std::FILE* file, size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, file) != count) std::exit(2);
    return values;
}

}  // namespace

int main(int, char** arguments) {
    std::FILE* file = std::fopen(arguments[1], "rb");
    if (file == nullptr) return 2;
    // tokens, experts, topk, groups, kept groups, softmax, renormalize, wide ids, whether there is a bias, blocks
    const std::vector<int> sizes = read<int>(file, 10);
    const int tokens = sizes[0], experts = sizes[1], topk = sizes[2], blocks = sizes[9];
    const float scaling = read<float>(file, 1)[0];
    const std::vector<char> logits = read<char>(file, static_cast<size_t>(tokens) * experts * (IN_DTYPE == 2 ? 4 : 2));
    const std::vector<float> bias = read<float>(file, sizes[8] ? experts : 0);
    std::fclose(file);

    std::vector<float> weights(static_cast<size_t>(tokens) * topk);
    std::vector<int64_t> ids(weights.size());
    RouteTopkParams params{};
    params.logits = logits.data(), params.bias = sizes[8] ? bias.data() : nullptr;
    params.weights = weights.data(), params.ids = ids.data();
    params.logits_stride = experts, params.weights_stride = params.ids_stride = topk;
    params.num_tokens = tokens, params.num_experts = experts, params.topk = topk;
    params.num_groups = sizes[3], params.kept_groups = sizes[4], params.softmax = sizes[5];
    params.renormalize = sizes[6], params.wide_ids = sizes[7], params.scaling = scaling;
    std::vector<host::Fiber> fibers = host::fibers();
    gridDim.x = blocks;
    for (int block = 0; block < blocks; ++block) {
        host::run(block, fibers, [&] { route_topk(params); });
    }

    file = std::fopen(arguments[2], "wb");
    std::fwrite(weights.data(), sizeof(float), weights.size(), file);
    std::fwrite(ids.data(), sizes[7] ? 8 : 4, ids.size(), file);
    std::fclose(file);
    return 0;
}
