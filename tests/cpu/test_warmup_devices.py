"""A plan serves every device with a table of measured tiles, in batch-invariant mode or not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.heuristics import every_gemm_config
from moe_fp8.problems import GemmProblem
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup import Plan, PlanOptions, arguments, load_model, plan
from moe_fp8.warmup import options as plan_options
from moe_fp8.warmup.arguments import add_plan_arguments, plan_from
from moe_fp8.warmup.shapes import Parallelism, gemm_shapes

CONFIGS = Path(__file__).parent.parent / "configs"
QWEN, DEEPSEEK = CONFIGS / "qwen3_30b.json", CONFIGS / "deepseek_v32.json"


@pytest.mark.parametrize("invariant", [False, True])
def test_a_table_adds_its_kernels_to_every_plan(put_table: Callable[..., None], invariant: bool) -> None:
    model, options = load_model(QWEN), PlanOptions(max_tokens=64, batch_invariant=invariant)
    shape = next(shape for shape in gemm_shapes(model, Parallelism()) if shape.num_experts is None)
    put_table(())
    without = plan(model, options)
    here = GemmProblem("dense", 8, shape.n, shape.k, batch_invariant=invariant)
    chosen = kernel_spec(here)
    put_table(
        [{"layout": "dense", "n": shape.n, "k": shape.k, "num_experts": 1, "rows": 16, "config": "128x128"}]
    )
    planned = plan(model, options)
    measured = kernel_spec(replace(here, device="h200"))
    assert (measured == chosen) == invariant, "batch-invariant problems look at no table"
    assert specs_at(planned, shape.n, shape.k, 8) == {chosen, measured}
    assert specs_at(planned, shape.n, shape.k, 17) == specs_at(without, shape.n, shape.k, 17)
    assert set(without.specs) <= set(planned.specs)
    assert kernel_spec(replace(here, device="h100")) == chosen


def specs_at(planned: Plan, n: int, k: int, m: int) -> set[KernelSpec]:
    rows = (row for row in planned.rows if (row.layout, row.n, row.k) == ("dense", n, k))
    return {row.spec for row in rows for first, last in row.rows if first <= m <= last}


def test_batch_invariance_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PlanOptions().batch_invariant is False
    on = replace(settings(), batch_invariant=True)
    monkeypatch.setattr(plan_options, "settings", lambda: on)
    assert PlanOptions().batch_invariant is True


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(
    "option, wanted",
    [
        ([], None),
        (["--batch-invariant"], True),
        (["--batch-invariant", "off"], False),
        (["--batch-invariant", "both"], (False, True)),
    ],
)
def test_the_option_goes_before_the_settings(
    monkeypatch: pytest.MonkeyPatch, variable: bool, option: list[str], wanted: Any
) -> None:
    given = replace(settings(), batch_invariant=variable)
    monkeypatch.setattr(arguments, "settings", lambda: given)
    parser = argparse.ArgumentParser()
    arguments.add_model_argument(parser)
    add_plan_arguments(parser)
    planned = plan_from(parser.parse_args(["--model", str(QWEN), "--max-tokens", "1", *option]))
    assert planned.options.batch_invariant == (variable if wanted is None else wanted)


def test_a_batch_invariant_plan_divides_no_k() -> None:
    model, options = load_model(DEEPSEEK), PlanOptions(tp=8, ep=8, max_tokens=512)

    parts = {str(config): config.parts for config in every_gemm_config()}

    def dividing(planned: Plan) -> int:
        return sum(parts[row.config] > 1 for row in planned.rows if row.layout is not None)

    assert dividing(plan(model, options)) > 0
    assert dividing(plan(model, replace(options, batch_invariant=True))) == 0
