"""The plan holds every kernel that the selector can pick for a call of the model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8.errors import ConfigError
from moe_fp8.problems import (
    GemmLayout,
    GemmProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    QuantizeProblem,
)
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup.model import load_model
from moe_fp8.warmup.planner import Plan, PlanOptions, PlanRow, plan
from moe_fp8.warmup.shapes import GemmShape, Parallelism, gemm_shapes

CONFIGS = Path(__file__).parent.parent / "configs"

CASES = {
    "v32-tp8-ep8": ("deepseek_v32", PlanOptions(tp=8, ep=8, next_n=2)),
    "v32-tp1-ep16": ("deepseek_v32", PlanOptions(tp=1, ep=16, max_tokens=512, max_batch=64, next_n=4)),
    "v3-tp16": ("deepseek_v3", PlanOptions(tp=16, max_tokens=2048, num_sms=131)),
    "qwen3-30b": ("qwen3_30b", PlanOptions(max_tokens=2048)),
    "qwen3-235b": ("qwen3_235b", PlanOptions(tp=8, ep=8, max_tokens=2048, max_batch=700)),
}

GROUPED: tuple[GemmLayout, ...] = ("m_indices", "psum", "offsets", "masked")


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def planned(request: pytest.FixtureRequest) -> Plan:
    name, options = request.param
    return plan(load_model(CONFIGS / f"{name}.json"), options)


def most_rows(planned: Plan, layout: str) -> int:
    """The buffer that the engine allocates, restated: what the planner must have covered."""
    options, model = planned.options, planned.model
    tokens = max(options.max_tokens, options.max_batch * options.next_n)
    parallelism = Parallelism(options.tp, options.ep)
    if layout == "dense":
        return tokens
    if layout == "masked":
        return options.max_batch * options.next_n * parallelism.dp
    experts = model.num_experts // options.ep
    return tokens * parallelism.dp * model.experts_per_token + experts * 127


def gemms(planned: Plan) -> tuple[GemmShape, ...]:
    return gemm_shapes(planned.model, Parallelism(planned.options.tp, planned.options.ep))


def rows_of(planned: Plan, shape: GemmShape, layout: str) -> list[PlanRow]:
    key = (layout, shape.n, shape.k, shape.num_experts)
    return [row for row in planned.rows if (row.layout, row.n, row.k, row.num_experts) == key]


def test_every_dense_m_is_planned_for(planned: Plan) -> None:
    most = most_rows(planned, "dense")
    for shape in gemms(planned):
        if shape.num_experts is not None:
            continue
        rows = rows_of(planned, shape, "dense")
        at = {m: row.spec for row in rows for first, last in row.rows for m in range(first, last + 1)}
        assert sorted(at) == list(range(1, most + 1))
        for m in range(1, most + 1):
            assert (
                kernel_spec(GemmProblem("dense", m, shape.n, shape.k, num_sms=planned.options.num_sms))
                == at[m]
            )


@pytest.mark.parametrize("layout", GROUPED)
def test_every_grouped_m_is_planned_for(planned: Plan, layout: GemmLayout) -> None:
    """Every M of the buffer without a hint and with a random one; every value of the hint."""
    most = most_rows(planned, layout)
    seeded = random.Random(most)
    for shape in gemms(planned):
        if shape.num_experts is None:
            continue
        specs = {row.spec for row in rows_of(planned, shape, layout)}
        sms = planned.options.num_sms
        # Each M of the buffer in one of three ways, chosen at random; the ends in all of them.
        for m in range(1, most + 1):
            hints = [None, seeded.randrange(-1, 2 * m), m]
            for hint in hints if m in (1, most) else hints[m % 3 : m % 3 + 1]:
                problem = GemmProblem(layout, m, shape.n, shape.k, shape.num_experts, hint, num_sms=sms)
                assert kernel_spec(problem) in specs, problem


@pytest.mark.parametrize("layout", GROUPED)
def test_row_ranges_tell_the_kernel_of_every_expectation(planned: Plan, layout: GemmLayout) -> None:
    most = most_rows(planned, layout)
    for shape in gemms(planned):
        if shape.num_experts is None:
            continue
        ranges = [(*pair, row.spec) for row in rows_of(planned, shape, layout) for pair in row.rows]
        ranges.sort(key=lambda item: item[0])
        assert ranges[0][0] == 1 and ranges[-1][1] >= most
        assert all(left[1] + 1 == right[0] for left, right in pairwise(ranges))
        for first, last, spec in ranges:
            for hint in {first, (first + last) // 2, last}:
                m = ranges[-1][1]
                sms = planned.options.num_sms
                problem = GemmProblem(layout, m, shape.n, shape.k, shape.num_experts, hint, num_sms=sms)
                assert kernel_spec(problem) == spec, problem


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_call_is_in_the_plan(planned: Plan, data: st.DataObject) -> None:
    options, model = planned.options, planned.model
    shape = data.draw(st.sampled_from(gemms(planned)))
    layout: GemmLayout = "dense"
    if shape.num_experts is not None:
        layout = data.draw(st.sampled_from(GROUPED))
    m = data.draw(st.integers(1, most_rows(planned, layout)))
    hint = data.draw(st.none() | st.integers(-(2**31), 2**31 - 1))
    experts = shape.num_experts or 1
    assert (
        kernel_spec(GemmProblem(layout, m, shape.n, shape.k, experts, hint, num_sms=options.num_sms))
        in planned
    )

    rows = data.draw(st.integers(1, 2**31 - 1))
    power_of_two = data.draw(st.booleans())
    assert kernel_spec(QuantizeProblem(rows, shape.k, model.dtype, power_of_two, options.num_sms)) in planned

    if model.indexer is None:
        return
    heads, dim = model.indexer.num_heads, model.indexer.head_dim
    queries = data.draw(st.integers(1, options.max_tokens))
    keys = data.draw(st.integers(1, model.max_positions))
    compressed, fill = data.draw(st.booleans()), data.draw(st.booleans())
    assert (
        kernel_spec(MqaLogitsProblem(queries, keys, heads, dim, compressed, fill, options.num_sms)) in planned
    )
    batch = data.draw(st.integers(1, options.max_batch))
    next_n = data.draw(st.integers(1, options.next_n))
    paged = PagedMqaLogitsProblem(batch, next_n, heads, dim, options.block_size, options.num_sms)
    assert kernel_spec(paged) in planned
    assert kernel_spec(PagedMqaMetadataProblem(batch, next_n, options.num_sms)) in planned


def test_specs_are_distinct_and_all_used(planned: Plan) -> None:
    assert len(set(planned.specs)) == len(planned.specs)
    assert {row.spec for row in planned.rows} == set(planned.specs)
    ops = {row.op for row in planned.rows}
    assert {"gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked", "quantize_fp8"} <= ops
    indexer = {"mqa_logits_fp8", "paged_mqa_logits_fp8", "paged_mqa_logits_metadata"}
    assert (indexer <= ops) == (planned.model.indexer is not None)


def test_equal_weights_are_one_problem() -> None:
    same = GemmShape("alias", 7168, 2048)
    planned = plan(load_model(CONFIGS / "deepseek_v32.json"), PlanOptions(tp=8, ep=8), extra=(same,))
    rows = rows_of(planned, same, "dense")
    assert {row.what for row in rows} == {("o", "alias")}


def test_a_spec_outside_the_plan_is_not_in_it(planned: Plan) -> None:
    wider = PagedMqaLogitsProblem(1, 1, 16, 64, 32, planned.options.num_sms)
    assert kernel_spec(wider) not in planned


def test_deepseek_v32_is_planned_in_two_seconds() -> None:
    """In a process of its own, so that the selector's caches are cold."""
    code = (
        "import sys, time\n"
        "from moe_fp8.warmup import PlanOptions, load_model, plan\n"
        f"model = load_model({str(CONFIGS / 'deepseek_v32.json')!r})\n"
        "started = time.process_time()\n"
        "found = plan(model, PlanOptions(tp=8, ep=8, max_tokens=16384, next_n=2))\n"
        "assert time.process_time() - started < 2, time.process_time() - started\n"
        "assert len(found.specs) > 10\n"
        "assert 'torch' not in sys.modules and 'moe_fp8.ops' not in sys.modules\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 30


def test_plan_as_json_points_each_row_at_its_kernel(planned: Plan) -> None:
    told = json.loads(json.dumps(planned.to_dict()))
    assert len(told["kernels"]) == len(planned.specs)
    assert len(told["rows"]) == len(planned.rows)
    for row, written in zip(planned.rows, told["rows"], strict=True):
        kernel = told["kernels"][written["kernel"]]
        assert (kernel["name"], kernel["defines"]) == (row.spec.name, dict(row.spec.defines))
        assert kernel["key"] is None


@pytest.mark.parametrize(
    "field", ["max_tokens", "max_batch", "next_n", "num_sms", "block_size", "masked_rows"]
)
def test_options_are_checked(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PlanOptions(**{field: 0})
