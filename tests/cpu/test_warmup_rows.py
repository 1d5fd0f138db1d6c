"""The rows of a plan: each value of an option, and the largest call of every op."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.limits import MAX_ROUTED_EXPERTS
from moe_fp8.problems import (
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    InDtype,
    MqaLogitsProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
)
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup import PlanOptions, describe, load_model, plan, read_config
from moe_fp8.warmup import rows as plan_rows

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = {name: load_model(CONFIGS / f"{name}.json") for name in ("deepseek_v32", "qwen3_30b")}


def each_its_own(problem: Problem) -> KernelSpec:
    """A selector that gives each problem its own kernel."""
    return KernelSpec(repr(problem.for_selection()), (), 1, 0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_sms", (132, 72)),
        ("batch_invariant", (False, True)),
        ("next_n", (1, 3)),
        ("block_size", (32, 64)),
        ("out_dtypes", ("bfloat16", "float32")),
    ],
)
def test_the_plan_for_several_values_has_the_plan_for_each(
    field: str, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for every op whose kernel depends on the value."""
    monkeypatch.setattr(plan_rows, "kernel_spec", each_its_own)

    def specs(value: Any) -> set[KernelSpec]:
        given = PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=4, weight_gradients=True, **{field: value})
        return set(plan(MODELS["deepseek_v32"], given).specs)

    together, (first, second) = specs(values), (specs((value,)) for value in values)
    assert together == first | second
    assert first != second


def test_prefill_may_have_the_keys_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_rows, "kernel_spec", each_its_own)
    planned = plan(MODELS["deepseek_v32"], PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=4))
    for requests in range(1, 5):
        problem = MqaLogitsProblem(8, requests * planned.model.max_positions, 64, 128)
        assert each_its_own(problem) in planned.specs


def test_a_server_of_one_request_has_more_than_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latents of eight contexts are projected together, and logits may be a page wider than a context."""
    monkeypatch.setattr(plan_rows, "kernel_spec", each_its_own)
    config = read_config(CONFIGS / "deepseek_v32.json") | {"max_position_embeddings": 1024}
    planned = plan(describe(config), PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=1))
    for rows in (1025, 8 * 1024):
        assert each_its_own(GemmProblem("dense", rows, 4096, 512)) in planned
    assert each_its_own(IndexerTopkProblem(1, 1024 + 64)) in planned


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_ops_read_the_dtype_of_the_model(dtype: InDtype) -> None:
    config = read_config(CONFIGS / "deepseek_v32.json") | {"torch_dtype": dtype}
    planned = plan(describe(config), PlanOptions(tp=8, ep=8, max_tokens=8, max_batch=1))
    assert kernel_spec(QuantizeProblem(8, 7168, dtype)) in planned
    assert kernel_spec(IndexerCacheProblem(8, 128, dtype)) in planned
    assert kernel_spec(RouteTopkProblem(8, 256, 8, dtype)) in planned


def test_the_rows_of_every_op_reach_the_largest_call() -> None:
    """Here, a pass has 120 tokens, which are decoded. Experts get those of two groups, dense MLPs of four."""
    ranks = {"tp": 8, "ep": 4, "attention_tp": 2, "moe_tp": 1}
    options = PlanOptions(**ranks, max_tokens=100, max_batch=60, next_n=2, weight_gradients=True)
    for positions, projected, quantized in ((32, 60 * 32, 480 * 64), (100_000, 100_000, 100_000)):
        config = read_config(CONFIGS / "deepseek_v32.json") | {"max_position_embeddings": positions}
        most: dict[str, int] = {}
        for row in plan(describe(config), options).rows:
            kind = row.layout or ("experts" if row.num_experts else "")
            if "kv_b" in row.what and kind == "dense":
                kind = "latents"
            use = f"{row.op} {kind}".strip()
            most[use] = max(most.get(use, 0), *(last for _, last in row.rows))
        contiguous = (240 * 8 + 64 * 127 + 127) // 128 * 128
        assert most == {
            "gemm_fp8 dense": 480,
            "gemm_fp8 latents": projected,
            "grouped_gemm_fp8_contiguous m_indices": contiguous,
            "grouped_gemm_fp8_contiguous psum": contiguous,
            "grouped_gemm_fp8_contiguous offsets": contiguous,
            "grouped_gemm_fp8_masked masked": 256,
            "grouped_gemm_silu_mul_fp8 experts": contiguous,
            "quantize_fp8": quantized,
            "silu_mul_quantize": contiguous,
            "silu_mul_quantize experts": 256,
            "moe_permute": 240,
            "moe_combine": 240,
            "route_topk experts": 240,
            "k_grouped_gemm_fp8": 512,
            "k_grouped_gemm_fp8 experts": 256,
            "gemm_fp8": 512,
            "gemm_fp8 experts": 256,
            "indexer_quantize_and_cache": 120,
            "mqa_logits_fp8": 120,
            "indexer_topk": 120,
            "paged_mqa_logits_fp8": 60,
            "paged_mqa_logits_metadata": 60,
        }


def test_dense_mlps_may_have_more_rows_than_all_experts() -> None:
    """The MLPs get the tokens of sixteen ranks, and the experts those of one rank."""
    options = PlanOptions(tp=16, attention_tp=1, moe_tp=1, max_tokens=8192, max_batch=1)
    planned = plan(load_model(CONFIGS / "deepseek_v3.json"), options)
    rows = [row for row in planned.rows if row.op == "silu_mul_quantize" and "mlp.down" in row.what]
    assert max(last for row in rows for _, last in row.rows) == 16 * 8192 > 8192 * 8 + 256 * 127


def test_a_router_of_too_many_experts_has_no_kernel() -> None:
    """The rest of the model is planned all the same."""
    config = read_config(CONFIGS / "qwen3_30b.json")
    for top, routed in ((MAX_ROUTED_EXPERTS, True), (MAX_ROUTED_EXPERTS + 1, False)):
        planned = plan(
            describe(config | {"num_experts_per_tok": top}), PlanOptions(max_tokens=8, max_batch=4)
        )
        ops = {row.op for row in planned.rows}
        assert ("route_topk" in ops) == routed and "moe_permute" in ops


def test_ranges_of_rows_that_touch_are_one() -> None:
    for row in plan(MODELS["qwen3_30b"], PlanOptions(max_tokens=512, max_batch=64)).rows:
        assert all(last + 1 < first for (_, last), (first, _) in pairwise(row.rows)), row.use


def test_buffers_of_the_masked_layout_are_quantized() -> None:
    """Without an indexer, nothing has more rows than all experts' buffers together."""
    planned = plan(MODELS["qwen3_30b"], PlanOptions(max_tokens=8, max_batch=4, masked_rows=1024))
    rows = [row for row in planned.rows if row.op == "quantize_fp8" and row.k == 768]
    assert max(last for row in rows for _, last in row.rows) == 128 * 1024
