"""Tiles of the GEMM that ends in SiLU(gate) * up and a quantization. Pure; standard library only."""

from __future__ import annotations

import math
from functools import cache

from moe_fp8.heuristics.gemm.tiles import GemmConfig, fit_stages, gemm_stage_bytes
from moe_fp8.heuristics.sm90 import BARRIER_BYTES

#: Weight rows of a tile: the gates and ups of 128 outputs, which share a scale.
_BLOCK_N = 256

#: Token tiles, smallest first.
SILU_MUL_TOKENS = (8, 16, 32, 128)


def silu_mul_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of the kernel: stages, FP8 outputs, and maxima of tiles with few tokens."""
    maxima = 8 * config.block_m * 4 if config.block_m < 64 else 0
    stages = config.num_stages * gemm_stage_bytes(config.block_m, _BLOCK_N)
    return BARRIER_BYTES + stages + config.block_m * 128 + maxima


@cache
def silu_mul_configs() -> tuple[GemmConfig, ...]:
    """Every tile, with as many stages as fit, at most six."""
    tiles = (GemmConfig(block_m, _BLOCK_N, 6) for block_m in SILU_MUL_TOKENS)
    return tuple(fit_stages(tile, silu_mul_smem_bytes) for tile in tiles)


def silu_mul_config(rows: int) -> GemmConfig:
    """The smallest tile that holds most experts' rows, whose mean is `rows`.

    Chance spreads the rows of experts as in a Poisson distribution: two deviations more than the mean.
    """
    most = rows + 2 * math.sqrt(rows)
    return next((config for config in silu_mul_configs() if config.block_m >= most), silu_mul_configs()[-1])
