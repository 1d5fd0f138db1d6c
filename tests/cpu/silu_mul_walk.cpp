// The end of the tiles of gemm_silu_mul_fp8 on the host (gemm/silu_mul.cuh, cta_host.h). Sums lie in threads as wgmma leaves them.
// Arithmetic is replaced: the product is gate + up / 2, and an FP8 byte is a rounded number.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "host.h"

#include "gemm/silu_mul.cuh"

using namespace moe_fp8;
using host::demand;

namespace {

float random_value() { return static_cast<float>(host::random_bits() % 2001) - 1000.0f; }

}  // namespace

int main() {
    std::vector<host::Fiber> fibers = host::fibers();
    for (int number = 0; number < CASES; ++number) {
        // Of the tile: weight rows by tokens.
        std::vector<std::vector<float>> value(kBlockN, std::vector<float>(kBlockM));
        for (auto& row : value) {
            for (auto& element : row) element = random_value();
        }
        const int groups = 1 + host::random_bits() % 3, group = host::random_bits() % groups, rows = kBlockM + 9;
        Tile tile{};
        tile.row = 4 * (host::random_bits() % 3), tile.n = group * kBlockN;
        tile.begin_row = host::random_bits() % 4;
        tile.end_row = tile.begin_row + 1 + host::random_bits() % (kBlockM - tile.begin_row);
        std::vector<uint8_t> out(static_cast<size_t>(rows) * groups * kBlockK, 0xcc);
        std::vector<float> scales(static_cast<size_t>(rows + 3) * groups, -7);
        GemmParams p{};
        p.out = out.data(), p.out_stride = groups * kBlockK, p.limit = 1.0f, p.out_scale = scales.data();
        p.out_scale_stride = rows + 3;
        Shared* shared = reinterpret_cast<Shared*>(*host::dynamic_memory);

        host::run(0, fibers, [&] {
            const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
            Fragments::Sum sum[kWaves];
            for (int wave = 0; wave < kWaves; ++wave) {
                for (int i = 0; i < Fragments::kColumns / 2; ++i) {
                    // wgmma: element i of a thread lies in this row and column of the 64 x kColumns fragment.
                    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    const int weight = kBlockM < 64 ? warpgroup * 128 + wave * 64 + row : wave * 128 + column;
                    const int token = kBlockM < 64 ? column : warpgroup * 64 + row;
                    sum[wave][i] = value[weight][token];
                }
            }
            const mma::Owned owned{kBlockM < 64 ? 0 : warpgroup * 64, 0, kWaves};
            if (owned.token < tile.end_row) store_silu_mul(p, *shared, tile, owned, warpgroup, sum);
        });

        for (int row = 0; row < rows; ++row) {
            const int token = row - tile.row;
            const bool stored = token >= tile.begin_row && token < tile.end_row;
            float products[kBlockK], most = 1e-10f;
            for (int output = 0; stored && output < kBlockK; ++output) {
                const int gate = output / 8 * 16 + output % 8;
                products[output] = value[gate][token] + value[gate + 8][token] / 2;
                most = max(most, std::fabs(products[output]));
            }
            const float inverse = 1.0f / (most / kFp8Max);
            for (int column = 0; column < groups * kBlockK; ++column) {
                const uint8_t byte = out[static_cast<size_t>(row) * groups * kBlockK + column];
                const bool mine = stored && column / kBlockK == group;
                const uint8_t expected = mine ? to_byte(products[column % kBlockK] * inverse) : 0xcc;
                demand(byte == expected, mine ? "an output" : "an output of nobody is written", number);
            }
            for (int g = 0; g < groups; ++g) {
                const float scale = scales[static_cast<size_t>(g) * (rows + 3) + row];
                demand(scale == (stored && g == group ? most / kFp8Max : -7), "a scale", number);
            }
        }
    }
    return 0;
}
