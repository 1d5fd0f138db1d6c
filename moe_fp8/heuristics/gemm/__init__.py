"""GEMM tiles: the legal tiles (`tiles`), their predicted costs (`costs`), measured choices (`table`)."""

from __future__ import annotations

from functools import lru_cache

from moe_fp8.heuristics.gemm import costs, table
from moe_fp8.heuristics.gemm.tiles import GemmConfig, parse_gemm_config
from moe_fp8.problems import GemmProblem


def gemm_config(problem: GemmProblem) -> GemmConfig:
    """The tile of a GEMM: the caller's choice, else the choice of the device's table, else the cheapest tile.

    Raises TileError if `problem.config` names no tile that the problem may use.
    """
    return _config(problem.for_selection())


@lru_cache(maxsize=1 << 16)  # planning asks for the same problems millions of times
def _config(problem: GemmProblem) -> GemmConfig:
    if problem.config is not None:
        return parse_gemm_config(problem.config, problem)
    measured = table.lookup(problem)
    if measured is not None:
        return measured
    return costs.cheapest(problem)
