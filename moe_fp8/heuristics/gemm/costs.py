"""What a GEMM costs with each config, as far as a model can tell; only good for comparing configs.

The constants were fitted together to timings of about 2,700 shapes on H200s (benchmarks/notes/gemm.md), so
that none of them alone is a measured bandwidth or latency. Times are in microseconds.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean
from typing import NamedTuple

from moe_fp8.heuristics.gemm.tiles import TOKEN_TILES, GemmConfig, gemm_configs
from moe_fp8.problems import GemmLayout, GemmProblem

#: What a CTA takes for each 128 of K, by tokens and weight rows of its tile, and what it takes once a tile.
_BLOCK = {
    (8, 64): 0.0609,
    (16, 64): 0.0761,
    (32, 64): 0.0808,
    (64, 64): 0.117,
    (8, 128): 0.106,
    (16, 128): 0.123,
    (32, 128): 0.125,
    (64, 128): 0.169,
    (128, 64): 0.25,
    (128, 96): 0.308,
    (128, 128): 0.373,
    (128, 192): 0.551,
    (128, 256): 0.804,
    (192, 96): 0.443,
    (192, 128): 0.521,
}
_TILE = {8: 0.037, 16: 0.236, 32: 0.512, 64: 0.451, 128: 0.511, 192: 0.584}

#: What each element of a grouped tile, which is rarely stored whole, adds to that.
_TILE_ELEMENT = 1.08e-05

#: The share of a full tile's time that a tile of fewer tokens takes, by the number of 64s that they begin.
_PARTLY = {
    (128, 64, 1): 0.832,
    (128, 96, 1): 0.912,
    (128, 128, 1): 0.77,
    (128, 192, 1): 1.06,
    (128, 256, 1): 1.03,
    (192, 96, 1): 0.656,
    (192, 96, 2): 0.824,
    (192, 128, 1): 0.752,
    (192, 128, 2): 0.788,
}

#: The share of a block's time that remains where a pair of CTAs copies together.
_PAIR = 0.755

#: The share of a round that the last round takes in halves. Quarters are counted as halves.
_HALF = 0.95

#: What a kernel takes once: launch, first copies, last stores. Adding a tile's parts takes more, by the
#: number of parts and for each element that a part sends. A further round of such clusters takes more again,
#: since it starts cold.
_KERNEL = 1.04
_PARTS = {2: 0.749, 3: 0.527, 4: 0.624, 6: 1.21, 8: 0.975}
_PART_ELEMENT = 0.00021
_NEXT_ROUND = 0.919

#: Clusters of a size that 132 SMs hold at once, as measured: a GPC has 16 or 18 SMs, some fewer.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 36, 4: 28}

#: Bytes a microsecond: of copies into one SM, of weights from memory, of copies into all SMs.
_SM_RATE, _MEMORY_RATE, _L2_RATE = 163.1e3, 5.84e6, 11.7e6

#: The share of a first read's time that reading weights again takes, after another token tile has read them.
_REREAD = 0.568

#: The share of the lesser of computing and reading that adds to the greater where there is one round of
#: tiles, and the power of the rounds with which this share falls.
_OVERLAP = 0.667
_OVERLAP_POWER = 0.0943

#: Experts' rows as multiples of their mean, each with the part of all experts that has so many.
_Shares = tuple[tuple[float, float], ...]

#: Where there are more experts, so many stand for all of an even spread, and so many of a skewed spread come
#: one by one.
_MOST_SHARES, _MOST_RANKS = 8, 4

#: The share by which an expert's rows may be off that, and the share of its effect on the number of tiles
#: that does not cancel out. Rounds are counted for the mean and for some quantiles of the number of tiles.
_OFF, _LUCK = 0.07, 0.193
_QUANTILES = (-1.28, -0.52, 0.0, 0.52, 1.28)


@cache
def _hypotheses(experts: int) -> tuple[_Shares, ...]:
    """What experts' rows may be where only their mean is known.

    An even spread; as skewed as 1, 1/2, 1/3...; a spread with a quarter of the experts idle.
    """
    busy = max(1, experts - max(1, experts // 4))
    return _spread(experts, 1.0), _zipf(experts), _spread(busy, busy / experts)


def _spread(experts: int, busy: float) -> _Shares:
    """From 0.7 to 1.3 of the mean, for a part `busy` of all experts; the others have none."""
    points = min(experts, _MOST_SHARES)
    shares = [0.7 + 0.6 * point / (points - 1) if points > 1 else 1.0 for point in range(points)]
    idle = ((0.0, 1 - busy),) if busy < 1 else ()
    return *idle, *((share / busy, busy / points) for share in shares)


def _zipf(experts: int) -> _Shares:
    harmonic = sum(1 / rank for rank in range(1, experts + 1))
    shares = []
    first = 1
    while first <= experts:
        last = min(first if first < _MOST_RANKS else 2 * first - 1, experts)
        ranks = range(first, last + 1)
        mean = sum(1 / rank for rank in ranks) / len(ranks)
        shares.append((mean * experts / harmonic, len(ranks) / experts))
        first = last + 1
    return tuple(shares)


class Prediction(NamedTuple):
    """What the model takes a config to need: time, tiles and rounds of these, a short last one as a part."""

    microseconds: float
    tiles: float
    rounds: float


def predict(
    config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int
) -> Prediction:
    """For `rows` rows of each of `experts` experts."""
    if layout == "dense":
        return _predict(config, ((1.0, 1.0),), False, rows, n, k, 1, sms)
    found = [_predict(config, shares, True, rows, n, k, experts, sms) for shares in _hypotheses(experts)]
    return Prediction(*(fmean(values) for values in zip(*found, strict=True)))


def cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds for `rows` rows of each of `experts` experts."""
    return predict(config, layout, rows, n, k, experts, sms).microseconds


class _Tiling(NamedTuple):
    """How experts' rows divide into tiles of one height: means of all experts, for one column of tiles.

    A unit is a tile or a pair of them; `weight` is what the tiles take as parts of full ones, `heaviest` what
    the greatest takes, and `busy` the part of the experts that have any.
    """

    tiles: float
    busy: float
    weight: float
    heaviest: float
    units: float
    variance: float


@cache
def _tiling(block_m: int, block_n: int, single: float, rows: int, shares: _Shares, off: float) -> _Tiling:
    """`single`: units of a tile that is left over from pairs; 0 where there are none."""

    def units(rows: float) -> float:
        tiles = -(-round(rows) // block_m)
        return tiles // 2 + tiles % 2 * single if single else tiles

    tiles = busy = weight = heaviest = mean = variance = 0.0
    for share, part in shares:
        whole, rest = divmod(round(rows * share), block_m)
        last = _PARTLY.get((block_m, block_n, -(-rest // 64)), 1.0) if rest else 0.0
        tiles += part * (whole + (rest > 0))
        busy += part * (whole + rest > 0)
        weight += part * (whole + last)
        heaviest = max(heaviest, last, float(whole > 0))
        mean += part * units(rows * share)
        if off:
            variance += part * ((units(rows * share * (1 + off)) - units(rows * share * (1 - off))) / 2) ** 2
    return _Tiling(tiles, busy, weight, heaviest, mean, variance)


def _rounds(config: GemmConfig, units: float, clusters: int) -> float:
    whole, left = divmod(round(max(1.0, units), 6), clusters)  # a sum of shares is off by rounding
    if left:
        whole += _HALF if config.divided and 2 * left <= clusters else 1
    return max(1.0, whole)


def _predict(
    config: GemmConfig, shares: _Shares, grouped: bool, rows: int, n: int, k: int, experts: int, sms: int
) -> Prediction:
    """As `predict`, for experts' rows of given shares, which are not quite sure where it is `grouped`."""
    columns = -(-n // config.block_n)
    single = -(-columns // 2) / columns if config.pair > 1 else 0.0
    tiling = _tiling(config.block_m, config.block_n, single, rows, shares, _OFF if grouped else 0.0)
    tiles = max(1.0, experts * tiling.tiles) * columns
    at_once = max(1, _CLUSTERS_OF_132[config.split] * sms // 132)
    clusters = max(1, at_once // config.pair)
    units = experts * tiling.units * columns
    deviation = _LUCK * math.sqrt(experts * tiling.variance) * columns
    if deviation:
        counted = [_rounds(config, units + one * deviation, clusters) for one in _QUANTILES]
        rounds = sum(counted) / len(counted)
    else:
        rounds = _rounds(config, units, clusters)
    # A round takes as long as its heaviest tile; with more of them each CTA gets some of all.
    spent = tiling.heaviest + (rounds - 1) * tiling.weight / tiling.tiles if tiling.tiles else 1.0
    block = _BLOCK[config.block_m, config.block_n]
    if config.pair > 1:
        block *= _PAIR
    stage = 128 * (config.block_m + config.block_n)
    block = max(block, stage / _SM_RATE)
    read = experts * tiling.busy * n * k / _MEMORY_RATE
    if config.block_m < 128:
        block = max(block, stage * min(tiles, at_once) * config.split / _L2_RATE)
        if tiling.busy:
            read *= 1 + _REREAD * (tiling.tiles / tiling.busy - 1)
    elements = config.block_m * config.block_n
    tile = _TILE[config.block_m] + (_TILE_ELEMENT * elements if grouped else 0.0)
    busy = spent * (-(-k // (128 * config.split)) * block + tile)
    spent_on_both = max(busy, read) + min(busy, read) * _OVERLAP / rounds**_OVERLAP_POWER
    extra = _KERNEL
    if config.parts > 1:
        extra += _PARTS[config.parts] + _PART_ELEMENT * elements * (1 - 1 / config.parts)
    if config.split > 1:
        extra += _NEXT_ROUND * (rounds - 1)
    return Prediction(spent_on_both + extra, tiles, rounds)


def _smallest_tile(rows: int) -> int:
    """Tokens of the smallest tile considered: several for what fits in one read its weights several times."""
    return next(tile for tile in TOKEN_TILES if tile >= min(rows, 64))


@cache
def _ranked(
    layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int, batch_invariant: bool
) -> tuple[tuple[GemmConfig, Prediction], ...]:
    if layout == "m_indices":  # costs as all grouped layouts have, of fewer configs
        legal = set(gemm_configs(layout, k, batch_invariant))
        others = _ranked("masked", rows, n, k, experts, sms, batch_invariant)
        return tuple(one for one in others if one[0] in legal)
    smallest = _smallest_tile(rows)
    found = [
        (config, predict(config, layout, rows, n, k, experts, sms))
        for config in gemm_configs(layout, k, batch_invariant)
        if config.cluster <= sms and config.block_m >= smallest
    ]
    found.sort(key=lambda one: (one[1].microseconds, one[0].block_m, one[0].block_n, one[0].cluster))
    return tuple(found)


def modelled_rows(problem: GemmProblem) -> int:
    """The rows that costs are predicted for."""
    rows = problem.rows
    if problem.layout == "dense":
        # As many as the tiles considered hold, which from 64 tokens on are multiples of that.
        return _smallest_tile(rows) if rows <= 64 else min(-(-rows // 64) * 64, 32768)
    # Coarser where a row more cannot matter; beyond so many the order of the candidates no longer changes.
    return rows if rows < 64 else min(-(-rows // 8) * 8, 4096)


def ranked(problem: GemmProblem) -> tuple[tuple[GemmConfig, Prediction], ...]:
    """Every config that the model considers, the one with the least cost first; a function of the problem."""
    return _ranked(
        # All grouped layouts have the same costs, and all but m_indices the same configs.
        problem.layout if problem.layout in ("dense", "m_indices") else "masked",
        modelled_rows(problem),
        problem.n,
        problem.k,
        problem.num_experts,
        problem.num_sms,
        problem.batch_invariant,
    )


def cheapest(problem: GemmProblem) -> GemmConfig:
    """The config with the least cost; a pure function of the problem."""
    return ranked(problem)[0][0]
