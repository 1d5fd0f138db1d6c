// The top-k kernel on the host (cta_host.h). For random rows it compares `out` and `values` with a stable sort.
// Prints what is wrong; the exit code is 1 then.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "host.h"

#include "indexer_topk.cuh"

namespace {

using host::Fiber;
using host::random_bits;
using Bits = moe_fp8::topk::Bits;

float value_of(Bits bits) {
    const uint32_t wide = sizeof(Bits) == 2 ? static_cast<uint32_t>(bits) << 16 : bits;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

Bits bits_of(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    return static_cast<Bits>(sizeof(Bits) == 2 ? wide >> 16 : wide);
}

// Ranks x before y, as torch.topk has it.
bool above(float x, float y) {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && !std::isnan(y);
    return x > y;
}

float draw(int kind, int column) {
    const float normal = std::normal_distribution<float>()(random_bits);
    switch (kind) {
        case 0: return normal;
        case 1: return static_cast<float>(random_bits() % 3);  // few values
        case 2: return 1.0f;
        case 3: return 1.0f + static_cast<float>(random_bits() % 65536) / 65536 / 64;  // one exponent
        case 4: {
            const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-42f, -1e-42f, 1.0f};
            return odd[random_bits() % 9];
        }
        case 5: return static_cast<float>(column);  // ascending
        case 6: return random_bits() % 1000 == 0 ? normal + 10 : -INFINITY;
        case 7: return column % 64 < 16 ? NAN : normal;
        default: return -std::fabs(normal);
    }
}

bool holds(int kind, int columns, int begin, int end, int k, bool sorted, int misaligned, std::vector<Fiber>& fibers) {
    // What may not be read lies outside the range: NaN would be chosen.
    std::vector<Bits> storage(columns + 32 + misaligned, bits_of(NAN));
    Bits* row = reinterpret_cast<Bits*>((reinterpret_cast<uintptr_t>(storage.data()) + 15) / 16 * 16) + misaligned;
    const int from = std::min(std::max(begin, 0), columns), to = std::min(std::max(end, from), columns);
    for (int i = from; i < to; ++i) row[i] = bits_of(draw(kind, i));
    std::vector<int> expected(std::max(to - from, 0));
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = from + static_cast<int>(i);
    std::stable_sort(expected.begin(), expected.end(),
                     [&](int a, int b) { return above(value_of(row[a]), value_of(row[b])); });
    expected.resize(std::min<size_t>(expected.size(), k));
    if (!sorted) std::sort(expected.begin(), expected.end());
    const size_t chosen = expected.size();
    expected.resize(k, -1);

    std::vector<int> out(k, -7);
    std::vector<Bits> values(k, bits_of(-7.0f));
    // Every other time the last columns have names of their own.
    const int first_column = random_bits() % 2 * 1000000, num_carried = random_bits() % 2 * (columns / 3);
    std::vector<int> carried(num_carried);
    for (int& name : carried) name = static_cast<int>(random_bits() >> 1);
    const IndexerTopkParams params{row,     &begin, &end,   out.data(),   values.data(), carried.data(), columns,
                                   columns, k,      sorted, first_column, num_carried};
    host::run(0, fibers, [&] { indexer_topk(params); });
    for (int i = 0; i < k; ++i) {
        Bits value = bits_of(-INFINITY);
        if (static_cast<size_t>(i) < chosen) {
            const int column = expected[i], split = columns - num_carried;
            value = row[column];
            expected[i] = column < split ? first_column + column : carried[column - split];
        }
        if (out[i] != expected[i] || values[i] != value) {
            std::printf("kind %d, %d columns, %d to %d, k %d, sorted %d, misaligned %d: out[%d] = %d, not %d\n", kind, columns,
                        begin, end, k, sorted, misaligned, i, out[i], expected[i]);
            return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    std::vector<Fiber> fibers = host::fibers();
    for (int round = 0; round < CASES; ++round) {
        const int kind = round % 9;
        const int columns = round % 4 == 0 ? 1 + random_bits() % 300 : 1 + random_bits() % 6000;
        const int begin = round % 3 == 0 ? 0 : static_cast<int>(random_bits() % (columns + 20)) / 3 - 5;
        const int end = round % 3 == 0 ? columns : columns + 10 - static_cast<int>(random_bits() % 40);
        const int k = 1 + random_bits() % (round % 2 ? MAX_K : 40);
        if (!holds(kind, columns, begin, end, k, random_bits() % 2, random_bits() % 8, fibers)) return 1;
    }
    // More than one window of the bitmaps a CTA.
    for (int kind = 0; kind < 9; kind += 2) {
        const int columns = COLUMNS_OF_A_CTA * CLUSTER_SIZE - 11;
        if (!holds(kind, columns, 3, columns - 1, MAX_K - 3, kind == 4, kind, fibers)) return 1;
    }
    return 0;
}
