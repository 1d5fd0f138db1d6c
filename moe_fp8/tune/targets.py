"""The GEMMs to tune, from models or given by the user, and the configs that are worth a try."""

from __future__ import annotations

from typing import NamedTuple

from moe_fp8.heuristics import GemmConfig, gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.problems import DEFAULT_NUM_SMS, GemmLayout, GemmProblem
from moe_fp8.warmup import GemmShape, ModelDescription, Parallelism, gemm_shapes, parse_shape


class Target(NamedTuple):
    """A GEMM to tune, without its rows; a grouped GEMM in the layout "psum", whose times are those of all."""

    layout: GemmLayout
    n: int
    k: int
    num_experts: int

    def problem(self, rows: int, num_sms: int = DEFAULT_NUM_SMS) -> GemmProblem:
        """The GEMM with `rows` rows, of each expert if it is grouped. No more is known of its rows."""
        # (So few rows in `a` do not tell how many blocks experts fill.)
        return GemmProblem(self.layout, rows, self.n, self.k, self.num_experts, rows, num_sms=num_sms)


def target_of(shape: GemmShape) -> Target:
    """The target of a GEMM's weights."""
    layout: GemmLayout = "dense" if shape.num_experts is None else "psum"
    return Target(layout, shape.n, shape.k, shape.num_experts or 1)


def parse_target(text: str) -> Target:
    """`layout:n:k:experts`, the experts left out for "dense"; raises ConfigError.

    Any grouped layout gives the same target.
    """
    return target_of(parse_shape(text, "--shape"))


def model_targets(
    model: ModelDescription, parallelism: Parallelism, *, pad_intermediate: bool = False
) -> list[Target]:
    """The GEMMs of one rank of a model; raises ConfigError."""
    shapes = gemm_shapes(model, parallelism, pad_intermediate=pad_intermediate)
    return [target_of(shape) for shape in shapes]


def candidates(problem: GemmProblem, factor: float) -> list[GemmConfig]:
    """The cost model's choice, then the configs that it takes to cost at most `factor` times as much."""
    configs = gemm_configs(problem.layout, problem.k, num_sms=problem.num_sms)
    costs = {config: gemm_costs.cost(config, problem) for config in configs}
    chosen = gemm_costs.cheapest(problem)
    limit = factor * min(costs.values())
    return [chosen, *(config for config in costs if config != chosen and costs[config] <= limit)]
