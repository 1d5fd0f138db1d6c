// This file has the constants for which one GEMM kernel is specialized, the shared memory that follows from them, and the kernel's
// parameters.
#pragma once

#include "common/types.cuh"
#include "mma/fragments.cuh"
#include "mma/row_scaled.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "sched/ring.cuh"
#include "sched/tile_ring.cuh"
#include "sched/tile_walk.cuh"

namespace moe_fp8 {

#ifndef SILU_MUL
#define SILU_MUL 0
#endif
// Gate and up rows of the weights are interleaved, and SiLU(gate) * up is stored, quantized.
constexpr bool kSiluMul = SILU_MUL != 0;

#ifndef ROW_SCALES
#define ROW_SCALES 0
#endif
// Weights have a scale for each 1 x 128, as tokens have, and not for each 128 x 128.
constexpr bool kRowScales = ROW_SCALES != 0;

constexpr sched::Layout kLayout = static_cast<sched::Layout>(LAYOUT);
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kStages = NUM_STAGES;
constexpr int kCluster = CLUSTER_SIZE;
// A cluster takes a pair of tiles with an operand in common, or one tile whose sum its CTAs share along K.
constexpr bool kPaired = kCluster > 1 && !SPLIT_K;
constexpr bool kSplitK = kCluster > 1 && SPLIT_K;
constexpr int kClusterK = kSplitK ? kCluster : 1;
// `gemm_fp8` launches CTAs that take tiles of their own in twos, as neighbours (`TileWalk`), unless their tokens are few. The other
// kernels launch them alone.
template <int kTokens, int kCtas>
constexpr int kLaunchClusterOf = kCtas == 1 && kTokens >= 64 ? 2 : kCtas;
constexpr bool kNeighbours = !kSiluMul && !kRowScales && kLaunchClusterOf<kBlockM, kCluster> > kCluster;
static_assert(!kPaired || kCluster == 2, "a pair");
static_assert(!kRowScales || (!kSplitK && BLOCK_M == 128 && (BLOCK_N == 128 || BLOCK_N == 256)), "see RowScaled");
constexpr uint16_t kEveryone = (1 << kCluster) - 1;

#if ROW_SCALES
using Fragments = mma::RowScaled<kBlockM, kBlockN>;
#elif BLOCK_M >= 64
using Fragments = mma::TokensOnM<kBlockM, kBlockN, kSiluMul>;
#else
using Fragments = mma::WeightsOnM<kBlockM, kBlockN, kSiluMul>;
#endif
#if OUT_FP32
using Out = float;
#else
using Out = uint16_t;  // bf16
#endif
constexpr int kWaves = Fragments::kWaves;
// Math warps leave whole fp32 sums in shared memory, and warp 1 takes them to memory (`move_sums`).
constexpr bool kSumsByWarp = kRowScales && OUT_FP32 && kBlockN == 128;
constexpr int kScaleRows = mma::kScaleRows<kBlockN>;
constexpr int kWeightScales = kRowScales ? kBlockN : kBlockN / kScaleRows;  // scales of a tile's weights
constexpr int kWeightScalesRoom = kWeightScales == 3 ? 4 : kWeightScales;    // so that one load has them all

// A tile of more than 64 tokens has a math warpgroup for each 64 tokens. A tile of 64 tokens has one for each 64 weight rows, or one
// for 96, and a tile of fewer tokens has two.
constexpr int kMathWarpgroups = kBlockM > 64 ? kBlockM / 64 : kBlockM == 64 ? kBlockN / Fragments::kColumns : 2;
// Tiles of 64 weight rows and few tokens are one fragment: the warpgroups take alternate blocks of K.
constexpr bool kAlternate = kBlockN == 64 && kBlockM <= 32;
// A warpgroup tells a stage's laps by parity, so it must see all of them. If a stage's laps went to one warpgroup and then to the
// other, the stage could be taken for full a lap early when copies land out of order.
static_assert(!kAlternate || kStages % kMathWarpgroups == 0, "see heuristics/gemm/tiles.py");
static_assert(!kAlternate || (kLayout == sched::Layout::kDense && !kPaired), "a tile without rows would be passed by both");
// A tile's sum comes about in kParts parts. The columns of a fragment form groups of eight, which are dealt to the parts.
constexpr int kParts = kClusterK * (kAlternate ? kMathWarpgroups : 1);
constexpr int kColumnGroups = Fragments::kColumns / 8;
constexpr int kMostGroups = ceil_div(kColumnGroups, kParts);
static_assert(kParts == 1 || kWaves == 1, "one fragment");
static_assert(NUM_THREADS == kWarpgroup * (1 + kMathWarpgroups), "one producer warpgroup");
static_assert(kMathWarpgroups <= 2 || (kMathWarpgroups == 3 && kWaves == 1), "registers: see gemm_fp8.cuh");

// This says whether there are registers for two partial sums of a single fragment.
constexpr bool kTwoPartials = kWaves == 1 && kMathWarpgroups <= 2 && Fragments::kColumns <= 128;

// A tile of two fragments has registers for only one partial sum, so it begins before the tile before it is stored.
constexpr bool kOnePartial = kWaves == 2 && kBlockM >= 64;

// The widest tiles come in halves and quarters, too, unless a tile has the 128 outputs that share a scale.
template <int kWeightRows>
constexpr bool kPiecesOf = kWeightRows == 256;
constexpr bool kPieces = kPiecesOf<kBlockN> && !kSiluMul;
using Walk = sched::TileWalk<kLayout, kBlockM, kBlockN, kPaired, kClusterK, kPieces, kNeighbours>;
// Warp 0, warp 1 unless it rests, and the math warps read the tiles.
constexpr int kTileReaders = (kRowScales && !kSumsByWarp ? 1 : 2) + kMathWarpgroups * 4;
using Record = sched::RecordOf<sched::kKGrouped<kLayout>>;
using Tiles = sched::TileRing<kTileReaders, Record>;
using TileWriter = sched::TileWriter<kTileReaders, Record>;
using TileReader = sched::TileReader<kTileReaders, Record>;
using sched::Tile;

// A box is the rows that TMA copies at once.
template <int kWeightRows>
constexpr int kWeightBoxOf = kPiecesOf<kWeightRows> ? kWeightRows / 2 : kWeightRows;
constexpr int kTokenBox = sched::kTokenBoxOf<kBlockM>, kWeightBox = kWeightBoxOf<kBlockN>;

// Outputs of some tiles are staged for TMA, which stores kStoredTokens tokens at once.
constexpr bool kStaged = Fragments::kHasStaging && !OUT_FP32 && !kSiluMul;
constexpr int kStoredTokens = 16;
// (This is a template, as `store_staged` is, since fragments without staging do not have the constants that it names.)
template <typename Fragments>
DEVICE constexpr int staging_bytes() {
    if constexpr (kSiluMul) return kBlockM * kBlockK / kMathWarpgroups;  // FP8
    else if constexpr (kSumsByWarp) return mma::kSumRows * kBlockN * sizeof(float);
    else if constexpr (!Fragments::kHasStaging) return 1;  // an array must have an element
    else return Fragments::kBoxes * Fragments::kStagedBoxBytes;
}

// Whether several warps have outputs of the same token.
constexpr bool kAcrossWarps = kSiluMul && kBlockM < 64;

struct Shared {
    uint8_t weights[kStages][kBlockN * kBlockK];
    uint8_t tokens[kStages][kBlockM * kBlockK];
    uint8_t staging[kMathWarpgroups][staging_bytes<Fragments>()];
    alignas(128) float token_scales[kStages][align_up(kBlockM, 32)];
    // Each warpgroup gets here, from every other part of the sum, the groups that it owns: [part][column group][thread].
    alignas(16) float4 parts[kMathWarpgroups][kParts > 1 ? (kParts - 1) * kMostGroups * kWarpgroup : 1];
    alignas(kRowScales ? 128 : 16) float weight_scales[kStages][kWeightScalesRoom];
    Tiles tiles;
    ptx::Barrier parts_full[kMathWarpgroups];  // the others' parts have come
    // All warpgroups that get parts from this warpgroup have read them. These are the warpgroups of the same number in every CTA,
    // since any other may have no tokens, and so no parts. If warpgroups alternate, they are both warpgroups, which share the first
    // barrier.
    ptx::Barrier parts_free[kMathWarpgroups];
    ptx::Barrier full[kStages];
    ptx::Barrier empty[kStages];
    // For each warp, the greatest |SiLU(gate) * up| of each token among the warp's outputs (kAcrossWarps).
    float maxima[kAcrossWarps ? kMathWarpgroups * 4 : 1][kAcrossWarps ? kBlockM : 1];
    ptx::Barrier staging_free[kMathWarpgroups];  // a warpgroup's sum may come; what it is added to is there
    ptx::Barrier staging_full[kMathWarpgroups];  // a warpgroup's sum is there

    // One thread of each of `num_warps` warps makes some of the barriers. (If one thread makes them one after another, a barrier
    // takes about 30 cycles. Lanes of one warp take turns, and take longer.)
    DEVICE void init(int warp, int num_warps) {
        for (int stage = warp; stage < kStages; stage += num_warps) {
            // One arrival is of the weights' scales. The other is of the warp that announces the bytes of the operands, and some
            // bytes may have come by then. (The walking warp announces them the first time, while the producer copies tokens.)
            // (TMA brings scales of single rows, like the operands.)
            ptx::barrier_init(&full[stage], kRowScales ? 1 : 2);
            // All lanes of math warps arrive, since all have read scales, or in a pair a lane of each warp of both CTAs.
            ptx::barrier_init(&empty[stage], (kAlternate ? 1 : kMathWarpgroups) * (kPaired ? 4 * kCluster : kWarpgroup));
        }
        if (warp == num_warps - 1) tiles.init();
        if (kSumsByWarp && warp == num_warps - 3) {
            for (int warpgroup = 0; warpgroup < kMathWarpgroups; ++warpgroup) {
                ptx::barrier_init(&staging_free[warpgroup], 1);
                ptx::barrier_init(&staging_full[warpgroup], 4);
            }
        }
        if (warp == num_warps - 2) {
            for (int warpgroup = 0; warpgroup < kMathWarpgroups; ++warpgroup) {
                // Within a CTA every thread arrives; in a cluster parts are sent asynchronously, and a lane arrives for its warp.
                ptx::barrier_init(&parts_full[warpgroup], kCluster > 1 ? 1 : kWarpgroup);
                const int readers = kAlternate ? kMathWarpgroups : 1;
                ptx::barrier_init(&parts_free[warpgroup], readers * (kCluster > 1 ? 4 * kCluster : kWarpgroup));
            }
        }
    }
};
// Each kernel's module of heuristics/gemm/ (tiles.py, k_grouped.py, silu_mul.py) computes the same size from its own constants, with 1
// KiB for the small members.
static_assert(sizeof(Shared) <= SMEM_BYTES && SMEM_BYTES <= sizeof(Shared) + 1024, "see heuristics/gemm/");

}  // namespace moe_fp8

struct GemmParams {
    moe_fp8::TensorMap a;        // [rows, K] fp8, box kTokenBox rows x 128
    moe_fp8::TensorMap a_scale;  // [K/128 (x experts if masked), rows] fp32, box 1 x kBlockM
    // [experts * N, K] fp8, box kWeightBox rows x 128; if kRowScales [N/2, 2, K], box kWeightBox/2 x 1 x 128
    moe_fp8::TensorMap b;
    // [rows, N] bf16, box kStoredTokens rows x kBoxRows; or [experts, m, N] fp32, box 1 x 64 x 32, if kSumsByWarp; else unused
    moe_fp8::TensorMap out_map;
    void* out;                   // [rows, N]
    const float* b_scale;        // [experts, ceil(N/128), K/128]
    const int* index;            // m_indices, psum, offsets (of rows or of K) or masked_m; null if dense
    int64_t out_stride;          // elements between tokens
    int m;                       // rows of a, or of one expert's buffer if masked
    int n;
    int k;
    int num_experts;
    int constant_weights;        // no kernel that may still run writes `b`, `b_scale` or `index`
#if !SILU_MUL
    int accumulate;              // the product is added to what `out` holds, which is fp32 then
#endif
#if ROW_SCALES
    moe_fp8::TensorMap b_scale_map;  // [K/128, N] fp32, box 1 x kBlockN
#endif
#if SILU_MUL
    float limit;                 // of gate and up; infinite for none
    float* out_scale;            // MN-major, for each 128 of N/2
    int64_t out_scale_stride;    // elements between groups
#endif
};

namespace moe_fp8 {

DEVICE uint32_t cluster_rank() { return kCluster > 1 ? ptx::cluster_rank() : 0; }

// Returns a warp's own reader of the CTA's tiles.
DEVICE TileReader read_tiles(const GemmParams& p, Shared& shared, uint32_t rank) {
    return {shared.tiles, Walk::k_range(p.k / kBlockK, rank)};
}

using Ring = sched::RingCursor<kStages>;

}  // namespace moe_fp8
