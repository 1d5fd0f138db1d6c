"""The tile of the GEMM of ragged K. Pure; standard library only."""

from __future__ import annotations

from functools import cache

from moe_fp8.heuristics.gemm.tiles import GemmConfig, fit_stages, gemm_stage_bytes
from moe_fp8.heuristics.sm90 import BARRIER_BYTES
from moe_fp8.problems import KGroupedGemmProblem, OutDtype

#: Columns and rows of fp32 sums that TMA stores at once (kSumColumns, kSumRows).
K_GROUPED_SUM_BOX = (32, 64)


def k_grouped_sums_staged(config: GemmConfig, out_dtype: OutDtype) -> bool:
    """Whether sums go through shared memory, and TMA stores them (kSumsByWarp)."""
    return config.block_n == 128 and out_dtype == "float32"


def k_grouped_smem_bytes(config: GemmConfig, out_dtype: OutDtype) -> int:
    """Dynamic shared memory of the kernel: stages, with scales of every row of both operands, and sums."""
    weight_scales = -(-config.block_n * 4 // 128) * 128
    stage = gemm_stage_bytes(config.block_m, config.block_n) + weight_scales
    sums = 4 * config.block_m * config.block_n if k_grouped_sums_staged(config, out_dtype) else 0
    return BARRIER_BYTES + config.num_stages * stage + sums


#: Columns of an expert from which on wide tiles are faster. If they are added to what memory holds, L2 adds
#: them while the next tile is multiplied, which takes it as long as 2,048 columns.
_WIDE_COLUMNS, _WIDE_COLUMNS_ADDED = 4096, 2048


@cache
def _deepest(block_n: int, cluster: int, out_dtype: OutDtype) -> GemmConfig:
    """Tiles of 128 x `block_n` in such clusters, with as many stages as fit, at most six."""
    tile = GemmConfig(128, block_n, 6, cluster)
    return fit_stages(tile, lambda config: k_grouped_smem_bytes(config, out_dtype))


def k_grouped_config(problem: KGroupedGemmProblem) -> GemmConfig:
    """The tile of a call, in pairs unless there is a single SM.

    Scales of single rows are read for each product, so that shared memory bounds the kernel, and wide tiles
    read least. But a warp stores them itself, while TMA stores the sums of narrow tiles, and loads what these
    are added to. So the tile depends on the number of blocks of K.
    """
    wide = problem.for_selection().k >= (_WIDE_COLUMNS_ADDED if problem.accumulate else _WIDE_COLUMNS)
    return _deepest(256 if wide else 128, min(2, problem.num_sms), problem.out_dtype)


def k_grouped_grid(config: GemmConfig, problem: KGroupedGemmProblem) -> int:
    """CTAs of a launch: whole clusters on all SMs, no more than there are units of work or their quarters."""
    rows, columns = -(-problem.m // config.block_m), -(-problem.n // config.block_n)
    pairs = rows // config.pair * columns + rows % config.pair * -(-columns // config.pair)
    units = pairs * problem.num_experts * (4 if config.divided else 1)
    return min(problem.num_sms // config.cluster, units) * config.cluster
