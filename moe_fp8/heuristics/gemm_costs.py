"""What a GEMM costs with each config, as far as a model can tell; only good for comparing configs.

The constants were fitted to timings of about 200 shapes on one H200 (benchmarks/NOTES.md); times are in
microseconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from moe_fp8.heuristics.tiles import TOKEN_TILES, GemmConfig, gemm_configs
from moe_fp8.problems import GemmLayout, GemmProblem

#: For each 128 of K that a CTA multiplies, by tokens and weight rows of its tile; and once for every tile.
_BLOCK = {
    (8, 64): 0.11,
    (16, 64): 0.116,
    (32, 64): 0.146,
    (64, 64): 0.198,
    (8, 128): 0.173,
    (16, 128): 0.228,
    (32, 128): 0.289,
    (64, 128): 0.324,
    (128, 96): 0.401,
    (128, 128): 0.443,
    (128, 192): 0.679,
    (128, 256): 0.808,
}
_TILE = {8: 0.11, 16: 0.127, 32: 0.147, 64: 0.541, 128: 0.947}

#: Of a full tile: one of at most 64 tokens, and one that a pair of CTAs copies together.
_NARROW, _PAIR = 0.722, 0.973

#: Of a round of tiles: the last one where it is taken in halves.
_HALF = 0.829

#: Once a kernel: launch, first copies, last stores; what adding a tile's parts takes beside, by their
#: number and for each element that one sends; and what a further round of clusters that do so takes, since it
#: starts cold.
_KERNEL = 1.34
_PARTS = {1: 0.0, 2: 0.411, 3: 0.471, 4: 0.51, 6: 1.29, 8: 0.878}
_PART_ELEMENT = 2.0e-05
_NEXT_ROUND = 1.77

#: Clusters of a size that 132 SMs hold at once, as measured: a GPC has 16 or 18 SMs, some fewer.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 36, 4: 28}

#: Bytes a microsecond: of copies into one SM, of weights from memory, of copies into all SMs.
_SM_RATE, _MEMORY_RATE, _L2_RATE = 100.7e3, 3.96e6, 14.2e6

#: Weights that another token tile has read: what reading them again costs beside the first time.
_REREAD = 0.227

#: Rounds that the last tiles of a grouped GEMM cost beside an even share of all; the same of tiles that come
#: in halves.
_TAIL, _HALVED_TAIL = 0.49, 0.706

#: Rounds of tiles, counted for a mean of rows, up to which there is sure to be but one.
_ONE_ROUND = 0.497

#: How much of the lesser of computing and reading shows beside the greater.
_OVERLAP = 0.0651

#: Experts' rows as multiples of their mean, where only the mean is known, and which part of all has so many:
#: an even spread, and as skewed as 1, 1/2, 1/3...
_Shares = tuple[tuple[float, float], ...]
_SPREAD: _Shares = tuple((share / 10, 1 / 7) for share in range(7, 14))


@cache
def _zipf(experts: int) -> _Shares:
    harmonic = sum(1 / rank for rank in range(1, experts + 1))
    shares = []
    first = 1
    while first <= experts:
        last = min(first if first < 4 else 2 * first - 1, experts)
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
        return _predict(config, None, rows, n, k, 1, sms)
    even = _predict(config, _SPREAD, rows, n, k, experts, sms)
    skewed = _predict(config, _zipf(experts), rows, n, k, experts, sms)
    return Prediction(*((one + other) / 2 for one, other in zip(even, skewed, strict=True)))


def cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds for `rows` rows of each of `experts` experts."""
    return predict(config, layout, rows, n, k, experts, sms).microseconds


def _predict(
    config: GemmConfig, shares: _Shares | None, rows: int, n: int, k: int, experts: int, sms: int
) -> Prediction:
    """As `predict`, for experts' rows of given shares; None: dense."""
    tiles_m = narrow = busy_experts = 0.0
    for share, part in shares or ((1.0, 1.0),):
        count = round(rows * share)
        whole, rest = divmod(count, config.block_m)
        tiles_m += part * (whole + (rest > 0))
        narrow += part * (config.block_m == 128 and 0 < rest <= 64)
        busy_experts += part * (count > 0)
    columns = -(-n // config.block_n)
    tiles = max(1.0, experts * tiles_m) * columns
    at_once = max(1, _CLUSTERS_OF_132[config.split] * sms // 132)
    if shares is None:
        units, clusters = tiles, at_once
        if config.pair > 1:
            units, clusters = tiles_m // 2 * columns + tiles_m % 2 * -(-columns // 2), max(1, at_once // 2)
        rounds, left = divmod(units, clusters)
        if left:
            rounds += _HALF if config.halved and 2 * left <= clusters else 1
    else:
        rounds = (tiles - (1 - _NARROW) * experts * narrow * columns) / at_once
        # One round is just that; with more, experts' tiles end when they may.
        tail = _HALVED_TAIL if config.halved else _TAIL
        rounds = max(1.0, rounds + tail * min(1.0, max(0.0, (rounds - _ONE_ROUND) / 0.3)))
    block = _BLOCK[config.block_m, config.block_n]
    if config.pair > 1:
        block *= _PAIR
    stage = 128 * (config.block_m + config.block_n)
    block = max(block, stage / _SM_RATE)
    read = experts * busy_experts * n * k / _MEMORY_RATE
    if config.block_m < 128:
        block = max(block, stage * min(tiles, at_once) * config.split / _L2_RATE)
        if busy_experts:
            read *= 1 + _REREAD * (tiles_m / busy_experts - 1)
    busy = rounds * (-(-k // (128 * config.split)) * block + _TILE[config.block_m])
    extra = _PARTS[config.parts] + _PART_ELEMENT * config.block_m * config.block_n * (1 - 1 / config.parts)
    extra += _NEXT_ROUND * (rounds - 1) if config.split > 1 else 0.0
    return Prediction(_KERNEL + max(busy, read) + _OVERLAP * min(busy, read) + extra, tiles, rounds)


@cache
def _ranked(
    layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int, batch_invariant: bool
) -> tuple[tuple[GemmConfig, Prediction], ...]:
    # Several tiles for tokens that fit in one read its weights several times.
    smallest = next((tile for tile in TOKEN_TILES if tile >= min(rows, 64)), 64)
    found = [
        (config, predict(config, layout, rows, n, k, experts, sms))
        for config in gemm_configs(layout, k, batch_invariant)
        if config.cluster <= sms and config.block_m >= smallest
    ]
    found.sort(key=lambda one: (one[1].microseconds, one[0].block_m, one[0].block_n, one[0].cluster))
    return tuple(found)


def modelled_rows(problem: GemmProblem) -> int:
    """The rows that costs are predicted for."""
    rows = problem.expected_m or problem.m  # GemmProblem sets it
    # Coarser where a row more cannot matter; beyond so many the order of the candidates no longer changes.
    return rows if rows < 64 else min(-(-rows // 8) * 8, 32768 if problem.layout == "dense" else 4096)


def ranked(problem: GemmProblem) -> tuple[tuple[GemmConfig, Prediction], ...]:
    """Every config that the model considers, the one with the least cost first; a function of the problem."""
    return _ranked(
        # Grouped layouts have the same configs at the same costs.
        "dense" if problem.layout == "dense" else "masked",
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
