// The segments of a grouped GEMM: every grouped layout is a list of segments (expert, first row, number of rows).
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

enum class Layout { kDense = 0, kMIndices = 1, kPsum = 2, kOffsets = 3, kMasked = 4, kKOffsets = 5 };

// In this layout all experts have the same rows, and each has a range of K of its own.
template <Layout kLayout>
constexpr bool kKGrouped = kLayout == Layout::kKOffsets;

// TMA reads scales from multiples of 16 bytes along a row, so from every fourth token. A ragged segment's first tile therefore
// starts up to three rows early, and these rows are left out of its store.
template <Layout kLayout>
constexpr int kRowAlignment = kLayout == Layout::kOffsets ? 4 : 1;

// Reads the segment of expert `e` from the layout's index tensor. The segment is clamped to the `m` rows that exist (masked: to the
// expert's buffer of `m` rows), so that a broken index never reads or writes out of bounds.
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

// A segment's tiles divide into scheduling units. A CTA takes a unit at once, or a cluster of two if kPaired. The two tiles of a
// pair lie above one another and have their weights in common. If the number of rows of tiles is odd, the last row is left over.
// Two of its tiles side by side make a pair that has its tokens in common.
template <int kBlockM, bool kPaired>
struct Division {
    static constexpr int kTileRows = kBlockM;

    int whole;   // rows of units
    int single;  // 1 if a row of single tiles follows

    DEVICE explicit Division(int num_rows) {
        const int tiles = ceil_div(num_rows, kBlockM);
        whole = kPaired ? tiles / 2 : tiles, single = kPaired ? tiles % 2 : 0;
    }
    // Returns the number of units in so many columns of tiles.
    DEVICE int units(int columns) const { return whole * columns + single * ceil_div(columns, 2); }
};

struct Segment {
    int expert = 0;
    int first_unit = 0;  // units of the segments before
    int first_row = 0;
    int num_rows = 0;
};

// A window has up to 32 segments, one in each lane: those of 32 experts, or the runs of 32 blocks of 128 rows in `m_indices`. Whole warps
// use it. Units are counted over all segments, so that a unit's number says to which segment the unit belongs.
template <Layout kLayout, typename Division>
class SegmentWindow {
   public:
    // There are `columns` columns of tiles along N.
    DEVICE SegmentWindow(const int* index, int num_experts, int m, int columns)
        : index_(index), num_experts_(num_experts), m_(m), columns_(columns) {}

    // Reads the first window. This call comes before all others.
    DEVICE void start() { load(0); }

    // Returns the number of units of all segments. This call comes before `find`. Runs behind the first window count as one, since
    // reading them would delay the first tile. The number of units is still exact if the number of columns is even.
    DEVICE int total() const {
        if constexpr (kRuns) {
            const int rest = max(m_ - kWarp * kSegmentAlignment, 0);
            return __shfl_sync(kAll, last_unit_, kWarp - 1) + Division(rest).units(columns_);
        }
        if (num_experts_ <= kWarp) return __shfl_sync(kAll, last_unit_, kWarp - 1);
        int units = 0;
#pragma unroll 4
        for (int e = lane_index(); e < num_experts_; e += kWarp) {
            int first_row, num_rows;
            units += units_of(e, first_row, num_rows);
        }
        return __reduce_add_sync(kAll, units);
    }

    // Finds the segment that holds `unit`. Calls ask for growing units. Returns false when there are no more units.
    DEVICE bool find(int unit, Segment& segment) {
        int below = num_below(unit);
        while (below == kWarp) {
            if (!more()) return false;
            load(base_ + kWarp);
            below = num_below(unit);
        }
        const int before = __shfl_sync(kAll, last_unit_, max(below - 1, 0));
        segment.expert = kRuns ? __shfl_sync(kAll, expert_, below) : base_ + below;
        segment.first_unit = below == 0 ? first_unit_ : before;
        segment.first_row = __shfl_sync(kAll, first_row_, below);
        segment.num_rows = __shfl_sync(kAll, num_rows_, below);
        return true;
    }

   private:
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr bool kRuns = kLayout == Layout::kMIndices;
    static constexpr bool kAcrossBlocks = Division::kTileRows > kSegmentAlignment;
    static constexpr int kNone = -2;  // stands for a row that does not exist: neither an expert nor padding

    // Running totals do not fall, so lanes whose segment ends before `unit` come first.
    DEVICE int num_below(int unit) const { return __popc(__ballot_sync(kAll, unit >= last_unit_)); }

    DEVICE int units_of(int expert, int& first_row, int& num_rows) const {
        read_segment<kLayout>(index_, expert, m_, first_row, num_rows);
        return num_rows > 0 ? Division(first_row % kRowAlignment<kLayout> + num_rows).units(columns_) : 0;
    }

    DEVICE int num_blocks() const { return ceil_div(m_, kSegmentAlignment); }

    // Whether segments come after the window.
    DEVICE bool more() const { return base_ + kWarp < (kRuns ? num_blocks() : num_experts_); }

    // Reads the window that begins with the expert or block `base`.
    DEVICE void load(int base) {
        base_ = base;
        first_unit_ = __shfl_sync(kAll, last_unit_, kWarp - 1);
        first_row_ = num_rows_ = 0;
        int units = 0;
        if constexpr (kRuns) {
            load_runs();
            if (num_rows_ > 0) units = Division(num_rows_).units(columns_);
        } else {
            const int e = base + lane_index();
            units = e < num_experts_ ? units_of(e, first_row_, num_rows_) : 0;
        }
        // The running total takes three steps that wait for shuffles, not five.
#pragma unroll
        for (int step = 1; step < kWarp; step *= 4) {
            const int mine = units;
#pragma unroll
            for (int distance = step; distance < min(4 * step, kWarp); distance += step) {
                const int theirs = __shfl_up_sync(kAll, mine, distance);
                if (lane_index() >= distance) units += theirs;
            }
        }
        last_unit_ = first_unit_ + units;
    }

    // Finds the runs of blocks of 128 rows in the window. The blocks of a run all have the same expert in their first row, or all begin
    // with padding. Padding behind a block's last row ends an expert's run, so only the last block of a run may end with padding. A block
    // that begins with padding may still have rows (`TileWalk::find_expert` asks them), so it is a run of its own if a tile may have rows
    // of two blocks. A window's first block begins a run, and the lane of a run's first block gets it.
    DEVICE void load_runs() {
        const int lane = lane_index(), in_window = min(num_blocks() - base_, kWarp), row = (base_ + lane) * kSegmentAlignment;
        int expert = kNone, row_before = kNone;
        if (lane < in_window) expert = index_[row];
        if (0 < lane && lane < in_window) row_before = index_[row - 1];
        const int above = __shfl_up_sync(kAll, expert, 1);
        const bool goes_on = lane > 0 && expert == above && (expert < 0 ? !kAcrossBlocks : expert == row_before);
        const uint32_t begins = __ballot_sync(kAll, lane < in_window && !goes_on), later = begins >> lane >> 1;
        const int end = later != 0 ? lane + __ffs(static_cast<int>(later)) : in_window;
        if (begins >> lane & 1) first_row_ = row, num_rows_ = min((end - lane) * kSegmentAlignment, m_ - row);
        expert_ = expert;
        if constexpr (kAcrossBlocks) leave_half_block();
    }

    // Leaves out the second half of a run's last block if it is padding and a tile would begin with it. After that, the run has as many
    // tiles as its rows up to the last row that is not padding.
    DEVICE void leave_half_block() {
        constexpr int kHalf = kSegmentAlignment / 2;
        static_assert(Division::kTileRows % kHalf == 0, "a tile begins with a half of a block");
        const int last_half = max(num_rows_ - 1, 0) / kHalf * kHalf;
        if (last_half % kSegmentAlignment == 0 || last_half % Division::kTileRows != 0) return;
        bool padding = true;
#pragma unroll
        for (int row = last_half; row < last_half + kHalf; ++row) padding &= row >= num_rows_ || index_[first_row_ + row] < 0;
        if (padding) num_rows_ = last_half;
    }

    const int* index_;
    int num_experts_, m_, columns_;
    int base_ = 0;        // the window's first expert, or block of 128 rows
    int first_unit_ = 0;  // total of the segments before the window
    int last_unit_ = 0;   // total up to this lane's segment, with its own units
    int first_row_ = 0, num_rows_ = 0;
    int expert_ = 0;  // only for runs: the expert of this lane's run, or below 0 if its blocks begin with padding
};

}  // namespace moe_fp8::sched
