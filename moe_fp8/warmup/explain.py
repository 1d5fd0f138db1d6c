"""Explains the choice of a GEMM's config: the row of a measured table, and the costs of all candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, JustifyMethod
from rich.text import Text

from moe_fp8 import limits
from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import GemmConfig, gemm_config, gemm_grid
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import GemmLayout, GemmProblem
from moe_fp8.specs import GEMM_LAYOUTS, KernelSpec, kernel_spec
from moe_fp8.warmup.options import MOST_ROWS, MOST_SMS
from moe_fp8.warmup.shapes import demand_integer
from moe_fp8.warmup.tables import state, table_of


@dataclass(frozen=True)
class Choice:
    """The config for one `device` ("": any device without a measured table) and the reason for it."""

    device: str
    config: GemmConfig
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A config that the cost model considers or a table names, with its prediction, grid and kernel."""

    config: GemmConfig
    prediction: gemm_costs.Prediction
    grid: int
    spec: KernelSpec


@dataclass(frozen=True)
class Explanation:
    """The explanation for one GEMM. `candidates` are sorted by predicted cost; `problem.device` is ""."""

    problem: GemmProblem
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The candidates' kernels."""
        return tuple(candidate.spec for candidate in self.candidates)

    def to_dict(
        self, keys: Mapping[KernelSpec, str] | None = None, cached: Collection[KernelSpec] | None = None
    ) -> dict[str, Any]:
        """The explanation as JSON types; `keys` and `cached` are as in `Plan.to_dict`."""
        problem = self.problem
        return {
            "layout": problem.layout,
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "num_experts": problem.num_experts,
            "rows": problem.rows,
            "num_sms": problem.num_sms,
            "batch_invariant": problem.batch_invariant,
            "choices": [
                {"device": choice.device, "config": str(choice.config), "reason": choice.reason}
                for choice in self.choices
            ],
            "candidates": [
                {
                    "config": str(candidate.config),
                    **candidate.prediction._asdict(),
                    "grid": candidate.grid,
                    "num_stages": candidate.config.num_stages,
                    "smem_bytes": candidate.spec.smem_bytes,
                    "key": None if keys is None else keys[candidate.spec],
                    "cached": None if cached is None else candidate.spec in cached,
                }
                for candidate in self.candidates
            ],
        }


def explain(
    layout: GemmLayout,
    m: int,
    n: int,
    k: int,
    num_experts: int = 1,
    expected_m: int | None = None,
    *,
    num_sms: int,
    batch_invariant: bool = False,
) -> Explanation:
    """Explain the choice for a GEMM with bf16 output; `m` is as in `GemmProblem`.

    The function makes the problem and chooses the config as an op does. Raises ConfigError for arguments
    that no op accepts, for more experts than a rank has, and for sizes and SMs that no plan has.
    """
    if layout not in GEMM_LAYOUTS:
        raise ConfigError("layout", f"one of {', '.join(GEMM_LAYOUTS)}", layout)
    demand_integer("experts", num_experts, 1, limits.MAX_EXPERTS)
    for name, value in (("M", m), ("N", n), ("K", k), ("expected_m", expected_m)):
        if value is not None:
            demand_integer(name, value, 1, MOST_ROWS)
    demand_integer("num_sms", num_sms, 1, MOST_SMS)
    for name, value, multiple, reason in (
        ("N", n, limits.N_MULTIPLE, limits.refuse_n(n)),
        ("K", k, limits.SCALE_BLOCK, limits.refuse_k(k)),
    ):
        if reason:
            raise ConfigError(name, f"a positive multiple of {multiple}", value)
    if layout == "dense" and (num_experts != 1 or expected_m is not None):
        raise ConfigError("layout", "a grouped layout for experts or expected rows", layout)
    problem = GemmProblem(
        layout, m, n, k, num_experts, expected_m, num_sms=num_sms, batch_invariant=batch_invariant
    )
    choices = tuple(_choice(replace(problem, device=device)) for device in gemm_table.devices())
    # A table may name a config that the model does not consider.
    considered = [config for config, _ in gemm_costs.ranked(problem)]
    considered += [choice.config for choice in choices]
    predicted = {config: gemm_costs.predict(config, problem) for config in considered}
    candidates = tuple(
        Candidate(
            config,
            prediction,
            gemm_grid(config, layout, m, n, num_sms),
            kernel_spec(replace(problem, config=str(config))),
        )
        for config, prediction in sorted(predicted.items(), key=lambda one: one[1].microseconds)
    )
    return Explanation(problem, choices, candidates)


def _choice(problem: GemmProblem) -> Choice:
    row = gemm_table.find_row(problem)
    if row is not None:
        rows, above, _ = row
        reason = f"its table's row for {above + 1} to {rows} rows"
    elif problem.batch_invariant:
        reason = "least predicted cost; batch-invariant results use no table"
    elif problem.device:
        reason = "least predicted cost; its table has no row that serves this problem"
    else:
        reason = "least predicted cost"
    return Choice(problem.device, gemm_config(problem), reason)


def explanation_table(
    told: Explanation, keys: Mapping[KernelSpec, str] | None, cached: Collection[KernelSpec] | None
) -> Group:
    """The choice for each device, then the candidates by predicted cost."""
    problem = told.problem
    experts = f", {problem.num_experts} experts" if problem.layout != "dense" else ""
    lines = [
        f"{problem.layout}: M = {problem.m}, N = {problem.n}, K = {problem.k}{experts}, "
        f"{problem.num_sms} SMs; chosen for {problem.rows} rows{' an expert' if experts else ''}"
    ]
    for choice in told.choices:
        lines.append(f"{choice.device or 'other devices'}: {choice.config}, {choice.reason}")
    table = table_of("\nconfigs that the cost model considers")
    columns: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
        ("config", lambda one: one.config),
        ("us", lambda one: f"{one.prediction.microseconds:.2f}"),
        ("tiles", lambda one: f"{one.prediction.tiles:.4g}"),
        ("rounds", lambda one: f"{one.prediction.rounds:.2f}"),
        ("grid", lambda one: one.grid),
        ("stages", lambda one: one.config.num_stages),
        ("smem bytes", lambda one: one.spec.smem_bytes),
    )
    for name, _ in columns:
        justify: JustifyMethod = "left" if name == "config" else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for name in ("key", "cached", "chosen for"):
        table.add_column(name)
    for candidate in told.candidates:
        chosen = [choice.device or "other" for choice in told.choices if choice.config == candidate.config]
        cells = [str(cell(candidate)) for _, cell in columns]
        table.add_row(*cells, *state(candidate.spec, keys, cached), ", ".join(chosen))
    return Group(Text("\n".join(lines)), table)
