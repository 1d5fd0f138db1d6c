// Division of a grouped GEMM into tiles. Every grouped layout is a list of segments (expert, first row, number of
// rows); a persistent grid walks the tiles of all segments in one fixed order, so empty experts cost nothing.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

enum class Layout { kDense = 0, kMIndices = 1, kPsum = 2, kOffsets = 3, kMasked = 4 };

// TMA reads scales from multiples of 16 bytes along a row, that is from every fourth token. A ragged segment's first tile
// therefore starts up to three rows early, and these are left out of its store.
template <Layout kLayout>
constexpr int kRowAlignment = kLayout == Layout::kOffsets ? 4 : 1;

// What the layouts' index tensor says of expert `e`. Clamped to the `m` rows that exist (masked: to the expert's
// buffer of `m` rows), so that a broken index never reads or writes out of bounds.
template <Layout kLayout>
DEVICE void read_segment(const int* index, int e, int m, int& first_row, int& num_rows) {
    if constexpr (kLayout == Layout::kMasked) {
        first_row = e * m;
        num_rows = min(max(index[e], 0), m);
    } else {
        const int begin = kLayout == Layout::kOffsets ? index[e] : e == 0 ? 0 : align_up(index[e - 1], kSegmentAlignment);
        const int end = kLayout == Layout::kOffsets ? index[e + 1] : index[e];
        first_row = min(max(begin, 0), m);
        num_rows = max(min(end, m), first_row) - first_row;
    }
}

// The segments of 32 experts, one a lane; whole warps only. Scheduling units (kUnitRows rows) are counted over all experts, so
// that a unit's number says whose it is.
template <Layout kLayout, int kUnitRows>
class SegmentWindow {
   public:
    struct Segment {
        int expert;
        int first_unit, num_units;
        int first_row, num_rows;
    };

    DEVICE SegmentWindow(const int* index, int num_experts, int m) : index_(index), num_experts_(num_experts), m_(m) {}

    // The segment that holds `unit`; calls ask for growing units. False when there are no more. `units_n` units along N
    // stand for each along M.
    DEVICE bool find(int unit, int units_n, Segment& segment) {
        int below = num_below(unit, units_n);
        while (below == kWarp) {
            if (base_ + kWarp >= num_experts_) return false;
            load(base_ + kWarp);
            below = num_below(unit, units_n);
        }
        const int before = __shfl_sync(kAll, last_unit_, max(below - 1, 0));
        segment.expert = base_ + below;
        segment.first_unit = below == 0 ? first_unit_ : before;
        segment.num_units = __shfl_sync(kAll, last_unit_, below) - segment.first_unit;
        segment.first_row = __shfl_sync(kAll, first_row_, below);
        segment.num_rows = __shfl_sync(kAll, num_rows_, below);
        return true;
    }

   private:
    static constexpr uint32_t kAll = 0xffffffffu;

    // Running totals do not fall, so lanes whose segment ends before `unit` come first.
    DEVICE int num_below(int unit, int units_n) const { return __popc(__ballot_sync(kAll, unit >= last_unit_ * units_n)); }

    DEVICE void load(int base) {
        base_ = base;
        first_unit_ = __shfl_sync(kAll, last_unit_, kWarp - 1);
        first_row_ = num_rows_ = 0;
        const int e = base + lane_index();
        if (e < num_experts_) read_segment<kLayout>(index_, e, m_, first_row_, num_rows_);
        int units = num_rows_ > 0 ? ceil_div(first_row_ % kRowAlignment<kLayout> + num_rows_, kUnitRows) : 0;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
            const int below = __shfl_up_sync(kAll, units, distance);
            if (lane_index() >= distance) units += below;
        }
        last_unit_ = first_unit_ + units;
    }

    const int* index_;
    int num_experts_, m_;
    int base_ = -kWarp;
    int first_unit_ = 0;  // total of the experts below the window
    int last_unit_ = 0;   // total up to and including this lane's expert
    int first_row_ = 0, num_rows_ = 0;
};

// One output tile: kBlockM tokens by kBlockN weight rows.
struct Tile {
    int expert;
    int row;        // first token, counted over all of `a`
    int begin_row;  // tokens of the tile to store; none for the padding half of an odd cluster
    int end_row;
    int scale_row;  // first token, counted within its scale matrix
    int n;          // first weight row
};

// Walks the tiles of one CTA. A unit is what a cluster takes at once: kClusterM x kClusterN tiles, or one tile that
// kClusterK CTAs share along K. Within a segment units go in groups of kGroupN along N, so that CTAs running together
// share tokens and weights in L2.
template <Layout kLayout, int kBlockM, int kBlockN, int kClusterM, int kClusterN, int kClusterK>
class TileWalk {
   public:
    DEVICE TileWalk(const int* index, int num_experts, int m, int n, uint32_t cluster_rank)
        : window_(index, num_experts, m),
          index_(index),
          num_experts_(num_experts),
          m_(m),
          n_(n),
          rank_(static_cast<int>(cluster_rank)),
          unit_(static_cast<int>(blockIdx.x) / kCtas) {}

    // False when the work is done. Called by whole warps.
    DEVICE bool next(Tile& tile) {
        const int units_n = ceil_div(n_, kBlockN * kClusterN);
        while (true) {
            int expert = 0, first_unit = 0, units_m = 0, first_row = 0, num_rows = m_;
            if constexpr (kGrouped) {
                typename Window::Segment segment;
                if (!window_.find(unit_, units_n, segment)) return false;
                expert = segment.expert, first_unit = segment.first_unit, units_m = segment.num_units;
                first_row = segment.first_row, num_rows = segment.num_rows;
            } else {
                units_m = ceil_div(m_, kBlockM * kClusterM);
                if (unit_ >= units_m * units_n) return false;
            }

            const int local = unit_ - first_unit * units_n;
            const int group = local / (units_m * kGroupN);
            const int in_group = local - group * units_m * kGroupN;
            const int width = min(kGroupN, units_n - group * kGroupN);
            const int unit_m = in_group / width;
            const int unit_n = group * kGroupN + in_group - unit_m * width;
            const int tile_m = unit_m * kClusterM + (kClusterM > 1 ? rank_ : 0);
            const int tile_n = unit_n * kClusterN + (kClusterN > 1 ? rank_ : 0);
            unit_ += static_cast<int>(gridDim.x) / kCtas;

            const int early = first_row % kRowAlignment<kLayout>;
            tile.expert = expert;
            tile.row = first_row - early + tile_m * kBlockM;
            tile.begin_row = tile_m == 0 ? early : 0;
            tile.end_row = min(kBlockM, num_rows + early - tile_m * kBlockM);
            tile.scale_row = kLayout == Layout::kMasked ? tile_m * kBlockM : tile.row;
            tile.n = tile_n * kBlockN;
            if constexpr (kLayout == Layout::kMIndices) {
                // A tile lies within one 128-row block, that is within one segment, but padding may stand anywhere in it.
                int highest = -1;
#pragma unroll
                for (int row = 0; row < kBlockM; row += kWarp) {
                    const int mine = row + lane_index();
                    if (mine < tile.end_row) highest = max(highest, index_[tile.row + mine]);
                }
                tile.expert = __reduce_max_sync(0xffffffffu, highest);
                if (tile.expert < 0 || tile.expert >= num_experts_) continue;
            }
            return true;
        }
    }

   private:
    static constexpr bool kGrouped = kLayout != Layout::kDense && kLayout != Layout::kMIndices;
    static constexpr int kGroupN = 8;
    static constexpr int kCtas = kClusterM * kClusterN * kClusterK;
    static_assert(kLayout != Layout::kMIndices || kClusterM == 1, "neighbouring tiles may differ in expert");
    static_assert(kSegmentAlignment % kBlockM == 0, "a tile must not cross a segment start");
    using Window = SegmentWindow<kLayout, kBlockM * kClusterM>;

    Window window_;
    const int* index_;
    int num_experts_, m_, n_, rank_, unit_;
};

}  // namespace moe_fp8::sched
