"""What a GEMM costs with each config, as far as a model can tell; only good for comparing configs.

The constants were fitted to about 300 timings of 46 shapes on one H200 (benchmarks/NOTES.md); times are in
microseconds.
"""

from __future__ import annotations

from functools import cache

from moe_fp8.heuristics.tiles import TOKEN_TILES, GemmConfig, gemm_configs
from moe_fp8.problems import GemmLayout, GemmProblem

#: For each 128 of K that a CTA multiplies, by tokens and weight rows of its tile; and once for every tile.
_BLOCK = {
    (8, 64): 0.169,
    (16, 64): 0.184,
    (32, 64): 0.213,
    (64, 64): 0.213,
    (8, 128): 0.196,
    (16, 128): 0.238,
    (32, 128): 0.320,
    (64, 128): 0.325,
    (128, 128): 0.373,
    (128, 192): 0.575,
    (128, 256): 0.747,
}
_TILE = {8: 0.14, 16: 0.14, 32: 0.14, 64: 0.41, 128: 0.74}

#: A pair of tiles copies less.
_PAIR = 0.97

#: Once a kernel: launch, first copies, last stores; what adding a tile's parts takes beside, by their
#: number; and what a further round of clusters that do so takes, since it starts cold.
_KERNEL = 1.8
_PARTS = {1: 0.0, 2: 0.36, 3: 0.66, 4: 0.78, 6: 0.91, 8: 1.36}
_NEXT_ROUND = 3.0

#: Clusters of a size that 132 SMs hold at once: a GPC has 16 or 18 SMs, some fewer.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 42, 4: 28}

#: Bytes a microsecond: of copies into one SM, of weights from memory, of copies into all SMs.
_SM_RATE, _MEMORY_RATE, _L2_RATE = 75.8e3, 4.54e6, 14.2e6

#: Weights that another token tile has read: what reading them again costs beside the first time.
_REREAD = 0.2

#: Rounds that the last tiles of a grouped GEMM cost beside an even share of all.
_TAIL = 0.62

#: How much of the lesser of computing and reading shows beside the greater.
_OVERLAP = 0.2

#: Experts' rows as multiples of their mean, where only the mean is known.
_SPREAD = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)


def _tiles_m(block_m: int, layout: GemmLayout, rows: int) -> float:
    """Tiles along the tokens of one expert."""
    if layout == "dense":
        return -(-rows // block_m)
    return sum(max(1, -(-round(rows * share) // block_m)) for share in _SPREAD) / len(_SPREAD)


def cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds for `rows` rows of each of `experts` experts."""
    tiles_m = _tiles_m(config.block_m, layout, rows)
    tiles = experts * tiles_m * -(-n // config.block_n)
    split = config.cluster if config.shares == "k" else 1
    at_once = max(1, _CLUSTERS_OF_132[split] * sms // 132)
    rounds = max(1.0, -(-tiles // at_once) if layout == "dense" else tiles / at_once + _TAIL)
    block = _BLOCK[config.block_m, config.block_n]
    if config.cluster > 1 and config.shares == "operands":
        block *= _PAIR
    stage = 128 * (config.block_m + config.block_n)
    block = max(block, stage / _SM_RATE)
    read = experts * n * k / _MEMORY_RATE
    if config.block_m < 128:
        block = max(block, stage * min(tiles, at_once) * split / _L2_RATE)
        read *= 1 + _REREAD * (tiles_m - 1)
    busy = rounds * (-(-k // (128 * split)) * block + _TILE[config.block_m])
    extra = _PARTS[config.parts] + (_NEXT_ROUND * (rounds - 1) if split > 1 else 0.0)
    return _KERNEL + max(busy, read) + _OVERLAP * min(busy, read) + extra


@cache
def _cheapest(
    layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int, batch_invariant: bool
) -> GemmConfig:
    # Several tiles for tokens that fit in one read its weights several times.
    smallest = next((tile for tile in TOKEN_TILES if tile >= min(rows, 64)), 64)
    return min(
        (
            config
            for config in gemm_configs(layout, k, batch_invariant)
            if config.cluster <= sms and config.block_m >= smallest
        ),
        key=lambda config: (
            cost(config, layout, rows, n, k, experts, sms),
            config.block_m,
            config.block_n,
            config.cluster,
        ),
    )


def cheapest(problem: GemmProblem) -> GemmConfig:
    """The config with the least cost; a pure function of the problem."""
    rows = problem.expected_m or problem.m  # GemmProblem sets it
    # Coarser where a row more cannot matter; beyond 4096 the order of the candidates no longer changes.
    rows = rows if rows < 64 else min(-(-rows // 8) * 8, 4096)
    return _cheapest(
        problem.layout,
        rows,
        problem.n,
        problem.k,
        problem.num_experts,
        problem.num_sms,
        problem.batch_invariant,
    )
