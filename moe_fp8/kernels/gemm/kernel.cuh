// This file says what work each warp of a GEMM does; gemm_fp8.cuh has the terms and the map of warps, barriers and shared memory.
#pragma once

#include "gemm/accumulate.cuh"
#include "gemm/finish.cuh"
#include "gemm/produce.cuh"
#include "gemm/shape.cuh"
#include "gemm/silu_mul.cuh"
#include "gemm/sums.cuh"

namespace moe_fp8 {

// These are the registers of a thread of the copying warpgroup, and of a thread of the math warpgroups.
constexpr int kCopyRegisters = kMathWarpgroups <= 2 ? 40 : 32, kMathRegisters = kMathWarpgroups <= 2 ? 232 : 160;
static_assert(kWarpgroup * (kCopyRegisters + kMathWarpgroups * kMathRegisters) <= 65536, "the registers of an SM");

#if !SILU_MUL
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
        const Record* tile = reader.front();
        accumulator.finish(reader.tile(*tile).k_range.count(), owned, sum, partial, scales, [&](const Fragments::Sum& first) {
            store_fragment(p, shared, *tile, owned, 0, warpgroup, first);
        });
        const Record* next = reader.second();
        if (next == nullptr || Fragments::owned(warpgroup, next->end_row, next->width).fragments < kWaves) return;
        if (sched::kKGrouped<kLayout> && reader.tile(*next).k_range.count() == 0) return;
        // (If one store served this tile and the last tile, ptxas would make the store wait for the product.)
        accumulator.begin(owned, partial, scales);
        const Record copy = *tile;
        reader.pop(copy);
        store_fragment(p, shared, copy, owned, kWaves - 1, warpgroup, sum[kWaves - 1]);
        __syncwarp();  // `WeightsOnM::store` says why
    }
}

DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup, Meeting&& meeting) {
    meeting.join();
    TileReader reader = read_tiles(p, shared, cluster_rank());
    Accumulator accumulator(shared, warpgroup);
    uint32_t parts_phase = 0, staging_phase = 0;
    // A tile of one fragment is kept in registers. A tile of two fragments stays in its slot of the ring until it is stored.
    constexpr bool kKept = kWaves == 1;
    while (const Record* front = reader.front()) {
        const Tile seen = reader.tile(*front);
        if (kKept) reader.pop(seen);
        const mma::Owned owned = Fragments::owned(warpgroup, seen.end_row, seen.width);
        if (owned.token >= seen.end_row) {
            accumulator.skip(seen.k_range.count());
            if (!kKept) reader.pop(seen);
            continue;
        }
        Fragments::Sum sum[kWaves];
        if (sched::kKGrouped<kLayout> && seen.k_range.count() == 0) {
            accumulator.clear(sum);
            if (owned.fragments > 1) store_fragment(p, shared, *front, owned, 0, warpgroup, sum[0]);
        } else if (kOnePartial && owned.fragments == kWaves) {
            consume_whole(p, shared, warpgroup, accumulator, reader, sum);
        } else {
            accumulator.run(seen.k_range.count(), owned, sum);
        }
        if constexpr (kParts > 1) {
            add_parts(shared, sum[kWaves - 1], warpgroup, OwnGroups(cluster_rank(), warpgroup), parts_phase);
            parts_phase ^= 1;
        }
        if constexpr (kSumsByWarp) {
            leave_sum(p, shared, warpgroup, sum[0], staging_phase);
            continue;
        }
        const Record tile = kKept ? Record(seen) : *reader.front();
        if (!kKept) reader.pop(tile);
        store_fragment(p, shared, tile, owned, owned.fragments - 1, warpgroup, sum[kWaves - 1]);
    }
    if constexpr (kStaged) ptx::bulk_wait_read();
    // The last arrivals of the cluster's other CTAs must find this CTA's barriers, as in `produce`.
    if constexpr (kParts > 1) ptx::barrier_wait(parts_free(shared, warpgroup), parts_phase ^ 1);
}

#else
// Takes every tile through its sum to FP8. Every math warp calls it.
DEVICE void consume(const GemmParams& p, Shared& shared, int warpgroup, Meeting&& meeting) {
    meeting.join();
    TileReader reader = read_tiles(p, shared, cluster_rank());
    Accumulator accumulator(shared, warpgroup);
    while (const Record* front = reader.front()) {
        const mma::Owned owned = Fragments::whole(warpgroup);
        const int num_blocks = reader.tile(*front).k_range.count();
        if (owned.token >= front->end_row) {
            accumulator.skip(num_blocks);
            reader.pop(*front);
            continue;
        }
        Fragments::Sum sum[kWaves];
        if constexpr (!kOnePartial) {
            accumulator.run(num_blocks, owned, sum);
        } else {
            Fragments::Sum partial;
            Fragments::Scales scales;
            accumulator.begin(owned, partial, scales);
            const auto later = [](const Fragments::Sum&) {};  // both fragments are stored together
            accumulator.finish(num_blocks, owned, sum, partial, scales, later);
        }
        // The record stays in its slot of the ring until here, since sums take most registers.
        const Tile tile = reader.tile(*reader.front());
        reader.pop(tile);
        store_silu_mul(p, shared, tile, owned, warpgroup, sum);
    }
}
#endif

// This is the body of each GEMM kernel.
DEVICE void run(const GemmParams& p) {
    extern __shared__ __align__(1024) uint8_t dynamic[];  // without static shared memory it starts at such an address
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    if (ptx::shared_address(dynamic) % 1024 != 0) __trap();  // TMA and wgmma would swizzle differently

    const int warp = warp_index();
    if (ptx::elect_one()) {
        if (warp == 0) {
            ptx::prefetch_tensor_map(&p.b);
            ptx::prefetch_tensor_map(&p.a);
            ptx::prefetch_tensor_map(&p.a_scale);
#if ROW_SCALES
            ptx::prefetch_tensor_map(&p.b_scale_map);
#endif
            if constexpr (kStaged || kSumsByWarp) ptx::prefetch_tensor_map(&p.out_map);
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
        if constexpr (!kRowScales) {
            if (warp == 1) produce_scales(p, shared, Meeting());
        }
        if constexpr (kSumsByWarp) {
            if (warp == 1) move_sums(p, shared, Meeting());
        }
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

}  // namespace moe_fp8
