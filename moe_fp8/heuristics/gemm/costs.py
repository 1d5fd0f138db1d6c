"""The predicted time of a GEMM with each config, good only for comparing configs.

The model counts what a config makes of a GEMM (`Work`) and weighs it with a few constants (`Constants`), each
with a unit and a meaning of its own. `moe-fp8 tune --fit` fits them to timings (docs/tuning.md).
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import resources
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from moe_fp8.heuristics.gemm.tiles import TOKEN_TILES, GemmConfig, gemm_configs
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.problems import SEGMENT_ALIGNMENT, GemmLayout, GemmProblem

#: Where the fitted constants are.
FILE = resources.files(__package__) / "costs.json"

#: Clusters of a size that the 132 SMs of an H200 hold at once, as timings show. A GPC has 16 or 18 SMs, and a
#: cluster lies within one GPC.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 38, 4: 30}


class Constants(NamedTuple):
    """Times are in microseconds, rates in bytes a microsecond.

    `kernel` and `block` have an entry for each tile, such as "128x128"; "128x256/2p" is a tile of a pair.
    """

    #: A kernel: launch, first copies, last stores.
    kernel: Any
    #: The main loop of a tile for each 128 of K.
    block: Any
    #: The additional time of a grouped kernel, which reads its index.
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
    #: The exponent of the norm that joins the times of computing and reading: 1 adds them, and a large number
    #: gives the longer of the two.
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
    again_bytes: Any  # read again for other tokens; a pair reads them once
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
    """The config's key in `Constants`: its text, without a cluster that divides K."""
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
    launched = _CLUSTERS_OF_132[config.launch_cluster] * sms // 132
    at_once = max(1, launched * (config.launch_cluster // config.cluster))
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
        again_bytes=(along.groups + along.singles - along.experts) * n * k,
        elements=config.block_m * config.block_n,
        parts=config.parts,
        grouped=float(grouped),
        # A grouped kernel always has as many CTAs as there are SMs, so configs do not differ in this.
        crowded=0.0 if grouped else 1 - min(1.0, max(0.0, (sms - most) / most)),
    )


#: How far apart experts' rows may be, as the standard deviation of their logarithm: a balanced router and a
#: skewed router.
_SPREADS = (0.2, 0.7)

#: At least so many experts are drawn for each spread: few experts have several draws.
_DRAWN_EXPERTS = 64


def _draws(experts: int, rows: int) -> Iterator[list[float]]:
    """Draws from log-normal distributions: the rows of experts, in parts of their mean, which is `rows`.

    Few experts have several draws, since the number of their tiles is uncertain. Chance adds to a
    spread: a mean of few rows leaves some experts without any. Equal arguments give equal draws.
    """
    if experts == 1:
        yield [1.0]
        return
    for spread in _SPREADS:
        deviation = math.sqrt(math.log(math.exp(spread**2) + 1 / rows))
        draws = -(-_DRAWN_EXPERTS // experts)
        # Each part of the distribution comes once. Only the draw in which it comes is random.
        points = [(at + 0.5) / (draws * experts) for at in range(draws * experts)]
        random.Random(experts).shuffle(points)
        weights = [math.exp(deviation * NormalDist().inv_cdf(point)) for point in points]
        for first in range(0, len(points), experts):
            drawn = weights[first : first + experts]
            mean = fmean(drawn)
            yield [weight / mean for weight in drawn]


def _of_mean(weights: Iterable[float], mean: int) -> Counts:
    return tuple(Counter(round(mean * weight) for weight in weights).items())


@cache
def _of_rows(experts: int, rows: int) -> tuple[Counts, ...]:
    """Possible rows of the experts if only their mean is known."""
    return tuple(_of_mean(weights, rows) for weights in _draws(experts, rows))


@cache
def _of_blocks(experts: int, blocks: int) -> tuple[Counts, ...]:
    """Possible rows of the experts if only the number of blocks of 128 rows that they fill is known.

    Each draw has the most rows that fit. If there are fewer blocks than experts, some experts have no rows.
    """
    experts = min(experts, blocks)
    most = SEGMENT_ALIGNMENT * blocks
    found: list[Counts] = []
    for weights in _draws(experts, most // experts):

        def filled(mean: int, weights: list[float] = weights) -> int:
            return sum(-(-round(mean * weight) // SEGMENT_ALIGNMENT) for weight in weights)

        found.append(_of_mean(weights, bisect_right(range(1, most + 1), blocks, key=filled)))
    return tuple(found)


class Prediction(NamedTuple):
    """Predicted time, tiles, and rounds of tiles; a short last round is a part of one."""

    microseconds: float
    tiles: float
    rounds: float


def predict(config: GemmConfig, problem: GemmProblem) -> Prediction:
    """The mean over the hypotheses about experts' rows."""
    problem = modelled(problem)
    columns = -(-problem.n // config.block_n)
    tiles, rounds = [], []
    for counts in _hypotheses(problem):
        made = _work(config, counts, problem)
        tiles.append(row_tiles(counts, config.block_m, config.pair).tiles * columns)
        rounds.append(made.rounds + made.last * made.last_share / made.share)
    return Prediction(_cost(config, problem, constants()), fmean(tiles), fmean(rounds))


def cost(config: GemmConfig, problem: GemmProblem, fitted: Constants | None = None) -> float:
    """Predicted microseconds: the mean over the hypotheses. `fitted`: other constants than the package's."""
    return _cost(config, modelled(problem), fitted or constants())


def _cost(config: GemmConfig, problem: GemmProblem, fitted: Constants) -> float:
    tile = tile_name(config)
    return fmean(_work(config, counts, problem).microseconds(fitted, tile) for counts in _hypotheses(problem))


def _work(config: GemmConfig, counts: Counts, problem: GemmProblem) -> Work:
    return work(config, counts, problem.n, problem.k, problem.num_sms, problem.layout != "dense")


def _hypotheses(problem: GemmProblem) -> tuple[Counts, ...]:
    """Possible rows of the experts of a `modelled` problem."""
    if problem.blocks is None:
        return _of_rows(problem.num_experts, problem.m)
    return _of_blocks(problem.num_experts, problem.blocks)


def _smallest_tile(rows: int) -> int:
    """Tokens of the smallest tile considered: more than 16 tiles would read the same weights too often."""
    return next(tile for tile in TOKEN_TILES if 16 * tile >= min(rows, 1024))


def modelled(problem: GemmProblem) -> GemmProblem:
    """The problem that costs are predicted for; all grouped layouts cost the same.

    `m` counts the rows of a dense GEMM, those of one expert, or those of all blocks if only these are known.
    Dense rows are rounded up to whole tiles of the smallest kind considered. An expert's rows and a number of
    blocks are rounded up by at most 1/16. Beyond 4096 rows the order of the configs no longer changes.
    """
    layout: GemmLayout = "masked"
    if problem.layout == "dense":
        layout, step = "dense", _smallest_tile(problem.rows)
        m = -(-problem.rows // step) * step
    elif problem.blocks is not None and problem.blocks_decide:
        layout, m = "psum", _coarse(problem.blocks) * SEGMENT_ALIGNMENT
    else:
        m = min(_coarse(problem.rows), 4096)
    return GemmProblem(
        layout,
        m,
        problem.n,
        problem.k,
        problem.num_experts,
        num_sms=problem.num_sms,
        batch_invariant=problem.batch_invariant,
    )


def _coarse(size: int) -> int:
    """`size` rounded up by at most 1/16."""
    step = max(1, (1 << (size - 1).bit_length() >> 1) // 16)
    return -(-size // step) * step


@cache
def _ranked(problem: GemmProblem) -> tuple[tuple[GemmConfig, float], ...]:
    smallest, fitted = _smallest_tile(problem.rows), constants()
    legal = gemm_configs(problem.layout, problem.k, problem.batch_invariant, problem.num_sms)
    # (One SM has no room for two CTAs, so only tiles of few tokens are left there.)
    considered = [config for config in legal if config.block_m >= smallest] or legal
    found = [(config, _cost(config, problem, fitted)) for config in considered]
    found.sort(key=lambda one: (one[1], one[0].block_m, one[0].block_n, one[0].cluster))
    return tuple(found)


def ranked(problem: GemmProblem) -> tuple[tuple[GemmConfig, float], ...]:
    """Every config that the model considers, with its cost; the least cost is first."""
    return _ranked(modelled(problem))


def cheapest(problem: GemmProblem) -> GemmConfig:
    """The config with the least cost; a pure function of the problem."""
    return ranked(problem)[0][0]
