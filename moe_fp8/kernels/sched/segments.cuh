// The segments of a grouped GEMM: every grouped layout is a list of segments (expert, first row, number of rows).
#pragma once

#include "common/types.cuh"
#include "ptx/sync.cuh"

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
        num_rows = min(max(ptx::load_fresh(&index[e]), 0), m);
    } else {
        // (With kPsum the index has only ends. An expert begins at the first multiple of kSegmentAlignment from the end of the expert
        // before.)
        const int begin = kLayout == Layout::kOffsets ? ptx::load_fresh(&index[e])
                          : e == 0 ? 0 : align_up(ptx::load_fresh(&index[e - 1]), kSegmentAlignment);
        const int end = kLayout == Layout::kOffsets ? ptx::load_fresh(&index[e + 1]) : ptx::load_fresh(&index[e]);
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
    int expert;
    int first_unit;  // units of the segments before
    int num_units;
    int first_row;
    int num_rows;

    DEVICE bool has(int unit) const { return first_unit <= unit && unit < first_unit + num_units; }
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

    // Returns the number of units of all segments. This call comes before `find` and `advance`. Runs behind the first window count as
    // one run, since reading them would delay the first tile. The number of units is still exact if the number of columns is even.
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

    // Returns this lane's segment, which may have no units.
    DEVICE Segment mine() const {
        return {kRuns ? expert_ : base_ + lane_index(), last_unit_ - units_, units_, first_row_, num_rows_};
    }

    // Finds the segment that holds `unit`. Calls ask for growing units. Returns false when there are no more units.
    DEVICE bool find(int unit, Segment& segment) {
        uint32_t owner;
        while ((owner = __ballot_sync(kAll, mine().has(unit))) == 0) {
            if (!advance()) return false;
        }
        const int lane = __ffs(static_cast<int>(owner)) - 1;
        const Segment here = mine();
        segment = {__shfl_sync(kAll, here.expert, lane), __shfl_sync(kAll, here.first_unit, lane), __shfl_sync(kAll, here.num_units, lane),
                   __shfl_sync(kAll, here.first_row, lane), __shfl_sync(kAll, here.num_rows, lane)};
        return true;
    }

    // Goes on to the next window. Returns false if there is none.
    DEVICE bool advance() {
        if (base_ + kWarp >= (kRuns ? num_blocks() : num_experts_)) return false;
        load(base_ + kWarp);
        return true;
    }

   private:
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr bool kRuns = kLayout == Layout::kMIndices;
    static constexpr bool kAcrossBlocks = Division::kTileRows > kSegmentAlignment;
    static constexpr int kNone = -2;  // stands for a row that does not exist: neither an expert nor padding

    DEVICE int units_of(int expert, int& first_row, int& num_rows) const {
        read_segment<kLayout>(index_, expert, m_, first_row, num_rows);
        return num_rows > 0 ? Division(first_row % kRowAlignment<kLayout> + num_rows).units(columns_) : 0;
    }

    DEVICE int num_blocks() const { return ceil_div(m_, kSegmentAlignment); }

    // Reads the window that begins with the expert or block `base`.
    DEVICE void load(int base) {
        base_ = base;
        const int before = __shfl_sync(kAll, last_unit_, kWarp - 1);
        first_row_ = num_rows_ = 0;
        int units = 0;
        if constexpr (kRuns) {
            load_runs();
            if (num_rows_ > 0) units = Division(num_rows_).units(columns_);
        } else {
            const int e = base + lane_index();
            units = e < num_experts_ ? units_of(e, first_row_, num_rows_) : 0;
        }
        units_ = units;
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
        last_unit_ = before + units;
    }

    // Finds the runs of blocks of 128 rows in the window. The blocks of a run all have the same expert in their first row, or all begin
    // with padding. Padding behind a block's last row ends an expert's run, so only the last block of a run may end with padding. A block
    // that begins with padding may still have rows (`TileWalk::find_expert` asks them), so it is a run of its own if a tile may have rows
    // of two blocks. A window's first block begins a run, and the lane of a run's first block gets it.
    DEVICE void load_runs() {
        const int lane = lane_index(), in_window = min(num_blocks() - base_, kWarp), row = (base_ + lane) * kSegmentAlignment;
        int expert = kNone, row_before = kNone;
        if (lane < in_window) expert = ptx::load_fresh(&index_[row]);
        if (0 < lane && lane < in_window) row_before = ptx::load_fresh(&index_[row - 1]);
        const int above = __shfl_up_sync(kAll, expert, 1);
        const bool goes_on = lane > 0 && expert == above && (expert < 0 ? !kAcrossBlocks : expert == row_before);
        const uint32_t begins = __ballot_sync(kAll, lane < in_window && !goes_on), later = begins >> lane >> 1;
        const int end = later != 0 ? lane + __ffs(static_cast<int>(later)) : in_window;
        if (begins >> lane & 1) first_row_ = row, num_rows_ = min((end - lane) * kSegmentAlignment, m_ - row);
        expert_ = expert;
        if constexpr (kAcrossBlocks) leave_half_blocks();
    }

    // Leaves out the second half of a run's last block if it is padding and a tile would begin with it. After that, the run has as many
    // tiles as its rows up to the last row that is not padding. (The warp reads the halves of four runs at once.)
    DEVICE void leave_half_blocks() {
        constexpr int kHalf = kSegmentAlignment / 2, kAtOnce = 4, kRows = kHalf / kWarp;
        static_assert(Division::kTileRows % kHalf == 0, "a tile begins with a half of a block");
        const int half = max(num_rows_ - 1, 0) / kHalf * kHalf;
        uint32_t asking = __ballot_sync(kAll, half % kSegmentAlignment != 0 && half % Division::kTileRows == 0);
        while (asking != 0) {
            int lanes[kAtOnce], experts[kAtOnce][kRows];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i, asking &= asking - 1) {
                lanes[i] = __ffs(static_cast<int>(asking)) - 1;
                const int first = __shfl_sync(kAll, first_row_ + half, max(lanes[i], 0));
#pragma unroll
                for (int j = 0; j < kRows; ++j) {
                    const int row = first + j * kWarp + lane_index();
                    experts[i][j] = lanes[i] >= 0 && row < m_ ? ptx::load_fresh(&index_[row]) : -1;
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                bool padding = true;
#pragma unroll
                for (int j = 0; j < kRows; ++j) padding &= experts[i][j] < 0;
                if (__ballot_sync(kAll, !padding) == 0 && lane_index() == lanes[i]) num_rows_ = half;
            }
        }
    }

    const int* index_;
    int num_experts_, m_, columns_;
    int base_ = 0;        // the window's first expert, or block of 128 rows
    int last_unit_ = 0;   // total up to this lane's segment, with its own units
    int units_ = 0, first_row_ = 0, num_rows_ = 0;
    int expert_ = 0;  // only for runs: the expert of this lane's run, or below 0 if its blocks begin with padding
};

}  // namespace moe_fp8::sched
