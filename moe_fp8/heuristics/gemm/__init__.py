"""GEMM tiles: the legal tiles (`tiles`), their predicted costs (`costs`), measured choices (`table`)."""

from __future__ import annotations

from moe_fp8.heuristics.gemm import costs, table
from moe_fp8.heuristics.gemm.k_grouped import (
    K_GROUPED_SUM_BOX,
    k_grouped_config,
    k_grouped_grid,
    k_grouped_smem_bytes,
    k_grouped_sums_staged,
)
from moe_fp8.heuristics.gemm.silu_mul import silu_mul_config, silu_mul_configs, silu_mul_smem_bytes
from moe_fp8.heuristics.gemm.tiles import (
    TOKEN_TILES,
    GemmConfig,
    every_gemm_config,
    gemm_configs,
    gemm_grid,
    gemm_smem_bytes,
    parse_gemm_config,
)
from moe_fp8.problems import GemmProblem

__all__ = [
    "K_GROUPED_SUM_BOX",
    "TOKEN_TILES",
    "GemmConfig",
    "every_gemm_config",
    "gemm_config",
    "gemm_configs",
    "gemm_grid",
    "gemm_smem_bytes",
    "k_grouped_config",
    "k_grouped_grid",
    "k_grouped_smem_bytes",
    "k_grouped_sums_staged",
    "parse_gemm_config",
    "silu_mul_config",
    "silu_mul_configs",
    "silu_mul_smem_bytes",
]


def gemm_config(problem: GemmProblem) -> GemmConfig:
    """The tile of a GEMM: the caller's choice, else the choice of the device's table, else the cheapest tile.

    Raises TileError if `problem.config` names no tile that the problem may use.
    """
    problem = problem.for_selection()
    if problem.config is not None:
        return parse_gemm_config(problem.config, problem)
    measured = table.lookup(problem)
    if measured is not None:
        return measured
    return costs.cheapest(problem)
