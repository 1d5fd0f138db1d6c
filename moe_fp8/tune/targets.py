"""What to tune: GEMMs of models or given ones, and the configs worth a try."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, get_args

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import GemmConfig, gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.problems import DEFAULT_NUM_SMS, GemmLayout, GemmProblem
from moe_fp8.warmup import Parallelism, gemm_shapes, load_model


class Target(NamedTuple):
    """A GEMM to tune but for its rows; a grouped one in the layout "psum", whose times are those of all."""

    layout: GemmLayout
    n: int
    k: int
    num_experts: int

    def problem(self, rows: int, num_sms: int = DEFAULT_NUM_SMS) -> GemmProblem:
        """The GEMM with `rows` rows, of each expert where it is grouped."""
        m = rows * self.num_experts
        return GemmProblem(self.layout, m, self.n, self.k, self.num_experts, rows, num_sms=num_sms)


def parse_target(text: str) -> Target:
    """`layout:n:k:experts`, the experts left out for "dense"; raises ConfigError.

    Any grouped layout gives the same target.
    """
    layout, *numbers = text.split(":")
    if layout in get_args(GemmLayout) and all(number.isascii() and number.isdigit() for number in numbers):
        sizes = [int(number) for number in numbers]
        if layout == "dense" and len(sizes) == 2:
            sizes.append(1)
        if len(sizes) == 3:
            n, k, experts = sizes
            fits = n > 0 and n % 64 == 0 and k > 0 and k % 128 == 0
            if fits and experts > 0 and (experts == 1 or layout != "dense"):
                return Target("dense" if layout == "dense" else "psum", n, k, experts)
    expected = (
        f"layout:n:k:experts, layout one of {', '.join(get_args(GemmLayout))}; n % 64 == 0, k % 128 == 0"
    )
    raise ConfigError("--shape", expected, text, "for example dense:4096:7168 or masked:4096:7168:32")


def model_targets(
    path: str | Path, parallelism: Parallelism, *, pad_intermediate: bool = False
) -> list[Target]:
    """The GEMMs of one rank of a model; raises ConfigError."""
    shapes = gemm_shapes(load_model(path), parallelism, pad_intermediate=pad_intermediate)
    return [
        Target("dense" if shape.num_experts is None else "psum", shape.n, shape.k, shape.num_experts or 1)
        for shape in shapes
    ]


def candidates(problem: GemmProblem, factor: float) -> list[GemmConfig]:
    """The cost model's choice, then the configs that it takes to cost at most `factor` times as much."""
    rows = problem.rows
    costs = {
        config: gemm_costs.cost(
            config, problem.layout, rows, problem.n, problem.k, problem.num_experts, problem.num_sms
        )
        for config in gemm_configs(problem.layout, problem.k)
        if config.cluster <= problem.num_sms
    }
    chosen = gemm_costs.cheapest(problem.for_selection())
    limit = factor * min(costs.values())
    return [chosen, *(config for config in costs if config != chosen and costs[config] <= limit)]
