"""The plan of a config for an engine has every kernel that the engine's plug-in plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8.integrations import kinds
from moe_fp8.integrations.planning import LoadedEngine, plan_loaded
from moe_fp8.integrations.sglang import model as sglang_model
from moe_fp8.integrations.vllm import model as vllm_model
from moe_fp8.problems import (
    GemmProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
)
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup import ModelDescription, Plan, PlanOptions, describe, gemm_shapes, plan
from moe_fp8.warmup.engines import ENGINES
from moe_fp8.warmup.misses import explain_miss
from moe_fp8.warmup.shapes import experts_per_token
from tests.cpu.sglang_stand_in import Linear, StandIn
from tests.model_configs import in_blocks

#: Tokens of a pass and requests of a decode step.
LIMITS = ((2048, 256), (16384, 64))


@pytest.fixture(autouse=True)
def indexer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-ins look for no linear layers: the tests give them those of the config."""
    monkeypatch.setattr(kinds, "_served", ("indexer",))
    for described in (sglang_model, vllm_model):
        monkeypatch.setattr(described, "get_num_sms", lambda: 132)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = config.get("text_config", config)
    return nested


def loaded_by_vllm(config: dict[str, Any], options: PlanOptions, groups: int) -> LoadedEngine:
    text = text_of(config)
    given = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=options.max_tokens, max_num_seqs=options.max_batch
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=groups, prefill_context_parallel_size=1, use_ubatching=False
        ),
        speculative_config=None,
    )
    sizes = SimpleNamespace(
        max_model_len=text["max_position_embeddings"], hf_text_config=SimpleNamespace(**text)
    )
    return vllm_model.describe_loaded(torch.nn.Linear(2, 2), given, sizes)


def loaded_by_sglang(
    config: dict[str, Any], options: PlanOptions, groups: int, patch: pytest.MonkeyPatch
) -> LoadedEngine:
    text, engine = text_of(config), StandIn(patch)
    engine.schedule.chunked_prefill_size = options.max_tokens
    engine.schedule.max_running_requests = options.max_batch
    engine.parallel.attn_dp_size = groups
    runner = engine.runner_class(Linear(128, 128), **text)
    runner.model_config.context_len = text["max_position_embeddings"]
    return sglang_model.describe_loaded(runner)


def planned_by_plug_in(loaded: LoadedEngine, model: ModelDescription, options: PlanOptions) -> Plan:
    """The plug-in's plan, if the engine has the rank's layers."""
    shapes = [shape for shape in gemm_shapes(model, options) if shape.what not in options.calls.bf16]
    loaded.dense = {(shape.n, shape.k) for shape in shapes if shape.num_experts is None}
    loaded.experts = {(shape.num_experts, shape.n, shape.k) for shape in shapes if shape.num_experts}
    loaded.experts_per_token = experts_per_token(model, options)
    return plan_loaded(loaded)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3_30b", {"tp": 8, "ep": 8}),
        ("qwen3_30b", {"tp": 1, "ep": 1}),
        ("qwen3_235b", {"tp": 4, "ep": 4}),
        ("deepseek_v2_lite", {"tp": 1, "ep": 1}),
        ("glm_45_air", {"tp": 2, "ep": 2}),
        ("deepseek_v32", {"tp": 8, "ep": 8}),
        ("deepseek_v32", {"tp": 8, "ep": 8, "attention_tp": 1}),
        ("glm_53_flash", {"tp": 4, "ep": 4}),
    ],
)
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_plan_of_the_config_has_the_plug_ins(
    engine: str,
    name: str,
    ranks: dict[str, Any],
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The documented options of `moe-fp8 build`: the ranks, the limits and the engine."""
    config = in_blocks(name)
    model = describe(config)
    options = PlanOptions(
        **ranks, max_tokens=limits[0], max_batch=limits[1], engine=engine, batch_invariant=False
    )
    if engine == "vllm":
        loaded = loaded_by_vllm(config, options, options.dp)
    else:
        loaded = loaded_by_sglang(config, options, options.dp, monkeypatch)
    specs = set(plan(model, options).specs)
    missing = [str(spec) for spec in planned_by_plug_in(loaded, model, options).specs if spec not in specs]
    assert not missing


def test_sglang_prefills_in_the_masked_layout() -> None:
    options = PlanOptions(tp=8, ep=8, engine="sglang", max_tokens=16384, max_batch=64)
    planned = plan(describe(in_blocks("qwen3_30b")), options)
    assert max(last for row in planned.rows if row.layout == "masked" for _, last in row.rows) == 16640
    for tokens in range(1, 16385, 97):
        buffer, expected = (tokens // 256 + 1) * 256, (tokens * 8 - 1) // 16 + 1
        assert kernel_spec(GemmProblem("masked", buffer, 1536, 2048, 16, expected)) in planned
    others = plan(planned.model, PlanOptions(tp=8, ep=8, max_batch=60)).rows
    assert max(last for row in others if row.layout == "masked" for _, last in row.rows) == 128


def test_vllm_prefills_in_the_masked_layout_of_low_latency_dispatch() -> None:
    options = PlanOptions(tp=8, attention_tp=4, ep=8, engine="vllm", max_tokens=2048, max_batch=64)
    planned = plan(describe(in_blocks("qwen3_30b")), options)
    for expected in range(1, 4097, 31):
        assert kernel_spec(GemmProblem("masked", 4096, 1536, 2048, 16, expected)) in planned


@pytest.mark.parametrize(
    ("engine", "name", "pages", "prefilled", "heads"),
    [
        ("vllm", "glm_53_flash", (32, 64), 32, 32),
        ("sglang", "glm_53_flash", (64,), 32, 16),
        (None, "glm_53_flash", (64,), 16, 16),
        ("vllm", "deepseek_v32", (64,), 32, 32),
        (None, "deepseek_v32", (64,), 16, 16),
    ],
)
def test_pages_and_heads_are_those_of_the_engine(
    engine: str | None, name: str, pages: tuple[int, ...], prefilled: int, heads: int
) -> None:
    """`heads` are those of decode, `prefilled` those of prefill."""
    config = in_blocks(name)
    text_of(config)["index_n_heads"] = 16
    planned = plan(describe(config), PlanOptions(tp=4, ep=4, engine=engine, max_tokens=64, max_batch=4))
    calls: list[Problem] = [
        PagedMqaLogitsProblem(batch, 1, heads, 128, page) for batch in (1, 4) for page in pages
    ]
    calls += [MqaLogitsProblem(64, keys, prefilled, 128) for keys in (64, 4096)]
    calls.append(PagedMqaMetadataProblem(4, 1))
    assert all(kernel_spec(call) in planned for call in calls)
    defines = [dict(spec.defines) for spec in planned.specs if spec.name == "paged_mqa_logits_fp8"]
    assert {(found["PAGE_SIZE"], found["NUM_HEADS"]) for found in defines} == {
        (page, heads) for page in pages
    }


@pytest.mark.parametrize(
    ("engine", "forms"),
    [
        ("vllm", {(0, 0), (1, 0)}),
        ("sglang", {(0, 0), (1, 0), (0, 1)}),
        (None, {(0, 0), (1, 0), (0, 1), (1, 1)}),
    ],
)
def test_prefill_has_the_rows_of_the_engine(engine: str | None, forms: set[tuple[int, int]]) -> None:
    """Full or compressed rows, and rows that are filled or not."""
    options = PlanOptions(tp=8, ep=8, engine=engine, max_tokens=64, max_batch=4)
    planned = plan(describe(in_blocks("deepseek_v32")), options)
    defines = [dict(spec.defines) for spec in planned.specs if spec.name == "mqa_logits_fp8"]
    assert {(found["COMPRESSED"], found["FILL"]) for found in defines} == forms


def test_pages_that_are_given_count() -> None:
    model = describe(in_blocks("glm_53_flash"))
    planned = plan(model, PlanOptions(tp=4, ep=4, engine="vllm", max_tokens=64, max_batch=4, block_size=128))
    assert {
        dict(spec.defines)["PAGE_SIZE"] for spec in planned.specs if spec.name == "paged_mqa_logits_fp8"
    } == {128}


def test_a_page_that_is_missing_is_proposed_beside_those_of_the_engine() -> None:
    model = describe(in_blocks("glm_53_flash"))
    options = PlanOptions(tp=4, ep=4, engine="vllm", max_tokens=64, max_batch=4)
    heads = max(32, model.indexer.num_heads if model.indexer else 0)
    told = explain_miss(str(kernel_spec(PagedMqaLogitsProblem(4, 1, heads, 128, 128))), model, options)
    assert [remedy for remedy, _ in told.remedies] == ["--block-size 32,64,128"]
    # vLLM's logits are fp32. A plan without an engine has bf16, but only for pages of 64 keys.
    for page, remedies in ((64, ["no --engine"]), (32, [])):
        told = explain_miss(
            str(kernel_spec(PagedMqaLogitsProblem(4, 1, heads, 128, page, 132, "bfloat16"))), model, options
        )
        assert [remedy for remedy, _ in told.remedies] == remedies


def test_engines_with_a_top_k_of_their_own_take_any_number_of_keys() -> None:
    config = in_blocks("deepseek_v32")
    text_of(config)["index_topk"] = 8192
    for engine in ("vllm", "sglang"):
        planned = plan(describe(config), PlanOptions(tp=8, ep=8, engine=engine, max_tokens=64, max_batch=4))
        assert "mqa_logits_fp8" in {spec.name for spec in planned.specs}
    others = plan(describe(config), PlanOptions(tp=8, ep=8, max_tokens=64, max_batch=4))
    assert "mqa_logits_fp8" not in {spec.name for spec in others.specs}


def test_engines_compute_in_bf16_if_the_checkpoint_is_in_fp32() -> None:
    config = in_blocks("qwen3_30b")
    options = PlanOptions(engine="vllm", max_tokens=64, max_batch=4)
    expected = plan(describe(config), options)
    text_of(config)["torch_dtype"] = text_of(config)["dtype"] = "float32"
    assert describe(config).dtype == "float32"
    assert plan(describe(config), options).specs == expected.specs
    others = plan(describe(config), PlanOptions(max_tokens=64, max_batch=4))
    assert kernel_spec(QuantizeProblem(64, 2048, "float32", False, 132)) in others, "a caller's own input"
