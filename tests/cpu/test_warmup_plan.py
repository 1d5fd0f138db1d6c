"""The plan holds every kernel that the selector can pick for a call of the model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import (
    GemmLayout,
    GemmProblem,
    GemmSiluMulProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    KGroupedGemmProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
    selection_rows,
)
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup import (
    GemmShape,
    Parallelism,
    Plan,
    PlanOptions,
    PlanRow,
    describe,
    gemm_shapes,
    load_model,
    plan,
    read_config,
)
from moe_fp8.warmup import rows as plan_rows

CONFIGS = Path(__file__).parent.parent / "configs"

CASES = {
    "v32-tp8-ep8": ("deepseek_v32", PlanOptions(tp=8, ep=8, next_n=2)),
    "v32-tp1-ep16": ("deepseek_v32", PlanOptions(tp=1, ep=16, max_tokens=512, max_batch=64, next_n=4)),
    "v3-tp16": ("deepseek_v3", PlanOptions(tp=16, max_tokens=2048, num_sms=131)),
    "qwen3-30b": ("qwen3_30b", PlanOptions(max_tokens=2048)),
    "qwen3-30b-invariant": ("qwen3_30b", PlanOptions(max_tokens=512, batch_invariant=True)),
    "qwen3-30b-trained": ("qwen3_30b", PlanOptions(max_tokens=512, num_sms=112, weight_gradients=True)),
    "qwen3-235b": ("qwen3_235b", PlanOptions(tp=8, ep=8, max_tokens=2048, max_batch=700)),
}

GROUPED: tuple[GemmLayout, ...] = ("m_indices", "psum", "offsets", "masked")


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def planned(request: pytest.FixtureRequest) -> Plan:
    name, options = request.param
    return plan(load_model(CONFIGS / f"{name}.json"), options)


def most_rows(planned: Plan, layout: str, shape: GemmShape | None = None) -> int:
    """Rows of the buffer that the engine allocates, computed anew; the planner must have covered them."""
    options, model = planned.options, planned.model
    tokens = max(options.max_tokens, options.max_batch * options.next_n)
    parallelism = Parallelism(options.tp, options.ep)
    if layout == "dense":
        # A chunked prefill projects the latents of whole contexts up again, in vLLM at most 65,536 together.
        contexts = max(model.max_positions, min(max(8, options.max_batch) * model.max_positions, 65536))
        return max(tokens, contexts) if shape and shape.what == "kv_b" else tokens
    if layout == "masked":
        return options.max_batch * options.next_n * parallelism.dp
    if layout == "permute":
        return tokens * parallelism.dp
    experts = model.num_experts // options.ep
    return tokens * parallelism.dp * model.experts_per_token + experts * 127


def gemms(planned: Plan) -> tuple[GemmShape, ...]:
    return gemm_shapes(planned.model, Parallelism(planned.options.tp, planned.options.ep))


def rows_of(planned: Plan, shape: GemmShape, layout: str) -> list[PlanRow]:
    key = (layout, shape.n, shape.k, shape.num_experts)
    return [row for row in planned.rows if (row.layout, row.n, row.k, row.num_experts) == key]


def gemm_problem(
    planned: Plan, layout: GemmLayout, m: int, shape: GemmShape, hint: int | None = None, device: str = ""
) -> GemmProblem:
    """The problem that an op makes of a call, in a server with these options."""
    return GemmProblem(
        layout,
        m,
        shape.n,
        shape.k,
        shape.num_experts or 1,
        hint,
        num_sms=planned.options.num_sms,
        device=device,
        batch_invariant=planned.options.batch_invariant,
    )


def test_every_dense_m_is_planned_for(planned: Plan) -> None:
    for shape in gemms(planned):
        if shape.num_experts is not None:
            continue
        most = most_rows(planned, "dense", shape)
        rows = rows_of(planned, shape, "dense")
        at: dict[int, set[KernelSpec]] = {}
        for row in rows:
            for first, last in row.rows:
                for m in range(first, last + 1):
                    at.setdefault(m, set()).add(row.spec)
        assert sorted(at) == list(range(1, most + 1))
        for m in range(1, most + 1):
            problems = (
                gemm_problem(planned, "dense", m, shape, device=device) for device in gemm_table.devices()
            )
            assert {kernel_spec(problem) for problem in problems} == at[m]


@pytest.mark.parametrize("layout", GROUPED)
def test_every_grouped_m_is_planned_for(planned: Plan, layout: GemmLayout) -> None:
    """Test every M of the buffer without a hint and with a random hint, and every value of the hint."""
    most = most_rows(planned, layout)
    seeded = random.Random(most)
    for shape in gemms(planned):
        if shape.num_experts is None:
            continue
        specs = {row.spec for row in rows_of(planned, shape, layout)}
        # Each M of the buffer takes one of three ways, in turn; the smallest and largest M take all three.
        for m in range(1, most + 1):
            hints = [None, seeded.randrange(-1, 2 * m), m]
            for hint in hints if m in (1, most) else hints[m % 3 : m % 3 + 1]:
                device = seeded.choice(gemm_table.devices())
                problem = gemm_problem(planned, layout, m, shape, hint, device)
                assert kernel_spec(problem) in specs, problem


@pytest.mark.parametrize("layout", GROUPED)
def test_row_ranges_tell_the_kernel_of_every_expectation(planned: Plan, layout: GemmLayout) -> None:
    most = most_rows(planned, layout)
    for shape in gemms(planned):
        if shape.num_experts is None:
            continue
        ranges = [(*pair, row.spec) for row in rows_of(planned, shape, layout) for pair in row.rows]
        m = max(last for _, last, _ in ranges)
        assert m >= most
        by_blocks: dict[int, list[int]] = {}
        for aligned in range(128, m + 1, 128):
            problem = gemm_problem(planned, layout, aligned, shape)
            if problem.blocks is not None:
                by_blocks.setdefault(problem.rows, []).append(aligned)
        hints = {hint for first, last, _ in ranges for hint in (first, (first + last) // 2, last, last + 1)}
        for hint in {1, *hints} - {m + 1}:
            specs = {spec for first, last, spec in ranges if first <= hint <= last}
            # (So few rows do not tell how many blocks experts fill.)
            calls: list[tuple[int, int | None]] = [(hint, hint)]
            # Several numbers of blocks may belong to the same rows.
            calls += [(aligned, None) for aligned in by_blocks.get(selection_rows(hint), ())]
            problems = (
                gemm_problem(planned, layout, rows, shape, expected, device)
                for (rows, expected), device in product(calls, gemm_table.devices())
            )
            assert {kernel_spec(problem) for problem in problems} == specs, hint


def any_calls(planned: Plan, draw: st.DrawFn) -> Iterator[Problem]:
    """A problem of each kind, as ops make it from calls that the options allow."""
    options, model = planned.options, planned.model
    sms = options.num_sms
    shape = draw(st.sampled_from(gemms(planned)))
    layout: GemmLayout = "dense"
    if shape.num_experts is not None:
        layout = draw(st.sampled_from(GROUPED))
    m = draw(st.integers(1, most_rows(planned, layout, shape)))
    hint = draw(st.none() | st.integers(-(2**31), 2**31 - 1))
    yield gemm_problem(planned, layout, m, shape, hint, draw(st.sampled_from(gemm_table.devices())))

    if options.weight_gradients:
        tokens = draw(st.integers(1, most_rows(planned, layout if layout == "dense" else "psum", shape)))
        yield KGroupedGemmProblem(
            shape.n, shape.k, tokens, shape.num_experts or 1, draw(st.booleans()), sms
        )  # fmt: skip
        if shape.num_experts is None and "bfloat16" in options.out_dtypes:
            yield KGroupedGemmProblem(shape.n, shape.k, tokens, 1, False, sms, "bfloat16")

    rows = draw(st.integers(1, most_rows(planned, "psum")))
    yield QuantizeProblem(rows, shape.k, model.dtype, draw(st.booleans()), sms)

    down = draw(st.sampled_from([shape for shape in gemms(planned) if shape.what.endswith(".down")]))
    experts = draw(st.sampled_from((None, down.num_experts)))
    yield SiluMulQuantizeProblem(
        draw(st.integers(1, most_rows(planned, "masked" if experts else "psum"))),
        down.k,
        experts,
        draw(st.booleans()),
        draw(st.booleans()),
        sms,
    )

    tokens = draw(st.integers(1, most_rows(planned, "permute")))
    routed = [shape for shape in gemms(planned) if shape.what == "experts.down"]
    in_dtype = draw(st.sampled_from((None, model.dtype)))
    kind = (in_dtype, draw(st.booleans()), draw(st.booleans()), sms)
    yield MoePermuteProblem(tokens, model.experts_per_token, routed[0].n, *kind)
    yield MoeCombineProblem(tokens, model.experts_per_token, routed[0].n, sms)
    logits = draw(st.sampled_from((model.dtype, "float32")))
    yield RouteTopkProblem(tokens, model.num_experts, model.experts_per_token, logits, sms)
    (up,) = (shape for shape in gemms(planned) if shape.what == "experts.gate_up")
    forms = (draw(st.booleans()), draw(st.booleans()), sms)
    yield GemmSiluMulProblem(rows, up.n, up.k, up.num_experts or 1, hint, *forms)

    if model.indexer is None:
        return
    heads, dim = model.indexer.num_heads, model.indexer.head_dim
    cached = draw(st.integers(1, max(options.max_tokens, options.max_batch * options.next_n)))
    yield IndexerCacheProblem(cached, dim, model.dtype, draw(st.booleans()), sms)
    queries = draw(st.integers(1, options.max_tokens))
    keys = draw(st.integers(1, options.max_batch * model.max_positions))
    dtype = draw(st.sampled_from(("float32", "bfloat16")))
    compressed, fill, invariant = draw(st.booleans()), draw(st.booleans()), options.batch_invariant
    yield MqaLogitsProblem(queries, keys, heads, dim, compressed, fill, sms, dtype, invariant)
    columns = draw(st.integers(1, 2 * model.max_positions) | st.just(keys))
    yield IndexerTopkProblem(cached, columns, dtype, sms)
    batch = draw(st.integers(1, options.max_batch))
    next_n = draw(st.integers(1, options.next_n))
    for page in options.pages(model.indexer):
        yield PagedMqaLogitsProblem(batch, next_n, heads, dim, page, sms)
    yield PagedMqaMetadataProblem(batch, next_n, sms)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_call_is_in_the_plan(planned: Plan, data: st.DataObject) -> None:
    for problem in any_calls(planned, data.draw):
        assert kernel_spec(problem) in planned, problem


def capricious(problem: Problem) -> KernelSpec:
    """A selector that looks at everything: each problem has its own kernel."""
    return KernelSpec(repr(problem.for_selection()), (), 1, 0)


@pytest.fixture(scope="module")
def capriciously_planned(planned: Plan) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_rows, "kernel_spec", capricious)
        return plan(planned.model, planned.options)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_plan_assumes_nothing_about_the_selector(
    capriciously_planned: Plan, capricious_specs: set[KernelSpec], data: st.DataObject
) -> None:
    for problem in any_calls(capriciously_planned, data.draw):
        assert capricious(problem) in capricious_specs, problem


@pytest.fixture(scope="module")
def capricious_specs(capriciously_planned: Plan) -> set[KernelSpec]:
    return set(capriciously_planned.specs)


def test_problems_keep_what_may_decide_and_no_more() -> None:
    def selected(*fields: Any) -> GemmProblem:
        problem = GemmProblem(*fields)
        assert (problem.m, problem.expected_m) == (fields[1], fields[5] if len(fields) > 5 else None)
        return problem.for_selection()

    dense = selected("dense", 960, 4096, 7168)
    assert (dense.m, dense.expected_m) == (960, 960)
    assert selected("dense", 1025, 4096, 7168).m == selected("dense", 1056, 4096, 7168).m == 1056
    masked = selected("masked", 256, 4096, 7168, 8, 20)
    assert (masked.m, masked.expected_m) == (20, 20)
    assert selected("masked", 256, 4096, 7168, 8).expected_m == 256
    average = selected("offsets", 1008, 4096, 7168, 8)
    assert average == selected("offsets", 1001, 4096, 7168, 8, 125)
    assert (average.m, average.expected_m) == (126, 126)
    for aligned in ("m_indices", "psum"):
        # The blocks of 128 rows stay. On average, half of an expert's last block is padding, so an expert has
        # 64 rows or more.
        for m, blocks, rows in ((8 * 320, 20, 256), (8 * 128, 8, 64), (128, 1, 64), (10, 1, 64)):
            few = selected(aligned, m, 4096, 7168, 8)
            assert (few.m, few.expected_m, few.blocks, few.rows) == (128 * blocks, None, blocks, rows)
            assert replace(few) == few == few.for_selection()
        assert selected(aligned, 128 * 1025, 4096, 7168, 8).blocks == 1056
        assert selected(aligned, 384, 4096, 7168, 1).expected_m == 384
        # A full buffer tells more than the mean does.
        assert selected(aligned, 8 * 320, 4096, 7168, 8, 300) == selected(aligned, 8 * 320, 4096, 7168, 8)
        for hint, mean in ((64, 64), (200, 200), (321, 328)):
            hinted = selected(aligned, 8 * 320, 4096, 7168, 8, hint)
            assert (hinted.blocks, hinted.expected_m) == (None, mean) and hinted == hinted.for_selection()
    for hint in (-5, 0, 1):
        assert selected("offsets", 64, 4096, 7168, 8, hint).expected_m == 1
    assert selected("offsets", 64, 4096, 7168, 8, 2**31).expected_m == 64
    for problem in (dense, masked, average):
        assert replace(problem) == problem == problem.for_selection()


def test_rows_are_rounded_for_the_choice_without_losing_a_tile_boundary() -> None:
    reduced = [selection_rows(rows) for rows in range(1, 70_000)]
    assert all(0 <= after - rows <= rows / 32 for rows, after in enumerate(reduced[:32_768], 1))
    assert reduced[:64] == list(range(1, 65))
    assert all(selection_rows(rows) == rows for rows in range(64, 4097, 64))
    assert all(selection_rows(after) == after for after in set(reduced))
    assert max(reduced) == 32_768 and len(set(reduced)) < 400


def test_specs_are_distinct_and_all_used(planned: Plan) -> None:
    assert len(set(planned.specs)) == len(planned.specs)
    assert {row.spec for row in planned.rows} == set(planned.specs)
    ops = {row.op for row in planned.rows}
    assert {"gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked", "quantize_fp8"} <= ops
    masked = {row.num_experts is not None for row in planned.rows if row.op == "silu_mul_quantize"}
    assert masked == {False, True}
    indexer = {
        "indexer_quantize_and_cache",
        "indexer_topk",
        "mqa_logits_fp8",
        "paged_mqa_logits_fp8",
        "paged_mqa_logits_metadata",
    }
    assert indexer & ops == (indexer if planned.model.indexer is not None else set())


def test_equal_weights_are_one_problem() -> None:
    same = GemmShape("alias", 7168, 2048)
    planned = plan(load_model(CONFIGS / "deepseek_v32.json"), PlanOptions(tp=8, ep=8), extra=(same,))
    rows = rows_of(planned, same, "dense")
    assert {row.what for row in rows} == {("o", "alias")}
    projected = GemmShape("alias", 4096, 512)  # as `kv_b`, which has the tokens of a whole context
    planned = plan(planned.model, planned.options, extra=(projected,))
    assert max(last for row in rows_of(planned, projected, "dense") for _, last in row.rows) == 163840


def test_a_spec_outside_the_plan_is_not_in_it(planned: Plan) -> None:
    wider = PagedMqaLogitsProblem(1, 1, 16, 64, 32, planned.options.num_sms)
    assert kernel_spec(wider) not in planned


def test_a_top_k_over_the_keys_of_all_requests_is_planned() -> None:
    config = read_config(CONFIGS / "deepseek_v32.json") | {"max_position_embeddings": 4096}
    planned = plan(describe(config), PlanOptions(tp=8, ep=8, max_batch=32))
    for rows, requests in product((1, 8, 64), (1, 2, 16, 32)):
        assert kernel_spec(IndexerTopkProblem(rows, requests * 4096)) in planned


def test_a_top_k_of_decode_is_planned() -> None:
    config = read_config(CONFIGS / "deepseek_v32.json") | {"max_position_embeddings": 8192}
    planned = plan(describe(config), PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=1))
    assert kernel_spec(IndexerTopkProblem(1, 8192 + 64)) in planned
    # More tokens may be decoded than prefilled.
    planned = plan(planned.model, PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=256))
    assert kernel_spec(IndexerTopkProblem(256, 8192)) in planned


def test_a_top_k_over_compressed_keys_is_planned() -> None:
    """DeepSeek-V4's indexer has a key for four tokens."""
    config = read_config(CONFIGS / "deepseek_v4_flash.json") | {"max_position_embeddings": 4 * 65536}
    planned = plan(describe(config), PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=1))
    assert kernel_spec(IndexerTopkProblem(1, 65536)) in planned


def test_the_latents_of_several_short_contexts_are_projected_together() -> None:
    cases = ((1024, 4, 8192), (1024, 32, 32768), (1024, 256, 65536), (16384, 1, 65536), (163840, 256, 163840))
    for positions, requests, most in cases:
        config = read_config(CONFIGS / "deepseek_v3.json") | {"max_position_embeddings": positions}
        options = PlanOptions(tp=8, ep=8, max_tokens=512, max_batch=requests, engine="vllm")
        planned = plan(describe(config), options)
        rows = [row for row in planned.rows if row.op == "gemm_fp8" and "kv_b" in row.what]
        assert max(last for row in rows for _, last in row.rows) == most


def test_deepseek_v32_is_planned_in_a_second() -> None:
    """Planning runs in its own process, so that the selector's caches are cold.

    The second holds for a machine on which this loop takes 70 ms. Machines differ in speed, and the other
    load of its host changes a machine's speed by a factor of three, also between the loop and the plan. So
    the plan has five tries.
    """
    code = (
        "import sys, time\n"
        "from moe_fp8.warmup import PlanOptions, load_model, plan\n"
        "def loop():\n"
        "    started, seen = time.process_time(), {}\n"
        "    for i in range(300_000):\n"
        "        seen[i % 1000, i % 7] = max(i % 3, (i + 1) % 5)\n"
        "    return time.process_time() - started\n"
        f"model = load_model({str(CONFIGS / 'deepseek_v32.json')!r})\n"
        "loops = [loop()]\n"
        "started = time.process_time()\n"
        "found = plan(model, PlanOptions(tp=8, ep=8, max_tokens=16384, next_n=2))\n"
        "seconds = time.process_time() - started\n"
        "loops += [loop(), loop()]\n"
        "assert len(found.specs) > 10\n"
        "assert 'torch' not in sys.modules and 'moe_fp8.ops' not in sys.modules\n"
        "print(seconds * 0.07 / sorted(loops)[1])\n"
    )
    seconds: list[float] = []
    while not seconds or min(seconds) >= 1:
        assert len(seconds) < 5, seconds
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))


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
