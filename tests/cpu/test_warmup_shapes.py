"""ModelDescription -> the GEMMs of one rank, and plans of any number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from moe_fp8.errors import ConfigError, ModelError
from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.problems import RouteTopkProblem
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup import (
    Parallelism,
    PlanOptions,
    describe,
    gemm_shapes,
    load_model,
    plan,
    unplanned,
)
from moe_fp8.warmup.shapes import local_experts
from tests.model_configs import CONFIGS, in_blocks, model, shapes


def test_a_rank_has_no_more_experts_than_the_ops_take() -> None:
    experts = local_experts(model("qwen3_30b"), Parallelism(redundant_experts=MAX_EXPERTS - 128))
    assert experts == MAX_EXPERTS
    with pytest.raises(ConfigError, match=r"from 1 to 1024, got 2048; use tp=2 ep=2,") as caught:
        gemm_shapes(model("qwen3_30b", num_experts=2048), Parallelism())
    assert caught.value.field == "experts of a rank"


def test_a_number_of_redundant_experts_that_fits_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(259\), got 8; use .*redundant_experts=8$"):
        plan(model("deepseek_v32"), PlanOptions(tp=8, ep=8, redundant_experts=3))
    plan(model("deepseek_v32"), PlanOptions(tp=8, ep=8, redundant_experts=8))


def test_deepseek_v32_tp8_ep8_shapes() -> None:
    assert shapes("deepseek_v32", 8, 8) == {
        "q_a+kv_a": (2112, 7168, None),
        "q_b": (3072, 1536, None),
        "kv_b": (4096, 512, None),
        "o": (7168, 2048, None),
        "indexer.wq_b": (8192, 1536, None),
        "indexer.wk": (128, 7168, None),
        "mlp.gate_up": (4608, 7168, None),
        "mlp.down": (7168, 2304, None),
        "shared.gate_up": (512, 7168, None),
        "shared.down": (7168, 256, None),
        "experts.gate_up": (4096, 7168, 32),
        "experts.down": (7168, 2048, 32),
    }


def test_qwen3_shapes() -> None:
    assert shapes("qwen3_30b", 1, 1) == {
        "qkv": (5120, 2048, None),
        "o": (2048, 4096, None),
        "experts.gate_up": (1536, 2048, 128),
        "experts.down": (2048, 768, 128),
    }
    # Eight ranks share four key-value heads: each rank keeps one head of its own.
    assert shapes("qwen3_235b", 8, 8)["qkv"] == ((8 + 2) * 128, 4096, None)


def test_queries_without_a_low_rank_projection() -> None:
    found = shapes("deepseek_v3", 1, 1, q_lora_rank=None)
    assert found["q"] == (128 * 192, 7168, None)
    assert found["kv_a"] == (576, 7168, None)


@pytest.mark.parametrize(
    ("tp", "ep", "experts", "width", "dp"),
    [(8, 1, 256, 256, 1), (8, 2, 128, 512, 1), (8, 8, 32, 2048, 1), (4, 32, 8, 2048, 8)],
)
def test_experts_are_cut_by_ep_then_by_what_is_left_of_tp(
    tp: int, ep: int, experts: int, width: int, dp: int
) -> None:
    assert shapes("deepseek_v3", tp, ep)["experts.down"] == (7168, width, experts)
    assert Parallelism(tp, ep).dp == dp
    assert local_experts(model("deepseek_v3"), Parallelism(tp, ep)) == experts


def test_the_engines_fuse_the_projections_of_dots3_differently() -> None:
    """SGLang's `fused_qkv_a_g_proj_with_mqa`: the RoPE part and a rank's gates are whole blocks each."""
    described = describe(in_blocks("dots3_note"))

    def widths(engine: str | None, tp: int = 8) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for shape in gemm_shapes(described, PlanOptions(engine=engine, tp=tp, ep=tp)):
            if shape.what in ("q_a+kv_a", "gate", "q_a+kv_a+gate"):
                found.setdefault(shape.what, set()).add(shape.n)
        return found

    vllm = {"q_a+kv_a": {1024 + 512 + 64, 1024 + 1024 + 64}, "gate": {128, 64}}
    sglang = {"q_a+kv_a+gate": {1024 + 512 + 128 + 128, 1024 + 1024 + 128 + 128}}
    assert widths("vllm") == vllm
    assert widths("sglang") == widths("sglang", tp=1) == sglang
    assert widths(None) == vllm | sglang
    # A gate for each column: 128 and 64 heads of 128 columns.
    config = in_blocks("dots3_note")
    described = describe(
        config | {"attention_gate_type": "elementwise", "swa_attention_gate_type": "elementwise"}
    )
    assert widths("sglang") == {"q_a+kv_a+gate": {1664 + 16 * 128, 2176 + 8 * 128}}


def test_the_engines_fuse_the_projections_of_minimax_m3_differently() -> None:
    """Each of 8 ranks has one of 4 heads of the indexer, and its key; vLLM has them behind q, k and v."""
    described = describe(in_blocks("minimax_m3"))
    attention, index = (64 // 8 + 2) * 128, 2 * 128
    for engine, expected in (
        ("vllm", {"qkv": {attention}, "qkv+index": {attention + index}}),
        ("sglang", {"qkv": {attention}, "index": {index}}),
    ):
        found: dict[str, set[int]] = {}
        for shape in gemm_shapes(described, PlanOptions(engine=engine, tp=8, ep=8)):
            if shape.what in ("qkv", "qkv+index", "index"):
                found.setdefault(shape.what, set()).add(shape.n)
        assert found == expected


def test_vllm_gives_the_first_ranks_one_expert_more() -> None:
    """256 experts on 24 ranks, as vLLM's `determine_expert_map` deals them out. Other engines refuse."""
    ranks: dict[str, Any] = {"tp": 8, "ep": 24, "max_tokens": 8, "max_batch": 1}
    options = PlanOptions(**ranks, engine="vllm")
    described = model("deepseek_v3")
    assert local_experts(described, options) == 11
    for what in ("experts.gate_up", "experts.down"):
        found = [shape for shape in gemm_shapes(described, options) if shape.what == what]
        assert [shape.num_experts for shape in found] == [11, 10]
        assert {row.num_experts for row in plan(described, options).rows if what in row.what} >= {10, 11}
    for refused in (
        PlanOptions(**ranks),
        PlanOptions(**ranks, engine="sglang"),
        PlanOptions(**ranks, engine="vllm", redundant_experts=1),
        PlanOptions(**ranks | {"ep": 512}, engine="vllm"),
        PlanOptions(**ranks | {"ep": 512}, engine="vllm", fuse_shared=True),
    ):
        with pytest.raises(ConfigError):
            plan(described, refused)
    even = PlanOptions(**ranks, engine="vllm", redundant_experts=8)
    assert {shape.num_experts for shape in gemm_shapes(described, even)} == {None, 11}


@pytest.mark.parametrize(("name", "tp"), [("qwen3_235b", 8), ("qwen3_30b", 4)])
def test_uneven_intermediate_reports_what_would_do(name: str, tp: int) -> None:
    description = model(name)
    lacking = {
        layer.what: (layer.n, layer.k) for layer in unplanned(description, Parallelism(tp)) if layer.lacking
    }
    hidden = description.hidden_size
    assert lacking == {"experts.gate_up": (384, hidden), "experts.down": (hidden, 192)}
    with pytest.raises(ModelError, match=f"experts.down.*{192 * tp} / {tp}") as caught:
        plan(description, PlanOptions(tp=tp, max_tokens=1, max_batch=1), strict=True)
    assert f"tp={tp} ep={tp}" in caught.value.remedy
    assert "--pad-intermediate" in caught.value.remedy
    padded = {
        shape.what: shape for shape in gemm_shapes(description, Parallelism(tp, 1), pad_intermediate=True)
    }
    assert padded["experts.gate_up"].n == 512
    assert padded["experts.down"].k == 256


@pytest.mark.parametrize(("tp", "ep"), [(3, 1), (1, 3), (2, 3), (0, 1), (1, 0), (256, 256)])
def test_parallelism_that_does_not_divide(tp: int, ep: int) -> None:
    with pytest.raises(ConfigError):
        gemm_shapes(model("deepseek_v3"), Parallelism(tp, ep))


def test_ranks_that_cannot_share_key_value_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a divisor of the ranks of attention \(12\), got 8") as caught:
        gemm_shapes(describe(in_blocks("glm_45")), Parallelism(12, 1))
    assert caught.value.field == "num_key_value_heads"


def test_a_remedy_names_the_ranks_of_attention_that_would_do() -> None:
    given = Parallelism(attention_tp=12, moe_tp=12)
    with pytest.raises(ConfigError, match="num_key_value_heads") as caught:
        gemm_shapes(describe(in_blocks("glm_45")), given)
    assert caught.value.remedy == "use attention_tp=1, attention_tp=2, attention_tp=4"
    with pytest.raises(ConfigError, match=r"attention_tp: .*a divisor of the number of heads") as caught:
        gemm_shapes(describe(in_blocks("glm_45")), Parallelism(attention_tp=9, moe_tp=9))
    assert caught.value.remedy == "no tp and ep serve this model with the other settings"


def test_a_remedy_keeps_the_ranks_that_share_experts_or_changes_them() -> None:
    planned = plan(model("qwen3_30b"), PlanOptions(tp=8, ep=2, max_tokens=1, max_batch=1))
    tried = [f"tp={tp} ep={ep}" for tp, ep in ((1, 2), (2, 2), (4, 2), (4, 4), (8, 8))]
    assert all(f" {one}," in planned.remedy for one in tried) and "tp=8 ep=2" not in planned.remedy
    assert not plan(planned.model, PlanOptions(tp=4, ep=2, max_tokens=1, max_batch=1)).remedy


def test_a_weight_that_layers_of_two_kinds_share_is_one_gemm() -> None:
    found = gemm_shapes(describe(in_blocks("minimax_m3")), Parallelism())
    assert [shape.what for shape in found].count("o") == 1


def test_every_remedy_works() -> None:
    description = model("qwen3_235b")
    with pytest.raises(ModelError) as caught:
        plan(description, PlanOptions(tp=8, max_tokens=1, max_batch=1), strict=True)
    offered = [part for part in caught.value.remedy.replace(",", "").split() if "=" in part]
    pairs = [
        (int(tp[3:]), int(ep[3:].rstrip(";"))) for tp, ep in zip(offered[::2], offered[1::2], strict=True)
    ]
    assert pairs
    for tp, ep in pairs:
        assert not any(layer.lacking for layer in unplanned(description, Parallelism(tp, ep)))


def test_unservable_k_is_reported() -> None:
    changed = model("deepseek_v3", q_lora_rank=1600)
    found = {layer.what: layer for layer in unplanned(changed, Parallelism())}
    assert found["q_b"].lacking and "K is a positive multiple of 128, got 1600" in found["q_b"].reason


def test_a_plan_of_any_number_of_tokens_takes_no_longer() -> None:
    model = load_model(CONFIGS / "qwen3_30b.json")
    some, many = (plan(model, PlanOptions(max_tokens=tokens)) for tokens in (40_000, 2_000_000))
    assert set(some.specs) == set(many.specs)
    for row in many.rows:
        assert sum(last - first + 1 for first, last in row.rows) >= len(row.rows) and len(row.rows) < 400


@pytest.mark.parametrize(("name", "choices"), [("glm_45", 160), ("longcat_flash", 768)])
def test_routers_are_planned_for_all_that_they_choose_from(name: str, choices: int) -> None:
    """LongCat's router also chooses from experts that compute nothing."""
    planned = plan(describe(in_blocks(name)), PlanOptions(tp=8, ep=8))
    routers = [row for row in planned.rows if row.op == "route_topk"]
    assert {row.num_experts for row in routers} == {choices}
    assert {kernel_spec(RouteTopkProblem(1, choices, 8, dtype)) for dtype in ("bfloat16", "float32")} == {
        row.spec for row in routers
    }


def test_routers_of_the_most_experts_are_planned() -> None:
    for experts, top, planned in ((1024, 32, True), (1152, 32, False), (1024, 33, False)):
        many = model("qwen3_30b", num_experts=experts, num_experts_per_tok=top)
        found = plan(many, PlanOptions(ep=8, max_tokens=8, max_batch=1))
        assert any(row.op == "route_topk" for row in found.rows) == planned
