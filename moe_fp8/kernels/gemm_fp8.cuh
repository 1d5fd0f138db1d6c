// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// The grid is persistent. In each CTA one warp walks its tiles, one feeds a ring of stages by TMA (of the first stages the walking
// warp copies the weights), one adds the weights' scales, and one to three math warpgroups share every tile (mma/fragments.cuh
// says how).
//
// A cluster is either a pair of tiles with weights or tokens in common, which the CTAs take turns to load for both; or it
// shares one tile along K: each CTA sums a part of K, and the parts are added in the order of rank, so that results repeat
// bit for bit.
//
// Warps (kernel body at the end of this file):
//
//   0      copies tokens, their scales and, but for the first stages, weights (`produce`)
//   1      stores the weights' scales (`produce_scales`)
//   2      walks the tiles and copies the first stages' weights (`walk_tiles`)
//   3      rests
//   4 on   one to three math warpgroups (`consume`)
//
// Barriers; the phase is that of the ring's lap, or of the tile for parts:
//
//   full[stage]        2 arrivals: the warp that announces the copies' bytes, and warp 1. Math warps wait.
//   empty[stage]       4 arrivals, one a warp, of each math warpgroup that reads the stage; of a pair those of both CTAs. Warps 0, 1 wait.
//   tiles.full[slot]   1 arrival: warp 2. All others but warp 3 wait.
//   tiles.empty[slot]  1 arrival of each of these warps. Warp 2 waits.
//   parts_full         in a CTA every thread of the other warpgroup, in a cluster the bytes that the other CTAs store. Math warps wait.
//   parts_free         every thread, or in a cluster a lane of each warp, that has got parts from this warpgroup. It waits.
//
// Main loops of `Accumulator`: tiles of one fragment take `run_block_by_block` or, of three warpgroups and where a tile could have had
// two, `run_one_by_one`; of two fragments `run_side_by_side`, or `begin` and `finish` where there are registers for one partial sum.
//
// Who overwrites what, after which arrival, and why every read is done by then:
//
//   weights, tokens          TMA copies; `empty` of the stage. Only wgmma reads them, and a warp arrives after `wgmma_wait`.
//   token_scales             TMA copies; `empty` of the stage. The arrival takes the scales (`release_stage`).
//   weight_scales            warp 1's stores; the same.
//   tiles                    warp 2's stores; `empty` of the slot. The arrival takes a copy of the record (`TileReader::pop`); what was
//                            read of it before went into branches and into addresses of stores, which come before the arrival.
//   parts                    stores of other warpgroups and CTAs; `parts_free`. The arrival takes the totals (`add_parts`).
//   staging                  a warp's own stores of its next tile; `bulk_wait_read`, after which TMA has read. What the warp itself
//                            reads there it stores to memory, which needs the values, before it goes on.
//
// Specialised by: LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, SPLIT_K (of what kind the
// cluster is), OUT_FP32; M, N, K and the number of experts are run-time values.
#pragma once

#include "gemm/accumulate.cuh"
#include "gemm/finish.cuh"
#include "gemm/produce.cuh"
#include "gemm/shape.cuh"

namespace moe_fp8 {

// Registers of a thread, of the copying warpgroup and of the math warpgroups.
constexpr int kCopyRegisters = kMathWarpgroups <= 2 ? 40 : 32, kMathRegisters = kMathWarpgroups <= 2 ? 232 : 160;
static_assert(kWarpgroup * (kCopyRegisters + kMathWarpgroups * kMathRegisters) <= 65536, "the registers of an SM");

// The reader's tile and the whole ones that follow it, each begun before the last store of the one before. That of the last is
// left, and so is its tile.
DEVICE void consume_whole(const GemmParams& p, Shared& shared, int warpgroup, Accumulator& accumulator, TileReader& reader,
                          Fragments::Sum (&sum)[kWaves]) {
    // Known beforehand, it leaves ptxas enough uniform registers for the descriptors of four wgmma at once.
    const mma::Owned owned = Fragments::whole(warpgroup);
    Fragments::Sum partial;
    Fragments::Scales scales;
    accumulator.begin(owned, partial, scales);
    while (true) {
        const sched::TileRecord* tile = reader.front();
        accumulator.finish(reader.tile(*tile).k_range.count(), owned, sum, partial, scales, [&](const Fragments::Sum& first) {
            store_fragment<0>(p, shared, *tile, owned, 0, warpgroup, first);
        });
        const sched::TileRecord* next = reader.second();
        if (next == nullptr || Fragments::owned(warpgroup, next->end_row, next->width).fragments < kWaves) return;
        // (Were there one store for this and for the last tile, ptxas would have the product waited for.)
        accumulator.begin(owned, partial, scales);
        const sched::TileRecord copy = *tile;
        reader.pop(copy);
        store_fragment<kWaves - 1>(p, shared, copy, owned, kWaves - 1, warpgroup, sum[kWaves - 1]);
        __syncwarp();  // as in `WeightsOnM::store`
    }
}

DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup) {
    TileReader reader = read_tiles(p, shared, cluster_rank());
    Accumulator accumulator(shared, warpgroup);
    uint32_t parts_phase = 0;
    // A tile of one fragment is kept in registers, one of two in its slot of the ring till it is stored.
    constexpr bool kKept = kWaves == 1;
    while (const sched::TileRecord* front = reader.front()) {
        const Tile seen = reader.tile(*front);
        if (kKept) reader.pop(seen);
        const mma::Owned owned = Fragments::owned(warpgroup, seen.end_row, seen.width);
        if (owned.token >= seen.end_row) {
            accumulator.skip(seen.k_range.count());
            if (!kKept) reader.pop(seen);
            continue;
        }
        Fragments::Sum sum[kWaves];
        if (!kBothPartials && owned.fragments == kWaves) {
            consume_whole(p, shared, warpgroup, accumulator, reader, sum);
        } else {
            accumulator.run(seen.k_range.count(), owned, sum, [&](const Fragments::Sum& first) {
                store_fragment<0>(p, shared, *front, owned, 0, warpgroup, first);
            });
        }
        if constexpr (kParts > 1) {
            add_parts(shared, sum[kWaves - 1], warpgroup, OwnGroups(cluster_rank(), warpgroup), parts_phase);
            parts_phase ^= 1;
        }
        const sched::TileRecord tile = kKept ? seen : *reader.front();
        if (!kKept) reader.pop(tile);
        store_fragment<kWaves - 1>(p, shared, tile, owned, owned.fragments - 1, warpgroup, sum[kWaves - 1]);
    }
    if constexpr (kStaged) ptx::bulk_wait_read();
    // As for the stages: the last arrivals of the cluster's other CTAs.
    if constexpr (kParts > 1) ptx::barrier_wait(parts_free(shared, warpgroup), parts_phase ^ 1);
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    gemm_fp8(const __grid_constant__ GemmParams p) {
    using namespace moe_fp8;
    extern __shared__ __align__(1024) uint8_t dynamic[];  // with no static shared memory it starts at such an address
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    if (ptx::shared_address(dynamic) % 1024 != 0) __trap();  // TMA and wgmma would swizzle differently

    const int warp = warp_index();
    if (ptx::elect_one()) {
        if (warp == 0) {
            ptx::prefetch_tensor_map(&p.b);
            ptx::prefetch_tensor_map(&p.a);
            ptx::prefetch_tensor_map(&p.a_scale);
            if constexpr (kStaged) ptx::prefetch_tensor_map(&p.out_map);
        } else {
            shared.init(warp - 1, NUM_THREADS / kWarp - 1);
            ptx::fence_barrier_init();
        }
    }
    __syncthreads();
    // Before a CTA copies into the other's stages both must have their barriers. Parts of a sum come much later: `meet_parts`.
    if constexpr (kCluster > 1) ptx::cluster_arrive();
    if constexpr (kPaired) ptx::cluster_wait();

    if (warp < 4) {
        ptx::registers_release<kCopyRegisters>();
        if (warp == 0) produce(p, shared);
        if (warp == 1) produce_scales(p, shared);
        if (warp == 2) walk_tiles(p, shared);
        if (warp == 3) meet_parts();
    } else {
        ptx::registers_acquire<kMathRegisters>();
        meet_parts();
        consume(p, shared, warp / 4 - 1);
    }

    // A peer may still copy into this CTA's stages.
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
}
