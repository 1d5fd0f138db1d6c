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


@cache
def k_grouped_config(block_n: int = 128, cluster: int = 2) -> GemmConfig:
    """Tiles of 128 x `block_n`, in clusters of `cluster`, with as many stages as fit, at most six."""
    config = GemmConfig(128, block_n, 6, cluster)
    while k_grouped_smem_bytes(config) > SMEM_CAPACITY:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def k_grouped_grid(config: GemmConfig, m: int, n: int, num_experts: int, num_sms: int) -> int:
    """CTAs of a launch: whole clusters on all SMs, no more than there are units of work."""
    rows, columns = -(-m // config.block_m), -(-n // config.block_n)
    pairs = rows // config.pair * columns + rows % config.pair * -(-columns // config.pair)
    return min(num_sms // config.cluster, pairs * num_experts) * config.cluster
