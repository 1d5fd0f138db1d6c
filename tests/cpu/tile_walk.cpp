// The walk over tiles (kernels/sched/tile_walk.cuh) on the host (cta_host.h). For random segments it checks that the tiles of all CTAs
// store every valid row of every column once, under the right expert and with its range of K, that boxes of tokens lie within the
// tensor, and that the two tiles of a pair agree on what they have in common. Prints what is wrong; the exit code is 1 then.
#include "host.h"

#include "sched/tile_walk.cuh"

using namespace moe_fp8::sched;

struct Case {
    std::vector<int> index;
    std::vector<int> owner;  // expert of each row of the output, -1 for padding
    int num_experts, m, n, ctas, num_k_blocks = 1;
    bool sound = true;  // if not, the index breaks the rules, and only bounds and pairs are checked

    // The blocks of K of an expert.
    template <Layout kLayout>
    KRange k_range(int expert) const {
        if (!kKGrouped<kLayout> || index.empty()) return {0, num_k_blocks};
        const int begin = std::clamp(index[expert] / 128, 0, num_k_blocks);
        return {begin, std::clamp(index[expert + 1] / 128, begin, num_k_blocks)};
    }
};

// The pairs of 128-row tiles whose weights are the same: those of each run of blocks of one expert. Padding may end a run. So does every
// 32nd block, because the walk reads so many at once.
int pairs_in_runs(const std::vector<int>& owner) {
    int pairs = 0, run = 0;
    for (size_t block = 0; block * 128 < owner.size(); ++block) {
        const bool goes_on = block % 32 > 0 && owner[block * 128] >= 0 && owner[block * 128] == owner[block * 128 - 1];
        run = owner[block * 128] < 0 ? 0 : goes_on ? run + 1 : 1;
        pairs += run > 0 && run % 2 == 0;
    }
    return pairs;
}

bool equal(KRange left, KRange right) { return left.begin == right.begin && left.end == right.end; }

// Whether neighbours take tiles of the same weight rows, as far as experts have two rows of tiles.
template <int kBlockN>
bool neighbours_share(const std::vector<std::vector<Tile>>& walks, const Case& c) {
    std::vector<int> rows(c.num_experts);
    int shared = 0, most = 0;
    for (size_t cta = 0; cta < walks.size(); ++cta) {
        for (size_t i = 0; i < walks[cta].size(); ++i) {
            const Tile& tile = walks[cta][i];
            rows[tile.expert] += tile.n == 0;
            if (cta % 2 == 1) continue;
            const bool alone = i >= walks[cta + 1].size();
            shared += !alone && walks[cta + 1][i].expert == tile.expert && walks[cta + 1][i].n == tile.n;
        }
    }
    const int columns = (c.n + kBlockN - 1) / kBlockN;
    int units = 0;
    for (const int count : rows) {
        // After an odd number of units, the first and the last tile of an expert have other neighbours.
        most += count / 2 * columns - (units % 2 == 1 && count % 2 == 0 && count > 0);
        units += count * columns;
    }
    return shared == most;
}

std::vector<host::Fiber> lanes = host::fibers();

// Whether the cases had each kind of tile in pieces, and tiles that begin before their rows.
struct Seen {
    bool halves = false, lower_quarters[2] = {}, companions = false, earlier = false;
} seen;

template <Layout kLayout, int kBlockM, int kBlockN, bool kPaired, bool kDivided = false, bool kNeighbours = false>
bool holds(const Case& c) {
    std::vector<std::vector<Tile>> walks(c.ctas);
    gridDim.x = c.ctas;
    for (int cta = 0; cta < c.ctas; ++cta) {
        host::run(cta, lanes, [&] {
            TileWalk<kLayout, kBlockM, kBlockN, kPaired, 1, kDivided, kNeighbours> walk(
                c.index.data(), c.num_experts, c.m, c.n, c.num_k_blocks, kPaired ? cta % 2 : 0);
            walk.start();
            Tile tile;
            while (walk.next(tile)) {
                if (threadIdx.x == 0) walks[cta].push_back(tile);
            }
        });
    }
    auto wrong = [&](const char* what, int row, int column) {
        std::printf("layout %d, %d x %d%s, n %d, %d CTAs: %s at row %d, column %d\n", static_cast<int>(kLayout), kBlockM,
                    kBlockN, kPaired ? " in pairs" : "", c.n, c.ctas, what, row, column);
        return false;
    };
    const int blocks_of_n = (c.n + 31) / 32;  // columns are counted in blocks of 32
    std::vector<char> stored(c.owner.size() * blocks_of_n);
    for (const auto& walk : walks) {
        for (const Tile& tile : walk) {
            if (tile.width < kBlockN) {
                seen.halves |= tile.end_row > kBlockM / 2;
                constexpr bool kAligned = kLayout != Layout::kOffsets && kLayout != Layout::kMasked;
                seen.lower_quarters[kPaired] |= kAligned && tile.row % kBlockM != 0;
                seen.companions |= tile.end_row == 0;
            }
            if (kBlockM >= 64 && !kKGrouped<kLayout> && tile.end_row > 0) {
                // Scales begin at every fourth row, so up to three rows of a box may lie beyond.
                const int rows = kLayout == Layout::kMasked ? c.num_experts * c.m : c.m;
                const int end = tile.row + (tile.end_row + 63) / 64 * 64;
                if (tile.scale_row < 0 || tile.scale_row % 4 != 0) return wrong("scales of no row", tile.row, tile.n);
                if (end > rows + 3 && tile.scale_row > 3) return wrong("a box beyond the rows", tile.row, tile.n);
                const int before = kLayout == Layout::kMasked ? tile.expert * c.m : 0;
                if (tile.row - tile.scale_row != before) return wrong("scales of other rows", tile.row, tile.n);
                seen.earlier |= tile.begin_row > 3;
            }
            if (tile.expert < 0 || tile.expert >= c.num_experts) return wrong("no expert", tile.row, tile.n);
            if (!equal(tile.k_range, c.k_range<kLayout>(tile.expert))) return wrong("another range of K", tile.row, tile.n);
            const int first_row = (kKGrouped<kLayout> ? tile.expert * c.m : 0) + tile.row;
            for (int row = first_row + tile.begin_row; row < first_row + tile.end_row && tile.n < c.n; ++row) {
                if (row >= static_cast<int>(c.owner.size())) return wrong("a store beyond the rows", row, tile.n);
                if (!c.sound) continue;
                // In `m_indices` what is stored to padding has no meaning if rows follow it within the same 128.
                if (kLayout == Layout::kMIndices && c.owner[row] < 0) {
                    const auto after = c.owner.begin() + row, end = c.owner.begin() + std::min(row / 128 * 128 + 128, c.m);
                    if (std::find(after, end, tile.expert) != end) continue;
                }
                if (c.owner[row] != tile.expert) return wrong("another expert", row, tile.n);
                for (int column = tile.n; column < min(tile.n + tile.width, c.n); column += 32) {
                    if (++stored[row * blocks_of_n + column / 32] > 1) return wrong("a second store", row, column);
                }
            }
        }
    }
    for (int row = 0; row < static_cast<int>(c.owner.size()); ++row) {
        for (int column = 0; column < c.n && c.owner[row] >= 0 && c.sound; column += 32) {
            if (!stored[row * blocks_of_n + column / 32]) return wrong("no store", row, column);
        }
    }
    int pairs = 0;
    bool whole = true;
    for (int cta = 0; kPaired && cta < c.ctas; cta += 2) {
        for (const Tile& tile : walks[cta]) {
            pairs += tile.n == 0 && tile.common == Common::kWeights;
            whole &= tile.width == kBlockN;
        }
        if (walks[cta].size() != walks[cta + 1].size()) return wrong("a pair out of step", cta, 0);
        for (size_t i = 0; i < walks[cta].size(); ++i) {
            const Tile &left = walks[cta][i], &right = walks[cta + 1][i];
            const bool weights = left.expert == right.expert && left.n == right.n && left.width == right.width;
            const bool tokens = left.expert == right.expert && left.row == right.row &&
                                left.scale_row == right.scale_row && left.end_row == right.end_row &&
                                left.width == right.width;
            if (left.common != right.common || (left.common == Common::kWeights && !weights) ||
                (left.common == Common::kTokens && !tokens)) {
                return wrong("nothing in common", left.row, left.n);
            }
            if (!equal(left.k_range, right.k_range)) return wrong("two ranges of K", left.row, left.n);
        }
    }
    // In `m_indices` only tiles that follow runs go along two rows. The rows of a single expert are one run.
    const bool one_run = kBlockM > 128 && c.m <= 32 * 128 && std::count(c.owner.begin(), c.owner.end(), 0) == c.m;
    const bool two_rows = kLayout == Layout::kMIndices ? one_run : !kKGrouped<kLayout>;
    if (kNeighbours && two_rows && !neighbours_share<kBlockN>(walks, c)) {
        return wrong("neighbours that share nothing", 0, 0);
    }
    if (kPaired && kLayout == Layout::kMIndices && c.sound && whole && pairs < pairs_in_runs(c.owner)) {
        return wrong("pairs that share nothing", 0, 0);
    }
    return true;
}

template <Layout kLayout>
bool all_hold(const Case& c, bool only_divided) {
    if (!holds<kLayout, 128, 256, false, true>(c) || !holds<kLayout, 128, 256, true, true>(c)) return false;
    if (only_divided) return true;
    if (!holds<kLayout, 192, 128, false>(c)) return false;
    if (!holds<kLayout, 64, 64, false, false, true>(c) || !holds<kLayout, 128, 192, false, false, true>(c)) return false;
    if (!holds<kLayout, 192, 128, false, false, true>(c) || !holds<kLayout, 192, 96, false, false, true>(c)) return false;
    if (!holds<kLayout, 64, 96, false, false, true>(c) || !holds<kLayout, 128, 64, false, false, true>(c)) return false;
    if (!holds<kLayout, 128, 96, false, false, true>(c) || !holds<kLayout, 128, 128, false, false, true>(c)) return false;
    if (!holds<kLayout, 32, 128, false>(c)) return false;
    return holds<kLayout, 8, 128, false>(c) && holds<kLayout, 16, 128, false>(c) && holds<kLayout, 64, 64, false>(c) &&
           holds<kLayout, 128, 128, false>(c) && holds<kLayout, 128, 128, true>(c) && holds<kLayout, 128, 192, true>(c);
}

// Every expert has the rows [0, m) of its own output, and its count is one of blocks of K. If not `sound`, offsets break the rules.
bool ragged_k_holds(const std::vector<int>& counts, int m, int n, int ctas, bool only_divided, bool sound) {
    const int num_experts = static_cast<int>(counts.size());
    std::vector<int> offsets{0}, owner;
    for (int expert = 0; expert < num_experts; ++expert) {
        offsets.push_back(offsets.back() + 128 * counts[expert]);
        owner.insert(owner.end(), m, expert);
    }
    const int num_k_blocks = offsets.back() / 128;
    // Without an index, one expert has all of K.
    if (num_experts == 1 && !all_hold<Layout::kKOffsets>({{}, owner, 1, m, n, ctas, num_k_blocks}, only_divided)) return false;
    if (!sound) std::reverse(offsets.begin(), offsets.end() - 1), offsets.front() = -128, offsets.back() += 1000;
    return all_hold<Layout::kKOffsets>({offsets, owner, num_experts, m, n, ctas, num_k_blocks}, only_divided);
}

bool all_layouts_hold(const std::vector<int>& counts, int n, int ctas, int padding, int spare, bool only_divided = false) {
    const int num_experts = static_cast<int>(counts.size());
    std::vector<int> psum, m_indices, aligned, offsets{0}, ragged;
    for (int expert = 0; expert < num_experts; ++expert) {
        const int count = counts[expert], start = static_cast<int>(aligned.size());
        psum.push_back(start + count);
        for (int row = 0; row < (count + 127) / 128 * 128; ++row) {
            aligned.push_back(row < count ? expert : -1);
            // Padding lies between an expert's rows, too.
            const bool between = (row == count / 2 && count > 3) || (count > 300 && row % 128 >= 125);
            m_indices.push_back(row < count && !between ? expert : -1);
        }
        ragged.insert(ragged.end(), count, expert);
        offsets.push_back(static_cast<int>(ragged.size()));
    }
    aligned.insert(aligned.end(), padding, -1);
    m_indices.insert(m_indices.end(), padding, -1);
    const int m_max = *std::max_element(counts.begin(), counts.end()) + spare;
    std::vector<int> buffers(num_experts * m_max, -1);
    for (int expert = 0; expert < num_experts; ++expert) {
        std::fill_n(buffers.begin() + expert * m_max, counts[expert], expert);
    }
    const int m = static_cast<int>(aligned.size()), rows = static_cast<int>(ragged.size());
    return all_hold<Layout::kPsum>({psum, aligned, num_experts, m, n, ctas}, only_divided) &&
           all_hold<Layout::kMIndices>({m_indices, m_indices, num_experts, m, n, ctas}, only_divided) &&
           all_hold<Layout::kMasked>({counts, buffers, num_experts, m_max, n, ctas}, only_divided) &&
           all_hold<Layout::kOffsets>({offsets, ragged, num_experts, rows, n, ctas}, only_divided) &&
           all_hold<Layout::kDense>({{0}, std::vector<int>(rows, 0), 1, rows, n, ctas}, only_divided) &&
           ragged_k_holds(counts, m_max, n, ctas, only_divided, true) && ragged_k_holds(counts, m_max, n, ctas, only_divided, false);
}

// `m_indices` in the tiles that follow runs: blocks of 128 rows, each of the expert that `blocks` names (-1 for padding), without the
// last `short_by` rows. If not `sound`, some rows have experts that do not exist.
bool runs_hold(const std::vector<int>& blocks, int num_experts, int n, int ctas, int short_by, bool sound, std::mt19937& random) {
    std::vector<int> owner;
    for (size_t block = 0; block < blocks.size(); ++block) {
        const bool last = block + 1 == blocks.size() || blocks[block + 1] != blocks[block];
        const int rows = last || random() % 8 == 0 ? 1 + random() % 128 : 128;
        for (int row = 0; row < 128; ++row) owner.push_back(row < rows ? blocks[block] : -1);
    }
    owner.resize(owner.size() - short_by);
    std::vector<int> index = owner;
    for (int i = 0; i < 40 && !sound; ++i) {
        const int kinds[] = {num_experts, 1 << 30, -2, -(1 << 30)}, at = random() % index.size();
        index[i % 2 ? at : at / 128 * 128] = kinds[random() % 4];
    }
    const int m = static_cast<int>(index.size());
    const Case found{index, owner, num_experts, m, n, ctas, 1, sound};
    return holds<Layout::kMIndices, 128, 256, true, true>(found) && holds<Layout::kMIndices, 128, 192, true>(found) &&
           holds<Layout::kMIndices, 192, 128, false>(found) && holds<Layout::kMIndices, 192, 128, false, false, true>(found);
}

// Rows [0, m), each of the expert that the function `owner_of` returns (-1 for padding), in the tiles that follow runs.
template <typename OwnerOf>
bool rows_hold(int m, int num_experts, int n, int ctas, OwnerOf owner_of) {
    std::vector<int> owner(m);
    for (int row = 0; row < m; ++row) owner[row] = owner_of(row);
    const Case found{owner, owner, num_experts, m, n, ctas};
    return holds<Layout::kMIndices, 128, 256, true, true>(found) && holds<Layout::kMIndices, 128, 192, true>(found) &&
           holds<Layout::kMIndices, 192, 128, false>(found) && holds<Layout::kMIndices, 192, 128, false, false, true>(found);
}

// Both blocks of a pair begin with padding, and the second is short. The two tiles must still agree on what they have in common.
bool short_pairs_hold() {
    for (const int ctas : {2, 4, 8, 40}) {
        const auto but_first = [](int row) { return row % 128 == 0 ? -1 : 0; };
        const auto lower_half = [](int row) { return 72 <= row && row < 128 ? 0 : -1; };
        const auto two_experts = [](int row) { return 72 <= row && row < 128 ? 0 : row > 128 ? 1 : -1; };
        if (!rows_hold(1024, 1, 512, ctas, [](int) { return 0; })) return false;
        for (const int m : {150, 200, 256}) {
            if (!rows_hold(m, 1, 512, ctas, but_first) || !rows_hold(m, 1, 512, ctas, lower_half)) return false;
            if (!rows_hold(m, 2, 512, ctas, two_experts)) return false;
        }
    }
    return true;
}

// More runs than lanes, runs of more blocks than lanes, experts that come again, padding between them.
bool all_runs_hold(std::mt19937& random) {
    for (int round = 0; round < 40; ++round) {
        std::vector<int> blocks;
        const int num_experts = 2 + random() % 50, runs = round % 2 ? 30 + random() % 45 : 1 + random() % 8;
        for (int run = 0; run < runs; ++run) {
            const int kinds[] = {1, 1, 2, 3, round % 2 ? 4 : static_cast<int>(random() % 70)};
            const int expert = random() % 6 ? static_cast<int>(random() % num_experts) : -1;
            blocks.insert(blocks.end(), kinds[random() % 5], expert);
        }
        blocks.push_back(0);
        const int n = 256 * (1 + random() % 3), ctas = 2 * (1 + random() % 8), short_by = random() % 128;
        if (!runs_hold(blocks, num_experts, n, ctas, short_by, true, random)) return false;
        if (!runs_hold(blocks, num_experts, n, ctas, short_by, false, random)) return false;
    }
    return true;
}

// The CTAs that share a tile along K sum each block of K once, and each of them sums some if there are enough.
template <int kClusterK>
bool shares_hold() {
    for (int blocks = 1; blocks < 64; ++blocks) {
        int end = 0;
        for (int cta = 0; cta < kClusterK; ++cta) {
            const KRange range = TileWalk<Layout::kDense, 64, 128, false, kClusterK, false, false>::k_range(blocks, cta);
            if (range.begin != end || (blocks >= kClusterK && range.count() <= 0)) {
                std::printf("%d blocks of K for %d CTAs: [%d, %d) for CTA %d\n", blocks, kClusterK, range.begin, range.end, cta);
                return false;
            }
            end = range.end;
        }
        if (end != blocks) return false;
    }
    return true;
}

// Quotients are right, for all sizes of dividends.
bool quotients_hold(std::mt19937& random) {
    for (int round = 0; round < 200000; ++round) {
        const int64_t value = std::max(1u, unsigned(random()) >> 1 + random() % 31), quotient = random() % (0x7fffffff / value + 1);
        const Divisor divisor(value);
        for (const int64_t dividend : {quotient * value - 1, quotient * value, int64_t(random()) >> 1 + random() % 31}) {
            if (dividend < 0 || dividend > 0x7fffffff || divisor.quotient(dividend) == dividend / value) continue;
            std::printf("%d / %d is not %d\n", int(dividend), int(value), divisor.quotient(dividend));
            return false;
        }
    }
    return true;
}

int main() {
    if (!shares_hold<1>() || !shares_hold<2>() || !shares_hold<3>() || !shares_hold<4>()) return 1;
    std::mt19937 random(1);
    if (!quotients_hold(random)) return 1;
    if (!short_pairs_hold() || !all_runs_hold(random)) return 1;
    for (int round = 0; round < 12; ++round) {
        const int num_experts = 1 + random() % (round % 4 == 0 ? 70 : 7);
        const int n = 64 * (1 + random() % (round % 3 == 0 ? 100 : 25)), ctas = 2 * (1 + random() % 3);
        std::vector<int> counts(num_experts);
        for (int& count : counts) {
            const int kinds[] = {0, 128, 256, static_cast<int>(random() % 20), static_cast<int>(random() % 400)};
            count = kinds[random() % 5] % (num_experts > 10 ? 140 : 400);
        }
        counts[random() % num_experts] = 129;

        if (!all_layouts_hold(counts, n, ctas, 128 * (random() % 3), random() % 50)) return 1;
    }
    // Few units for many CTAs: tiles in pieces.
    for (const std::vector<int>& counts : {std::vector<int>{200}, {129, 0, 70}, {5, 384}}) {
        for (const int n : {192, 576}) {
            for (const int ctas : {8, 20}) {
                if (!all_layouts_hold(counts, n, ctas, 0, 3, true)) return 1;
            }
        }
    }
    if (!seen.earlier) {
        std::printf("no tile begins before its rows\n");
        return 1;
    }
    if (!seen.halves || !seen.lower_quarters[0] || !seen.lower_quarters[1] || !seen.companions) {
        std::printf("kinds of pieces that no case had: halves %d, lower quarters %d and, of pairs, %d, companions %d\n", !seen.halves,
                    !seen.lower_quarters[0], !seen.lower_quarters[1], !seen.companions);
        return 1;
    }
    return 0;
}
