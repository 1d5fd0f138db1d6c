// Division of a GEMM into tiles. A persistent grid walks the tiles of all segments in one fixed order, so empty experts cost nothing.
#pragma once

#include "sched/divisor.cuh"
#include "sched/segments.cuh"

namespace moe_fp8::sched {

// The tokens of a box, which TMA copies at once. TMA copies only the boxes that hold tokens of the tile, since the last tile of an
// expert often has few tokens.
template <int kTokens>
constexpr int kTokenBoxOf = kTokens < 64 ? kTokens : 64;

// The two tiles of a pair have this operand in common, and the CTAs take turns to load it for both.
enum class Common { kNothing, kWeights, kTokens };

// One output tile: kBlockM tokens by kBlockN weight rows. The tile ring holds this part of a tile.
struct alignas(16) TileRecord {
    int expert;
    int row;        // first token, counted over all of `a`
    int begin_row;  // tokens of the tile to store, counted from `row`; none for the padding half of a pair
    int end_row;
    int scale_row;  // first token, counted within its scale matrix
    int n;          // first weight row
    int width;      // weight rows
    Common common;

    template <typename Visit>
    DEVICE void each(Visit& visit) const {
        visit(expert), visit(row), visit(begin_row), visit(end_row), visit(scale_row), visit(n), visit(width);
        visit(static_cast<int>(common));
    }
};

// Blocks [begin, end) of K.
struct KRange {
    int begin, end;
    DEVICE int count() const { return end - begin; }
};

// A tile as a warp holds it: the record, and the blocks of K that the warp's CTA sums.
struct Tile : TileRecord {
    KRange k_range;

    template <typename Visit>
    DEVICE void each(Visit& visit) const {
        TileRecord::each(visit), visit(k_range.begin), visit(k_range.end);
    }
};

// The type of a record in the tile ring. The record holds the range of K if the range differs from tile to tile.
template <bool kRanged>
using RecordOf = typename Choose<kRanged, Tile, TileRecord>::Type;

// Walks the tiles of one CTA. A unit is one tile, a pair of tiles for a cluster of two (kPaired), or one tile that kClusterK CTAs
// share along K. Within a segment units go in groups of kGroupN along N, so that CTAs that run together share tokens and weights in
// L2. The last group also takes the columns that are left over. If kPieces, a short last round is divided further. If it has no
// more units than half of the clusters, each cluster takes half of a unit, with half as many weight rows. If it has no more units
// than a quarter of the clusters, each cluster takes a quarter of a unit, with half as many tokens too.
//
// If kNeighbours, the CTAs 2i and 2i + 1 run on the same TPC, and its SMs take a line of L2 once if both ask for it. So a unit with an
// even number and the unit after it have tiles of the same weight rows. In a last row without a partner they have the same tokens.
template <Layout kLayout, int kBlockM, int kBlockN, bool kPaired, int kClusterK, bool kPieces, bool kNeighbours>
class TileWalk {
   public:
    // Whether tiles follow the runs of experts in `m_indices`.
    static constexpr bool kRuns = kLayout == Layout::kMIndices && (kPaired || kBlockM > kSegmentAlignment);
    // Whether units go along two rows of tiles at once. (Without runs, the next row of tiles may be of another expert.)
    static constexpr bool kTwoRows = kNeighbours && (kLayout != Layout::kMIndices || kRuns);
    static_assert(!kNeighbours || (!kPaired && kClusterK == 1), "a unit is a tile");

    // Returns the blocks of K that CTA `cluster_rank` sums of each tile that it takes; K has `num_k_blocks`. Unless experts have
    // ranges of their own, the range is the same for all tiles of the CTA. So the records do not hold it, and the readers of the
    // tiles get it from here (`TileReader`).
    static DEVICE KRange k_range(int num_k_blocks, uint32_t cluster_rank) {
        const int part = kClusterK > 1 ? static_cast<int>(cluster_rank) : 0;
        return {num_k_blocks * part / kClusterK, num_k_blocks * (part + 1) / kClusterK};
    }

    // This does not read the index, so it may come before the wait for the kernel that writes it.
    DEVICE TileWalk(const int* index, int num_experts, int m, int n, int num_k_blocks, uint32_t cluster_rank)
        : columns_(ceil_div(n, kBlockN)),
          last_group_(max(columns_ / kGroupN - 1, 0)),
          last_width_(columns_ - last_group_ * kGroupN),
          clusters_(static_cast<int>(gridDim.x) / kCtas),
          window_(index, num_experts, m, columns_),
          index_(index),
          num_experts_(num_experts),
          m_(m),
          rank_(kPaired ? static_cast<int>(cluster_rank) : 0),
          unit_(static_cast<int>(blockIdx.x) / kCtas),
          k_range_(k_range(num_k_blocks, cluster_rank)),
          units_(Division(m).units(columns_)),
          per_group_(Division(m).units(kGroupN)) {}

    // Reads the index. This call comes before `next`.
    DEVICE void start() {
        if constexpr (kGrouped) window_.start(), prepare_segment();
        if constexpr (kPieces) {
            const int units = kGrouped ? window_.total() : units_.value() * (kKGrouped<kLayout> ? num_experts_ : 1);
            const int clusters = clusters_.value(), last = units - clusters_.quotient(units) * clusters;
            if (2 * last <= clusters) first_piece_ = units - last;
            if (4 * last <= clusters) log_pieces_ = 2;
        }
    }

    // Returns false when the work is done. Whole warps call it.
    DEVICE bool next(Tile& tile) {
        while (true) {
            const bool in_pieces = kPieces && unit_ >= first_piece_;
            const int pieces = unit_ - first_piece_, unit = in_pieces ? first_piece_ + (pieces >> log_pieces_) : unit_;
            Segment segment = {0, 0, units_.value(), 0, m_};
            if constexpr (kKGrouped<kLayout>) {
                segment.expert = units_.quotient(unit), segment.first_unit = segment.expert * units_.value();
                if (segment.expert >= num_experts_) return false;
            } else if constexpr (kGrouped) {
                segment = window_.mine();
            } else {
                if (!segment.has(unit)) return false;
            }
            // Each lane goes on as if the unit were in its own segment, and the tiles of all lanes but the owner mean nothing. A CTA waits
            // for its first tile, so nothing here waits for another lane or for a division before it must.
            const int early = segment.first_row % kRowAlignment<kLayout>;
            const Division division(early + segment.num_rows);
            int local = segment.has(unit) ? unit - segment.first_unit : 0;
            // The neighbour of an odd first unit is of another segment, so that unit takes the segment's last tile.
            if (kTwoRows && segment.first_unit % 2 != 0) local = (local == 0 ? segment.num_units : local) - 1;
            const int group = min(per_group_.quotient(local), last_group_);
            const int in_group = local - group * per_group_.value();
            const Divisor width = group == last_group_ ? last_width_ : Divisor(kGroupN);
            const int rows_at_once = kTwoRows ? 2 : 1;
            int tile_m = width.quotient(in_group / rows_at_once), tile_n = in_group / rows_at_once - tile_m * width.value();
            tile_m *= rows_at_once;
            if (kTwoRows && tile_m + 1 < division.whole) {
                tile_m += in_group % 2;
            } else if (kTwoRows) {
                tile_n = in_group - tile_m * width.value();
            }
            tile.common = kPaired ? Common::kWeights : Common::kNothing;
            if (kPaired && tile_m >= division.whole) {
                tile_m = 2 * division.whole;
                tile_n = (in_group - division.whole * width.value()) * 2 + rank_;
                tile.common = Common::kTokens;
            } else if (kPaired) {
                tile_m = tile_m * 2 + rank_;
            }
            // Halves are the left and the right half of the weight rows. Quarters are the left and the right half of the upper
            // tokens, then of the lower tokens.
            const int piece = in_pieces ? pieces & ((1 << log_pieces_) - 1) : 0, right = piece % 2;
            const int height = in_pieces && log_pieces_ == 2 ? kBlockM / 2 : kBlockM, above = tile_m * kBlockM + piece / 2 * height;
            tile.k_range = kKGrouped<kLayout> ? range_of(segment.expert) : k_range_;
            tile.expert = segment.expert;
            tile.row = segment.first_row - early + above;
            tile.begin_row = above == 0 ? early : 0;
            tile.end_row = min(height, segment.num_rows + early - above);
            tile.width = in_pieces ? kBlockN / 2 : kBlockN;
            tile.n = (group * kGroupN + tile_n) * kBlockN + right * tile.width;
            // In `m_indices` only the last block of a run may end with padding, so only its tiles ask for the end of their rows.
            bool asks = above + kBlockM > segment.num_rows - kSegmentAlignment;
            if constexpr (kGrouped) {
                const uint32_t owner = __ballot_sync(kAll, segment.has(unit));
                if (owner == 0) {
                    if (!window_.advance()) return false;
                    prepare_segment();
                    continue;
                }
                asks = take_from_owner(__ffs(static_cast<int>(owner)) - 1, tile, asks);
            }
            unit_ += clusters_.value();
            tile.scale_row = kLayout == Layout::kMasked ? tile.row - tile.expert * m_ : tile.row;
            if constexpr (kLayout == Layout::kMIndices) {
                // (The two tiles of a pair must ask for the same rows, so a pair does not stop at the last row.)
                const int rows = kGrouped && !kPaired ? tile.end_row : height;
                if (kGrouped && 0 <= tile.expert && tile.expert < num_experts_) {
                    if (asks) expert_of(tile.row, rows, tile.end_row);
                } else if (!find_expert(tile, rows)) {
                    continue;
                }
            }
            if (kPieces && tile.end_row <= 0) {
                // This is the lower half of a tile of few tokens, and has no tokens. If the other half-tile of its pair has some,
                // it goes along.
                if (tile.common != Common::kWeights) continue;
                tile.end_row = 0;
            }
            if constexpr (kBlockM >= 64 && !kKGrouped<kLayout>) keep_inside(tile);
            return true;
        }
    }

   private:
    // In `m_indices` a tile of up to 128 rows lies within a block of 128 and can ask its rows for their expert. So only larger tiles and
    // pairs, whose tiles have their weights in common if they are of one expert, need segments. (Looking for segments delays a kernel's
    // first tile.)
    static constexpr bool kGrouped = kLayout == Layout::kMIndices ? kRuns : kLayout != Layout::kDense && !kKGrouped<kLayout>;
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kGroupN = 8;
    static constexpr int kTokenBox = kTokenBoxOf<kBlockM>;
    static constexpr int kCtas = kPaired ? 2 : kClusterK;
    static_assert(kLayout != Layout::kMIndices || !kPaired || kBlockM == kSegmentAlignment, "a pair's tiles ask for whole blocks");
    using Division = sched::Division<kBlockM, kPaired>;

    // Gets this lane's segment ready for `next`.
    DEVICE void prepare_segment() {
        const Segment segment = window_.mine();
        const int early = segment.first_row % kRowAlignment<kLayout>;
        per_group_ = Divisor(max(Division(early + segment.num_rows).units(kGroupN), 1));
    }

    // Replaces a lane's tile, and its answer to whether the tile asks for its rows, by those of lane `owner`. The answer is returned.
    DEVICE bool take_from_owner(int owner, Tile& tile, bool asks) const {
        tile.expert = __shfl_sync(kAll, tile.expert, owner);
        tile.row = __shfl_sync(kAll, tile.row, owner);
        tile.begin_row = kRowAlignment<kLayout> > 1 ? __shfl_sync(kAll, tile.begin_row, owner) : 0;
        tile.end_row = __shfl_sync(kAll, tile.end_row, owner);
        tile.n = __shfl_sync(kAll, tile.n, owner);
        if constexpr (kPaired) tile.common = static_cast<Common>(__shfl_sync(kAll, static_cast<int>(tile.common), owner));
        return kLayout == Layout::kMIndices && __shfl_sync(kAll, static_cast<int>(asks), owner);
    }

    // Returns the blocks of K of an expert, clamped to those that exist. Without an index, one expert has all of them. (A kernel of ragged
    // K always waits for the kernel before first, so plain loads are fresh.)
    DEVICE KRange range_of(int expert) const {
        if (index_ == nullptr) return k_range_;
        const int begin = min(max(index_[expert] / kBlockK, 0), k_range_.end);
        return {begin, max(min(index_[expert + 1] / kBlockK, k_range_.end), begin)};
    }

    // A tile's tokens are copied in boxes of kTokenBox. If the last box reaches beyond the tensor's last row, the tile begins earlier,
    // if there are rows before it, and these rows are left out of its store. (TMA takes 4 cycles and more for each row that does not
    // exist: 18.9 and not 14.7 us for m211 n4096 k6144 in tiles of 128 x 64.)
    DEVICE void keep_inside(Tile& tile) const {
        int beyond = align_up(tile.end_row, kTokenBox) - tile.end_row;
        if constexpr (kLayout != Layout::kDense) {
            const int rows = kLayout == Layout::kMasked ? num_experts_ * m_ : m_;
            beyond = tile.end_row > 0 ? beyond - (rows - tile.row - tile.end_row) : 0;
        }
        // (`kRowAlignment` says why scales begin at every fourth row. So up to three rows may lie beyond.)
        const int earlier = min(beyond, tile.scale_row) / 4 * 4;
        if (earlier <= 0) return;
        tile.row -= earlier, tile.scale_row -= earlier, tile.begin_row += earlier, tile.end_row += earlier;
    }

    // Returns the expert of the rows [row, row + height), or -1 if all of them are padding or if there is no such expert. The rows lie
    // within one segment, but padding may stand anywhere in it. `end_row` gets the end of the last row that is not padding.
    DEVICE int expert_of(int row, int height, int& end_row) const {
        int highest = -1;
        end_row = 0;
#pragma unroll
        for (int i = 0; i < kBlockM; i += kWarp) {
            const int mine = i + lane_index();
            const int expert = mine < height && row + mine < m_ ? ptx::load_fresh(&index_[row + mine]) : -1;
            const uint32_t valid = __ballot_sync(kAll, expert >= 0);
            if (valid != 0) end_row = i + kWarp - __clz(static_cast<int>(valid));
            highest = max(highest, expert);
        }
        highest = __reduce_max_sync(kAll, highest);
        return highest < num_experts_ ? highest : -1;
    }

    // Returns false if there is nothing to compute. The tiles of a pair come here only if their run does not know its expert. They may
    // differ in expert, and then they have nothing in common. A tile of padding goes along with the other tile.
    DEVICE bool find_expert(Tile& tile, int height) const {
        tile.expert = expert_of(tile.row, height, tile.end_row);
        if (tile.common == Common::kWeights) {
            int others_end;
            const int other = expert_of(tile.row + (rank_ == 0 ? kBlockM : -kBlockM), height, others_end);
            if (tile.expert < 0) {
                tile.expert = other, tile.end_row = 0;
            } else if (other >= 0 && other != tile.expert) {
                tile.common = Common::kNothing;
            }
        }
        return tile.expert >= 0;
    }

    int columns_, last_group_;
    Divisor last_width_, clusters_;
    SegmentWindow<kLayout, Division> window_;
    const int* index_;
    int num_experts_, m_, rank_, unit_;
    const KRange k_range_;
    Divisor units_;      // units of a dense GEMM, or of each expert if all have the same rows
    Divisor per_group_;  // units of a whole group of columns, in this lane's segment
    int first_piece_ = 1 << 30, log_pieces_ = 1;  // units from this number on are taken in 2 or 4 pieces
};

}  // namespace moe_fp8::sched
