// Block-scaled FP8 GEMM, dense and grouped: D[m,n] = sum_k A[m,k] * B[n,k], with a scale for each 1 x 128 of A and
// each 128 x 128 of B.
//
// The grid is persistent. In each CTA one warp walks the CTA's tiles, a second warp feeds a ring of stages by TMA, and a third warp
// adds the weights' scales. (The walking warp copies the weights of the first stages.) One to three math warpgroups share every
// tile; mma/fragments.cuh says how.
//
// A cluster is of one of two kinds. It may take a pair of tiles with weights or tokens in common, and its CTAs take turns to load
// these for both. Or it shares one tile along K: each CTA sums a part of K, and the parts are added in the order of rank, so that
// results repeat bit for bit.
//
// Warps (kernel body at the end of this file):
//
//   0      copies tokens, the tokens' scales and, except for the first stages, weights (`produce`)
//   1      stores the weights' scales (`produce_scales`)
//   2      walks the tiles and copies the first stages' weights (`walk_tiles`)
//   3      rests
//   4 on   one to three math warpgroups (`consume`)
//
// Barriers. The phase of a ring's barrier is the ring's lap; the phase of a barrier for parts is the tile:
//
//   full[stage]        2 arrivals: the warp that announces the copies' bytes, and warp 1. Math warps wait.
//   empty[stage]       4 arrivals, one for each warp, from each math warpgroup that reads the stage. In a pair, those of both CTAs
//                      arrive. Warps 0 and 1 wait.
//   tiles.full[slot]   1 arrival: warp 2. All other warps wait, except warp 3.
//   tiles.empty[slot]  1 arrival from each warp that waits for tiles.full. Warp 2 waits.
//   parts_full         In a CTA every thread of the other warpgroup arrives. In a cluster the barrier counts the bytes that the other
//                      CTAs store. Math warps wait.
//   parts_free         Every thread that has got parts from this warpgroup arrives, or in a cluster one lane of each such warp. This
//                      warpgroup waits.
//
// `Accumulator` has these main loops. Tiles of one fragment take `run_block_by_block`. But they take `run_one_by_one` if there are
// three math warpgroups, or if the kernel's tiles can have two fragments. Tiles of two fragments take `run_side_by_side`, or `begin`
// and `finish` if there are registers for only one partial sum.
//
// The map of shared memory says who overwrites each buffer, after which arrival, and why every read is done by then:
//
//   weights, tokens          TMA copies overwrite them after `empty` of the stage. Only wgmma reads them, and a warp arrives after
//                            `wgmma_wait`.
//   token_scales             TMA copies overwrite them after `empty` of the stage. The arrival takes the scales (`release_stage`).
//   weight_scales            Warp 1 overwrites them after `empty` of the stage. The arrival takes the scales (`release_stage`).
//   tiles                    Warp 2 overwrites them after `empty` of the slot. The arrival takes a copy of the record
//                            (`TileReader::pop`). All values that were read of the record before went into branches and into
//                            addresses of stores, and these come before the arrival.
//   parts                    Other warpgroups and CTAs overwrite them after `parts_free`. The arrival takes the totals (`add_parts`).
//   staging                  A warp overwrites its own part with its next tile, after `bulk_wait_read`, when TMA has read it. If the
//                            warp itself reads there, it stores the values to memory before it goes on, and the stores need them.
//
// The kernel is specialised by LAYOUT, BLOCK_M (tokens), BLOCK_N (weight rows), NUM_STAGES, CLUSTER_SIZE, SPLIT_K (the kind of
// cluster) and OUT_FP32. M, N, K and the number of experts are run-time values.
#pragma once

#include "gemm/accumulate.cuh"
#include "gemm/finish.cuh"
#include "gemm/produce.cuh"
#include "gemm/shape.cuh"

namespace moe_fp8 {

// A thread of the copying warpgroup and a thread of the math warpgroups have so many registers.
constexpr int kCopyRegisters = kMathWarpgroups <= 2 ? 40 : 32, kMathRegisters = kMathWarpgroups <= 2 ? 232 : 160;
static_assert(kWarpgroup * (kCopyRegisters + kMathWarpgroups * kMathRegisters) <= 65536, "the registers of an SM");

// Consumes the reader's tile and the whole tiles that follow it. Each tile is begun before the last store of the tile before. The
// caller makes the last store of the last tile, and pops that tile.
DEVICE void consume_whole(const GemmParams& p, Shared& shared, int warpgroup, Accumulator& accumulator, TileReader& reader,
                          Fragments::Sum (&sum)[kWaves]) {
    // Since `owned` is known beforehand, ptxas has enough uniform registers left for the descriptors of four wgmma at once.
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
        // (If one store served this tile and the last tile, ptxas would make the store wait for the product.)
        accumulator.begin(owned, partial, scales);
        const sched::TileRecord copy = *tile;
        reader.pop(copy);
        store_fragment<kWaves - 1>(p, shared, copy, owned, kWaves - 1, warpgroup, sum[kWaves - 1]);
        __syncwarp();  // `WeightsOnM::store` says why
    }
}

DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup, Meeting&& meeting) {
    meeting.join();
    TileReader reader = read_tiles(p, shared, cluster_rank());
    Accumulator accumulator(shared, warpgroup);
    uint32_t parts_phase = 0;
    // A tile of one fragment is kept in registers. A tile of two fragments stays in its slot of the ring until it is stored.
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
    // The last arrivals of the cluster's other CTAs must find this CTA's barriers, as in `produce`.
    if constexpr (kParts > 1) ptx::barrier_wait(parts_free(shared, warpgroup), parts_phase ^ 1);
}

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) __cluster_dims__(CLUSTER_SIZE, 1, 1)
    gemm_fp8(const __grid_constant__ GemmParams p) {
    using namespace moe_fp8;
    extern __shared__ __align__(1024) uint8_t dynamic[];  // without static shared memory it starts at such an address
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
    // Before a CTA copies into the other's stages, both CTAs must have their barriers. Parts of a sum come much later, so for parts
    // `Meeting` waits.
    if constexpr (kCluster > 1) ptx::cluster_arrive();
    if constexpr (kPaired) ptx::cluster_wait();

    if (warp < 4) {
        ptx::registers_release<kCopyRegisters>();
        if (warp == 0) produce(p, shared, Meeting());
        if (warp == 1) produce_scales(p, shared, Meeting());
        if (warp == 2) walk_tiles(p, shared, Meeting());
        if (warp == 3) Meeting();
    } else {
        ptx::registers_acquire<kMathRegisters>();
        consume(p, shared, warp / 4 - 1, Meeting());
    }

    // A peer may still copy into this CTA's stages.
    if constexpr (kCluster > 1) {
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
}
