// One warp walks the tiles, and the other warps read them here. So dividing tile numbers and reading index tensors stays off their
// paths.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "sched/release.cuh"
#include "sched/ring.cuh"
#include "sched/tile_walk.cuh"

namespace moe_fp8::sched {

// Tiles on their way from the walking warp to `kReaders` others. A record is a `TileRecord`, or a whole `Tile`.
template <int kReaders, typename Record>
struct TileRing {
    static constexpr int kSlots = 4;

    Record tiles[kSlots];
    ptx::Barrier full[kSlots];
    ptx::Barrier empty[kSlots];

    // One thread calls it.
    DEVICE void init() {
        for (int slot = 0; slot < kSlots; ++slot) {
            ptx::barrier_init(&full[slot], 1);
            ptx::barrier_init(&empty[slot], kReaders);
        }
    }
};

// This is the walking warp's end. The whole warp calls it.
template <int kReaders, typename Record>
class TileWriter {
   public:
    DEVICE explicit TileWriter(TileRing<kReaders, Record>& ring) : ring_(ring) {}

    // Hands a tile on. The cursor's slot is free then: it is free at the start, and `next_slot` comes between two pushes.
    DEVICE void push(const Record& tile) {
        if (lane_index() == 0) {
            ring_.tiles[cursor_.slot] = tile;
            ptx::barrier_arrive(&ring_.full[cursor_.slot]);
        }
        __syncwarp();
    }

    // Waits for the next slot. (It is no part of `push`, so that the first tile's copies come before it.)
    DEVICE void next_slot() {
        cursor_.step();
        ptx::barrier_wait(&ring_.empty[cursor_.slot], cursor_.phase ^ 1);
    }

    DEVICE void finish() {
        Record none;
        none.expert = -1;
        push(none);
    }

   private:
    TileRing<kReaders, Record>& ring_;
    RingCursor<TileRing<kReaders, Record>::kSlots> cursor_;
};

// This is a reading warp's end. The whole warp calls it.
template <int kReaders, typename Record>
class TileReader {
   public:
    // `k_range` is the range of K of every tile whose record does not hold it, from `TileWalk::k_range`.
    DEVICE TileReader(TileRing<kReaders, Record>& ring, KRange k_range) : ring_(ring), k_range_(k_range) {}

    // Returns the record of the tile that is next to be taken, or null when there are no more tiles.
    DEVICE const Record* front() { return at(cursor_); }

    // Returns the record of the tile behind it, or null.
    DEVICE const Record* second() { return at(cursor_.ahead(1)); }

    // Returns the tile whose record is in a slot.
    DEVICE Tile tile(const TileRecord& record) const { return {record, k_range_}; }
    DEVICE Tile tile(const Tile& record) const { return record; }

    // Hands back the slot of the tile at the front. `copy` is a copy of its record.
    DEVICE void pop(const Record& copy) {
        release(&ring_.empty[cursor_.slot], copy);
        cursor_.step();
    }

   private:
    using Cursor = RingCursor<TileRing<kReaders, Record>::kSlots>;

    DEVICE const Record* at(const Cursor& cursor) {
        ptx::barrier_wait(&ring_.full[cursor.slot], cursor.phase);
        const Record* tile = &ring_.tiles[cursor.slot];
        return tile->expert < 0 ? nullptr : tile;
    }

    TileRing<kReaders, Record>& ring_;
    const KRange k_range_;
    Cursor cursor_;
};

}  // namespace moe_fp8::sched
