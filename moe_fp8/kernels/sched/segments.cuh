// Division of a grouped GEMM into tiles. Every grouped layout is a list of segments (expert, first row, number of
// rows); a persistent grid walks the tiles of all segments in one fixed order, so empty experts cost nothing.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

enum class Layout { kDense = 0, kMIndices = 1, kPsum = 2, kOffsets = 3, kMasked = 4 };

// Segments of all experts. `last_unit[e]` is the running total of scheduling units along M up to and including e.
template <int kMaxExperts>
struct SegmentTable {
    int last_unit[kMaxExperts];
    int first_row[kMaxExperts];
    int num_rows[kMaxExperts];
};

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

// One warp fills the table; follow with a CTA barrier.
template <Layout kLayout, int kUnitRows, int kMaxExperts>
DEVICE void build_segment_table(SegmentTable<kMaxExperts>& table, const int* index, int num_experts, int m) {
    int total = 0;
    for (int base = 0; base < num_experts; base += kWarp) {
        const int e = base + lane_index();
        int first_row = 0, num_rows = 0;
        if (e < num_experts) read_segment<kLayout>(index, e, m, first_row, num_rows);
        int units = num_rows > 0 ? ceil_div(first_row % kRowAlignment<kLayout> + num_rows, kUnitRows) : 0;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, units, distance);
            if (lane_index() >= distance) units += below;
        }
        if (e < num_experts) {
            table.last_unit[e] = total + units;
            table.first_row[e] = first_row;
            table.num_rows[e] = num_rows;
        }
        total += __shfl_sync(0xffffffffu, units, kWarp - 1);
    }
}

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
template <Layout kLayout, int kBlockM, int kBlockN, int kClusterM, int kClusterN, int kClusterK, int kMaxExperts>
class TileWalk {
   public:
    DEVICE TileWalk(const SegmentTable<kMaxExperts>& table, const int* index, int num_experts, int m, int n,
                    uint32_t cluster_rank)
        : table_(table),
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
            int first_unit = 0, units_m = 0, first_row = 0, num_rows = m_;
            if constexpr (kUsesTable) {
                while (expert_ < num_experts_ && unit_ >= table_.last_unit[expert_] * units_n) ++expert_;
                if (expert_ == num_experts_) return false;
                first_unit = expert_ == 0 ? 0 : table_.last_unit[expert_ - 1];
                units_m = table_.last_unit[expert_] - first_unit;
                first_row = table_.first_row[expert_];
                num_rows = table_.num_rows[expert_];
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
            tile.expert = expert_;
            tile.row = first_row - early + tile_m * kBlockM;
            tile.begin_row = tile_m == 0 ? early : 0;
            tile.end_row = min(kBlockM, num_rows + early - tile_m * kBlockM);
            tile.scale_row = kLayout == Layout::kMasked ? tile_m * kBlockM : tile.row;
            tile.n = tile_n * kBlockN;
            if constexpr (kLayout == Layout::kMIndices) {
                // A tile lies within one 128-row block, that is within one segment, but padding may stand anywhere in it.
                int expert = -1;
#pragma unroll
                for (int row = 0; row < kBlockM; row += kWarp) {
                    const int mine = row + lane_index();
                    if (mine < tile.end_row) expert = max(expert, index_[tile.row + mine]);
                }
                tile.expert = __reduce_max_sync(0xffffffffu, expert);
                if (tile.expert < 0 || tile.expert >= num_experts_) continue;
            }
            return true;
        }
    }

   private:
    static constexpr bool kUsesTable = kLayout != Layout::kDense && kLayout != Layout::kMIndices;
    static constexpr int kGroupN = 8;
    static constexpr int kCtas = kClusterM * kClusterN * kClusterK;
    static_assert(kLayout != Layout::kMIndices || kClusterM == 1, "neighbouring tiles may differ in expert");
    static_assert(kSegmentAlignment % kBlockM == 0, "a tile must not cross a segment start");

    const SegmentTable<kMaxExperts>& table_;
    const int* index_;
    int num_experts_, m_, n_, rank_, unit_;
    int expert_ = 0;
};

}  // namespace moe_fp8::sched
