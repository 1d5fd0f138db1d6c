"""The predicted time of a GEMM with each config, good only for comparing configs.

The model counts what a config makes of a GEMM (`Work`) and weighs it with a few constants (`Constants`), each
with a unit and a meaning of its own. `moe-fp8 tune --fit` fits them to timings (docs/tuning.md).
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from moe_fp8.heuristics.gemm.tiles import TOKEN_TILES, GemmConfig, gemm_configs
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.problems import GemmLayout, GemmProblem

#: Where the fitted constants are.
FILE = Path(__file__).with_name("costs.json")

#: Clusters of a size that the 132 SMs of an H200 hold at once, as timings show. A GPC has 16 or 18 SMs, and a
#: cluster lies within one GPC.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 38, 4: 30}


class Constants(NamedTuple):
    """Times are in microseconds, rates in bytes a microsecond.

    `kernel` and `block` have an entry for each tile, such as "64x128"; "128x256/2p" is a tile of a pair.
    """

    #: A kernel: launch, first copies, last stores.
    kernel: Any
    #: The main loop of a tile for each 128 of K.
    block: Any
    #: What a grouped kernel takes more, to read its index.
    grouped: Any
    #: A tile without its main loop, and each of its elements.
    tile: Any
    element: Any
    #: Adding the parts of a tile along K, and each element that a part sends.
    parts: Any
    part_element: Any
    #: A kernel that leaves no SM free for the first CTAs of the next kernel.
    crowd: Any
    #: Reading: from memory by all SMs, and by each SM.
    memory_rate: Any
    sm_rate: Any
    #: The share of a first read's time that it takes to read weights again for another token tile.
    reread: Any
    #: The exponent of the norm that joins computing and reading: 1 is one after the other, a large one is the
    #: longer of the two.
    overlap: Any


class Work(NamedTuple):
    """What a config makes of a GEMM: full rounds of tiles on all SMs, and at most one shorter last round.

    Every field is a number, or a tensor with one element for each of many configs (`moe_fp8.tune.fit`).
    """

    rounds: Any
    last: Any  # 1 if there is a last round, else 0
    ctas: Any  # of a full round
    last_ctas: Any
    share: Any  # of all tiles, that a full round takes
    last_share: Any
    blocks: Any  # of K that a CTA multiplies for a tile
    weight_bytes: Any  # read for the first time
    again_bytes: Any  # read again for other tokens
    elements: Any  # of a tile
    parts: Any  # of a tile's sum along K
    grouped: Any  # 1 or 0
    crowded: Any  # the share of an equal kernel's CTAs that find no free SM while this one runs

    def microseconds(self, fitted: Constants, tile: Any) -> Any:
        """The predicted time of a config with this tile: a key of `fitted.kernel`, or a tensor of indices."""
        power = fitted.overlap
        block = fitted.block[tile]
        total = self.weight_bytes + fitted.reread * self.again_bytes

        def one_round(share: Any, ctas: Any) -> Any:
            reading = share * total * (1 / fitted.memory_rate + 1 / (fitted.sm_rate * ctas))
            computing = self.blocks * block
            rest = fitted.tile + fitted.element * self.elements
            return (reading**power + computing**power) ** (1 / power) + rest

        rounds = self.rounds * one_round(self.share, self.ctas)
        rounds = rounds + self.last * one_round(self.last_share, self.last_ctas)
        split = (self.parts - 1) / self.parts
        # All numbers of parts from 2 on take the same: `split > 0` as a number.
        adding = fitted.parts * (split > 0) + fitted.part_element * self.elements * split
        return (
            rounds
            + adding
            + fitted.kernel[tile]
            + fitted.grouped * self.grouped
            + fitted.crowd * self.crowded
        )


@cache
def constants() -> Constants:
    """The fitted constants that the package ships."""
    return Constants(**json.loads(FILE.read_text())["constants"])


def tile_name(config: GemmConfig) -> str:
    """The config's key in `Constants`: its text without what divides K."""
    return str(config) if config.pair > 1 else f"{config.block_m}x{config.block_n}"


#: Numbers of rows, each with the number of experts that have so many.
Counts = tuple[tuple[int, int], ...]


class RowTiles(NamedTuple):
    """The tiles of all experts together along their rows."""

    experts: int  # that have any rows
    tiles: int
    groups: int  # whole groups of `pair` tiles
    singles: int  # tiles that are left over


@lru_cache(maxsize=4096)
def row_tiles(counts: Counts, block_m: int, pair: int) -> RowTiles:
    """The tiles of `block_m` tokens that experts with `counts` rows have; `pair` is 1 or 2."""
    experts = tiles = groups = singles = 0
    for rows, number in counts:
        if rows > 0:
            of_one = -(-rows // block_m)
            experts += number
            tiles += number * of_one
            groups += number * (of_one // pair)
            singles += number * (of_one % pair)
    return RowTiles(experts, tiles, groups, singles)


def work(config: GemmConfig, counts: Counts, n: int, k: int, sms: int, grouped: bool) -> Work:
    """What `config` makes of a GEMM whose experts have `counts` rows."""
    columns = -(-n // config.block_n)
    along = row_tiles(counts, config.block_m, config.pair)
    units = along.groups * columns + along.singles * -(-columns // 2)
    at_once = max(1, _CLUSTERS_OF_132[config.cluster] * sms // 132)
    units = max(1, units)
    rounds, left = divmod(units, at_once)
    most = min(units, at_once) * config.cluster
    if config.divided and 2 * left <= at_once:
        last_ctas = 2 * left * config.cluster  # in halves
    else:
        last_ctas = left * config.cluster
    return Work(
        rounds=rounds,
        last=float(left > 0),
        ctas=at_once * config.cluster,
        last_ctas=max(1.0, last_ctas),
        share=at_once / units,
        last_share=left / units,
        blocks=-(-k // (SCALE_BLOCK * config.split)),
        weight_bytes=along.experts * n * k,
        again_bytes=(along.tiles - along.experts) * n * k,
        elements=config.block_m * config.block_n,
        parts=config.parts,
        grouped=float(grouped),
        # The CTAs of a grouped kernel are always as many as there are SMs.
        crowded=0.0 if grouped else 1 - min(1.0, max(0.0, (sms - most) / most)),
    )


#: How far apart experts' rows may be, as the standard deviation of their logarithm: a balanced router and a
#: skewed router.
_SPREADS = (0.2, 0.7)

#: Experts that are drawn for each spread, in as many draws as these make.
_DRAWN_EXPERTS = 64


@cache
def _hypotheses(experts: int, rows: int) -> tuple[Counts, ...]:
    """What experts' rows may be if only their mean is known: draws from log-normal distributions.

    Of few experts there are several draws, since the number of their tiles is uncertain. Chance adds to a
    spread: a mean of few rows leaves some experts without any. Equal arguments give equal draws.
    """
    if experts == 1:
        return (((rows, 1),),)
    found: list[Counts] = []
    for spread in _SPREADS:
        deviation = math.sqrt(math.log(math.exp(spread**2) + 1 / rows))
        draws = -(-_DRAWN_EXPERTS // experts)
        # Each part of the distribution comes once: what is random is which experts share a draw.
        points = [(at + 0.5) / (draws * experts) for at in range(draws * experts)]
        random.Random(experts).shuffle(points)
        weights = [math.exp(deviation * NormalDist().inv_cdf(point)) for point in points]
        for first in range(0, len(points), experts):
            drawn = weights[first : first + experts]
            mean = fmean(drawn)
            found.append(tuple(Counter(round(rows * weight / mean) for weight in drawn).items()))
    return tuple(found)


class Prediction(NamedTuple):
    """Predicted time, tiles, and rounds of tiles; a short last round is a part of one."""

    microseconds: float
    tiles: float
    rounds: float


def predict(
    config: GemmConfig,
    layout: GemmLayout,
    rows: int,
    n: int,
    k: int,
    experts: int,
    sms: int,
    fitted: Constants | None = None,
) -> Prediction:
    """For `rows` rows of each of `experts` experts: the mean over the hypotheses about their spread.

    `fitted`: other constants than the package's.
    """
    grouped = layout != "dense"
    spreads: tuple[Counts, ...] = _hypotheses(experts, rows) if grouped else (((rows, 1),),)
    fitted = fitted or constants()
    found = []
    for counts in spreads:
        made = work(config, counts, n, k, sms, grouped)
        tiles = row_tiles(counts, config.block_m, config.pair).tiles * -(-n // config.block_n)
        rounds = made.rounds + made.last * made.last_share / made.share
        found.append((made.microseconds(fitted, tile_name(config)), tiles, rounds))
    return Prediction(*(fmean(values) for values in zip(*found, strict=True)))


def cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds for `rows` rows of each of `experts` experts."""
    return predict(config, layout, rows, n, k, experts, sms).microseconds


def _smallest_tile(rows: int) -> int:
    """Tokens of the smallest tile considered: more than 16 tiles would read the same weights too often."""
    return next(tile for tile in TOKEN_TILES if 16 * tile >= min(rows, 1024))


@cache
def _ranked(
    layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int, batch_invariant: bool
) -> tuple[tuple[GemmConfig, Prediction], ...]:
    smallest = _smallest_tile(rows)
    found = [
        (config, predict(config, layout, rows, n, k, experts, sms))
        for config in gemm_configs(layout, k, batch_invariant)
        if config.cluster <= sms and config.block_m >= smallest
    ]
    found.sort(key=lambda one: (one[1].microseconds, one[0].block_m, one[0].block_n, one[0].cluster))
    return tuple(found)


def modelled_rows(problem: GemmProblem) -> int:
    """The rows that costs are predicted for.

    Dense rows are rounded up to whole tiles of the smallest kind considered. A mean of experts' rows is
    rounded up by at most 1/16, and beyond 4096 the order of the configs no longer changes.
    """
    rows = problem.rows
    if problem.layout == "dense":
        step = _smallest_tile(rows)
        return -(-rows // step) * step
    step = max(1, (1 << (rows - 1).bit_length() >> 1) // 16)
    return min(-(-rows // step) * step, 4096)


def ranked(problem: GemmProblem) -> tuple[tuple[GemmConfig, Prediction], ...]:
    """Every config that the model considers, the one with the least cost first; a function of the problem."""
    return _ranked(
        "dense" if problem.layout == "dense" else "masked",  # all grouped layouts have the same costs
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
