"""The tile of the GEMM of ragged K. Pure; standard library only."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from moe_fp8.heuristics.gemm.tiles import GemmConfig, gemm_stage_bytes
from moe_fp8.heuristics.sm90 import BARRIER_BYTES, SMEM_CAPACITY


def k_grouped_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of the kernel: its stages, with scales of every row of both operands."""
    weight_scales = -(-config.block_n * 4 // 128) * 128
    stage = gemm_stage_bytes(config.block_m, config.block_n) + weight_scales
    return BARRIER_BYTES + config.num_stages * stage


#: Ways of adding to what memory holds (kReduce, kLoadAndAdd).
K_GROUPED_REDUCE, K_GROUPED_LOAD_AND_ADD = 1, 2

#: Columns of an expert from which on memory has the time to add while the next tile is multiplied.
_REDUCE_COLUMNS = 1536


def k_grouped_accumulation(k: int, num_experts: int) -> int:
    """The faster way of adding, for `k` columns of all experts together."""
    return K_GROUPED_REDUCE if k >= _REDUCE_COLUMNS * num_experts else K_GROUPED_LOAD_AND_ADD


@cache
def k_grouped_config() -> GemmConfig:
    """Pairs of 128 x 256, with as many stages as fit.

    Scales of single rows are read for each product, so that shared memory bounds the kernel: 128 x 128 takes a
    tenth longer.
    """
    config = GemmConfig(128, 256, 6, 2)
    while k_grouped_smem_bytes(config) > SMEM_CAPACITY:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def k_grouped_grid(config: GemmConfig, m: int, n: int, num_experts: int, num_sms: int) -> int:
    """CTAs of a launch: whole clusters on all SMs, no more than there are units of work."""
    rows, columns = -(-m // config.block_m), -(-n // config.block_n)
    pairs = rows // config.pair * columns + rows % config.pair * -(-columns // config.pair)
    return min(num_sms // config.cluster, pairs * num_experts) * config.cluster
