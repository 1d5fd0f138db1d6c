"""What a GEMM costs with each config, as far as a model can tell; only good for comparing configs.

The constants were fitted to timings on one H200 (benchmarks/NOTES.md); times are in microseconds.
"""

from __future__ import annotations

from functools import cache

from moe_fp8.heuristics.gemm_configs import GemmConfig, gemm_configs
from moe_fp8.problems import GemmLayout, GemmProblem

#: For each 128 of K that a CTA multiplies, by tokens and weight rows of its tile; and once for every tile.
_BLOCK = {
    (8, 64): 0.085,
    (16, 64): 0.09,
    (32, 64): 0.11,
    (64, 64): 0.17,
    (8, 128): 0.13,
    (16, 128): 0.14,
    (32, 128): 0.17,
    (64, 128): 0.315,
    (128, 128): 0.37,
    (128, 256): 0.71,
}
_TILE = {8: 0.4, 16: 0.4, 32: 0.4, 64: 0.5, 128: 0.7}

#: Sharing the weights of a 128 x 256 tile spares copies.
_SHARED_WEIGHTS = 0.97

#: Once a kernel: launch, first copies, last stores; and what adding a tile's parts takes beside.
_KERNEL = 2.6
_PARTS = {1: 0.0, 2: 0.5, 3: 0.9, 4: 0.9, 6: 1.2, 8: 1.4}

#: Clusters of a size that 132 SMs hold at once: a GPC has 16 or 18 SMs, some fewer.
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 42, 4: 28}

#: Bytes a microsecond: that one CTA may have on their way from memory, that all SMs get from memory, from L2.
_CTA_RATE, _MEMORY_RATE, _L2_RATE = 75e3, 4.3e6, 8.5e6

#: Experts' rows as multiples of their mean, where only the mean is known.
_SPREAD = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)


def _tiles_m(config: GemmConfig, layout: GemmLayout, rows: int) -> float:
    """Tiles along the tokens of one expert: whole clusters of them where they share weights."""
    together = config.cluster if config.shares == "weights" else 1
    step = config.block_m * together
    if layout == "dense":
        return -(-rows // step) * together
    return sum(max(1, -(-round(rows * share) // step)) for share in _SPREAD) / len(_SPREAD) * together


def cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds."""
    tiles_m = _tiles_m(config, layout, rows)
    tiles = experts * tiles_m * -(-n // config.block_n)
    split = config.cluster if config.shares == "k" else 1
    at_once = max(1, _CLUSTERS_OF_132[split] * sms // 132)
    rounds = max(1.0, -(-tiles // at_once) if layout == "dense" else tiles / at_once + 0.4)
    blocks = -(-k // (128 * split))
    block = _BLOCK[config.block_m, config.block_n]
    if config.shares == "weights" and config.cluster > 1:
        block *= _SHARED_WEIGHTS
    stage = 128 * (config.block_m + config.block_n)
    running = min(tiles, at_once) * split
    # Copying: what this CTA's share of the L2 gives it.
    block = max(block, stage / _CTA_RATE, stage * running / _L2_RATE)
    busy = rounds * (blocks * block + _TILE[config.block_m])
    read = experts * n * k / _MEMORY_RATE
    # Weights that other token tiles have read come from L2 at best.
    read *= 1 + 0.3 * (tiles_m - 1) if config.block_m < 128 else 1
    return _KERNEL + max(busy, read) + 0.1 * min(busy, read) + _PARTS[config.parts]


@cache
def _cheapest(
    layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int, batch_invariant: bool
) -> GemmConfig:
    return min(
        (config for config in gemm_configs(layout, k, batch_invariant) if config.cluster <= sms),
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
        problem.layout, rows, problem.n, problem.k, problem.num_experts, problem.num_sms, problem.batch_invariant
    )
