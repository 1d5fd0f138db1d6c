"""GEMM tiles: the legal tiles (`tiles`), their predicted costs (`costs`), measured choices (`table`)."""

from __future__ import annotations

from moe_fp8.heuristics.gemm import costs, table
from moe_fp8.heuristics.gemm.tiles import GemmConfig, parse_gemm_config
from moe_fp8.problems import GemmProblem


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
