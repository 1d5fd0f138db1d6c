// The fragments of GEMM tiles on the host (mma/fragments.cuh, cta_host.h): which part of a tile each math warpgroup owns, and where the
// threads of a warpgroup store it. Prints what is wrong; the exit code is 1 then.
#include "host.h"

#include "mma/fragments.cuh"

using namespace moe_fp8;

constexpr int kTokens = BLOCK_M, kRows = BLOCK_N, kWarpgroups = NUM_THREADS / 128;
#if BLOCK_M >= 64
using Fragments = mma::TokensOnM<kTokens, kRows>;
#else
using Fragments = mma::WeightsOnM<kTokens, kRows>;
#endif
constexpr int kUntouched = -1;

int element(int token, int weight) { return 1000 * token + weight; }

// A tile of `width` weight rows, of which `columns` exist, stores its tokens [begin, end).
void check(std::vector<host::Fiber>& fibers, int begin, int end, int width, int columns, bool accumulate) {
    constexpr int kStride = kRows + 8;
    std::vector<float> out(kTokens * kStride, kUntouched);
    int fragments[kWarpgroups] = {};
    host::run(0, fibers, [&] {
        const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const mma::Owned owned = Fragments::owned(warpgroup, end, width);
        if (owned.token >= end) return;
        // (Tiles of 64 weight rows and few tokens are one fragment, which belongs to both warpgroups.)
        if (kRows == 64 && kTokens <= 32 && warpgroup > 0) return;
        if (threadIdx.x % 128 == 0) fragments[warpgroup] = owned.fragments;
        for (int wave = 0; wave < owned.fragments; ++wave) {
            const int first_weight = owned.weight + wave * Fragments::kWaveRows;
            Fragments::Sum sum;
            for (int i = 0; i < Fragments::kColumns / 2; ++i) {
                // wgmma: element i of a thread lies in this row and column of a fragment.
                const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                const int token = owned.token + (Fragments::kWeightsAreM ? column : row);
                sum[i] = element(token, first_weight + (Fragments::kWeightsAreM ? row : column));
            }
            const Fragments::Region region(begin - owned.token, end - owned.token, 0, Fragments::kColumns / 8);
            Fragments::store(sum, &out[owned.token * kStride + first_weight], kStride, region, columns - first_weight, accumulate);
        }
    });
    const int least = *std::min_element(fragments, fragments + kWarpgroups);
    const int most = *std::max_element(fragments, fragments + kWarpgroups);
    bool right = most <= 1 || least > 0;  // none has two fragments while another has nothing to do
    for (int token = 0; token < kTokens; ++token) {
        for (int column = 0; column < kStride; ++column) {
            const bool stored = begin <= token && token < end && column < min(width, columns);
            const float expected = stored ? element(token, column) + (accumulate ? kUntouched : 0) : kUntouched;
            right &= out[token * kStride + column] == expected;
        }
    }
    if (right) return;
    std::printf("tokens [%d, %d), %d weight rows of which %d exist: fragments %d to %d\n", begin, end, width, columns, least, most);
    std::exit(1);
}

int main() {
    std::vector<host::Fiber> fibers = host::fibers();
    for (int width = kRows; width >= kRows / WIDTHS; width /= 2) {
        for (const int end : {1, 7, 8, 33, 64, 65, 100, 127, 128, 150, 192}) {
            if (end > kTokens) continue;
            check(fibers, 0, end, width, kRows, false);
            check(fibers, min(3, end - 1), end, width, width - 64 * (width > 64), true);
        }
    }
    return 0;
}
