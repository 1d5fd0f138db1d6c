"""The SGLang plug-in's view of a loaded model, and what is planned for it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from moe_fp8.errors import SettingError
from moe_fp8.integrations import planning, sglang
from moe_fp8.integrations.planning import LoadedEngine, plan_loaded
from moe_fp8.problems import GemmProblem
from moe_fp8.specs import kernel_spec
from tests.cpu.sglang_stand_in import (
    Backend,
    Experts,
    Indexer,
    KernelType,
    Linear,
    Qwen3MoeDecoderLayer,
    StandIn,
    TopK,
    engine,
    set_variables,
)

__all__ = ["engine"]


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[LoadedEngine]:
    """What the plug-in plans, in place of the planning."""
    given: list[LoadedEngine] = []
    monkeypatch.setattr(planning, "warm", lambda loaded, undo: given.append(loaded))
    return given


def _load(engine: StandIn, *layers: torch.nn.Module, **text: int) -> Any:
    runner = engine.runner_class(torch.nn.ModuleList(layers), **text)
    runner.load_model()
    return runner


def test_a_loaded_model_is_planned_and_sglangs_warmup_skips_it(
    engine: StandIn, warmed: list[LoadedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang.moe_fp8")
    record = engine.compile_utils._INITIALIZATION_DICT
    record[KernelType.GEMM_NT_F8F8BF16, 64, 128, 1] = True
    sglang.activate(("dense", "experts"))
    layers = (Linear(192, 256), Linear(96, 256), Linear(64, 128, blocks=False), torch.nn.Linear(128, 128))
    _load(engine, *layers, Experts("deep_gemm"), Experts("triton", hidden=512))
    (loaded,) = warmed
    assert (loaded.engine, loaded.dense) == ("sglang", {(192, 256)})
    assert loaded.experts == {(4, 256, 256), (4, 256, 128)} and loaded.experts_per_token == 2
    assert set(record) == {
        (KernelType.GEMM_NT_F8F8BF16, 64, 128, 1),
        (KernelType.GEMM_NT_F8F8BF16, 192, 256, 1),
        *((kind, 256, k, 4) for kind in list(KernelType)[:2] for k in (128, 256)),
    }
    (line,) = caplog.messages
    assert line.startswith("moe_fp8 serves dense, experts in the place of deep_gemm")
    assert line.endswith("serve indexer, everything else")

    _load(engine, Linear(64, 128))
    assert len(warmed) == 2 and len(caplog.messages) == 1
    sglang.deactivate()
    assert list(record) == [(KernelType.GEMM_NT_F8F8BF16, 64, 128, 1)]
    _load(engine, Linear(64, 128))
    assert len(warmed) == 2, "the hook stays and does nothing"
    sglang.activate(("dense",))
    _load(engine, Linear(64, 128), Experts("deep_gemm"))
    assert len(warmed) == 3 and not warmed[2].experts
    assert caplog.messages[1].startswith("moe_fp8 serves dense in"), "other kinds are told"


def test_loading_has_its_arguments_and_its_result(
    engine: StandIn, warmed: list[LoadedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner_class, "load_model", lambda runner, *given, **named: (given, named))
    runner = engine.runner_class(torch.nn.ModuleList([Linear(64, 128)]))
    sglang.activate(("dense",))
    assert runner.load_model(1, weights=2) == ((1,), {"weights": 2}) and len(warmed) == 1
    sglang.deactivate()
    assert runner.load_model(1, weights=2) == ((1,), {"weights": 2}) and len(warmed) == 1


def test_the_log_says_that_a_models_experts_do_not_call_deep_gemm(
    engine: StandIn, warmed: list[LoadedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang.moe_fp8")
    sglang.activate(("experts",))
    _load(engine, Experts("triton"))
    assert "the experts of this model, which do not call deep_gemm" in caplog.text


def test_limits_come_from_sglangs_arguments(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense", "experts", "indexer"))
    indexer = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    _load(engine, **indexer)
    engine.schedule.chunked_prefill_size = -1
    engine.schedule.max_running_requests = None
    engine.spec.speculative_num_draft_tokens = 4
    engine.parallel.attn_dp_size = 8
    engine.backend = Backend("triton")
    _load(engine, Linear(64, 128))
    for name in ("flashinfer_deepgemm", "deep_gemm"):  # the first calls deep_gemm from 32 rows on
        engine.backend = Backend(name)
        _load(engine, Linear(64, 128))
        assert warmed[-1].dense == {(64, 128)}
    first, second, *_ = warmed
    assert (first.max_tokens, first.max_batch, first.next_n) == (512, 16, 1)
    assert first.max_positions == 4096, "a context is longer than a chunk"
    assert first.indexer is not None and first.indexer.num_heads == 64 and first.num_sms == (132,)
    assert (second.max_tokens, second.max_batch, second.next_n) == (4096, 4 * 4096, 1)
    assert second.data_parallel == 8 and second.indexer is None
    assert not second.dense, "--fp8-gemm-backend triton"
    # A prefill may be longer than a chunk; without a number of its own, a chunk is a whole prompt.
    for chunk, prefill, most in ((512, 8192, 8192), (None, None, 4096), (0, 256, 4096)):
        engine.schedule.chunked_prefill_size, engine.schedule.max_prefill_tokens = chunk, prefill
        _load(engine, Linear(64, 128), kv_lora_rank=512)
        assert (warmed[-1].max_tokens, warmed[-1].kv_lora_rank) == (most, 512)
    engine.schedule.max_running_requests = 16
    _load(engine, Linear(64, 128))
    assert warmed[-1].max_batch == 4 * 16, "each drafted token counts as a request"
    sglang.activate(("dense",))
    _load(engine, Linear(64, 128), **indexer)
    assert warmed[-1].indexer is None, "SGLang's own kernels serve it"


def test_each_rank_of_context_parallelism_has_the_tokens_of_a_decode_step(
    engine: StandIn, warmed: list[LoadedEngine]
) -> None:
    sglang.activate(("dense", "experts"))
    engine.parallel.attn_dp_size, engine.parallel.attn_cp_size = 2, 4
    _load(engine, Linear(64, 128))
    assert warmed[-1].data_parallel == 8


def test_prefills_and_drafts_may_be_larger_than_a_chunk(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense",))
    engine.schedule.chunked_prefill_size = engine.schedule.max_prefill_tokens = 256
    engine.prefill_graphs.bs = [64, 256]
    engine.longest_chunk = 320  # with dynamic chunks, SGLang first measures longer chunks
    _load(engine, Linear(24576, 4096))
    assert warmed[-1].max_tokens == 320
    assert kernel_spec(GemmProblem("dense", 320, 24576, 4096)) in set(plan_loaded(warmed[-1]).specs)
    engine.prefill_graphs.bs = [64, 512]
    _load(engine, Linear(64, 128))
    assert warmed[-1].max_tokens == 512, "the graph of 512 tokens"
    for backend, sizes in (("disabled", [64, 512]), ("breakable", None), ("full", [])):
        engine.prefill_graphs.backend, engine.prefill_graphs.bs = backend, sizes
        _load(engine, Linear(64, 128))
        assert warmed[-1].max_tokens == 320
    engine.spec.speculative_num_draft_tokens, engine.spec.speculative_eagle_topk = 4, 8
    _load(engine, Linear(64, 128))
    assert warmed[-1].max_batch == 8 * 16, "the branches of the tree"


def test_layers_of_other_formats_are_found(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    """Those of compressed-tensors have other names for the scales and for what calls `deep_gemm`."""
    linear, many, few = Linear(192, 256), Experts("deep_gemm"), Experts("deep_gemm", hidden=512)
    linear.weight_scale = linear.weight_scale_inv
    del linear.weight_scale_inv
    many.scheme, few.top_k = many.quant_method, 1
    del many.quant_method
    sglang.activate(("dense", "experts"))
    _load(engine, linear, many, few)
    (loaded,) = warmed
    assert loaded.dense == {(192, 256)} and loaded.experts_per_token == 2
    assert loaded.experts == {(4, 256, 256), (4, 256, 128), (4, 256, 512), (4, 512, 128)}


def test_routers_tell_the_experts_of_a_token_if_the_experts_do_not(
    engine: StandIn, warmed: list[LoadedEngine]
) -> None:
    """Llama 4, Hunyuan and OLMoE make their experts without `top_k`."""
    experts = Experts("deep_gemm")
    experts.top_k = None
    sglang.activate(("experts",))
    _load(engine, TopK(3), experts, TopK(1))
    _load(engine, TopK(3), Experts("deep_gemm"))
    _load(engine, experts)
    assert [loaded.experts_per_token for loaded in warmed] == [3, 2, 1]


def test_weights_of_other_formats_are_left_out(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    """INT8 in blocks has the names of FP8 in blocks; a batched weight has three dimensions."""
    integers, batched, experts = Linear(192, 256), Linear(192, 256), Experts("deep_gemm")
    integers.weight = torch.nn.Parameter(integers.weight.to(torch.int8), requires_grad=False)
    batched.weight = torch.nn.Parameter(batched.weight[None], requires_grad=False)
    experts.w13_weight = experts.w13_weight.to(torch.int8)
    sglang.activate(("dense", "experts"))
    _load(engine, integers, batched, experts)
    (loaded,) = warmed
    assert not loaded.dense and not loaded.experts


def test_products_of_latent_attention_are_grouped_products(
    engine: StandIn, warmed: list[LoadedEngine]
) -> None:
    """With SGLANG_USE_DEEPGEMM_BMM=1, each head has the place of an expert."""
    attention = torch.nn.Module()
    attention.use_deep_gemm_bmm = True
    attention.w_kc, attention.w_vc = torch.zeros(16, 512, 128), torch.zeros(16, 128, 512)
    sglang.activate(("experts",))
    _load(engine, attention, Experts("triton"))
    sglang.activate(("dense",))
    _load(engine, attention, Linear(64, 128))
    loaded, others = warmed
    assert loaded.experts == {(16, 512, 128), (16, 128, 512)} and not others.experts
    assert {row.layout for row in plan_loaded(loaded).rows} >= {"masked"}


def test_the_plan_has_what_sglang_calls(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense", "experts", "indexer"))
    _load(engine, Linear(192, 256), Experts("deep_gemm"), index_topk=64, index_n_heads=32, index_head_dim=128)
    rows = plan_loaded(warmed[0]).rows
    assert {(row.op, row.layout) for row in rows} == {
        ("gemm_fp8", "dense"),
        ("grouped_gemm_fp8_contiguous", "m_indices"),
        ("grouped_gemm_fp8_masked", "masked"),
        ("mqa_logits_fp8", None),
        ("paged_mqa_logits_fp8", None),
        ("paged_mqa_logits_metadata", None),
    }


def _numbers_of_sms(engine: StandIn, warmed: list[LoadedEngine], *layers: torch.nn.Module) -> Any:
    _load(engine, *layers)
    return warmed[-1].num_sms


def test_only_numbers_of_sms_that_occur_are_planned(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense", "experts", "indexer"))
    layer = Qwen3MoeDecoderLayer()
    assert _numbers_of_sms(engine, warmed, layer, Linear(192, 256)) == (132,)
    engine.overlap.enable_two_batch_overlap = True
    assert _numbers_of_sms(engine, warmed, layer, layer, Linear(192, 256)) == (132, 112)
    assert _numbers_of_sms(engine, warmed, Linear(192, 256)) == (132,), "a layer that leaves DeepEP nothing"
    engine.deepep.use_deepep = False
    assert _numbers_of_sms(engine, warmed, layer) == (132,), "no prefill can run"


def test_an_indexer_calls_with_fewer_sms(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense", "experts", "indexer"))
    assert _numbers_of_sms(engine, warmed, Indexer(), Indexer()) == (132, 72)
    assert _numbers_of_sms(engine, warmed, Indexer(logits_with_pp_recv=True)) == (132, 72, 131)
    assert _numbers_of_sms(engine, warmed, Indexer(alt_stream=None)) == (132,)
    assert _numbers_of_sms(engine, warmed, Indexer(use_dsa_indexer_fusion=True)) == (132,)
    both = Indexer(use_dsa_indexer_fusion=True, dsa_enable_prefill_cp=True)
    assert _numbers_of_sms(engine, warmed, both) == (132, 72)
    pooled = Indexer()
    for name in ("use_dsa_indexer_fusion", "dsa_enable_prefill_cp", "logits_with_pp_recv"):
        delattr(pooled, name)
    assert _numbers_of_sms(engine, warmed, pooled) == (132, 72), "IndexerKPool lacks these"
    sglang.activate(("dense",))
    assert _numbers_of_sms(engine, warmed, Indexer(logits_with_pp_recv=True)) == (132, 72)
    sglang.activate(("indexer",))
    assert _numbers_of_sms(engine, warmed, Indexer(logits_with_pp_recv=True)) == (132, 131)


def test_calls_with_fewer_sms_have_their_kernels(engine: StandIn, warmed: list[LoadedEngine]) -> None:
    sglang.activate(("dense", "experts", "indexer"))
    engine.overlap.enable_two_batch_overlap = True
    weights = (Linear(4096, 2048), Linear(8192, 1536))
    _load(engine, *weights, Qwen3MoeDecoderLayer(), Indexer())
    specs = set(plan_loaded(warmed[0]).specs)
    for layer in weights:
        n, k = layer.weight.shape
        for sms, m in itertools.product((132, 112, 72), range(1, 513)):
            assert kernel_spec(GemmProblem("dense", m, n, k, num_sms=sms)) in specs, (sms, m)


def test_deterministic_inference_needs_our_batch_invariance(
    engine: StandIn, warmed: list[LoadedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.deterministic.enable_deterministic_inference = True
    sglang.activate(("dense",))
    runner = engine.runner_class(torch.nn.ModuleList([Linear(192, 256)]))
    with pytest.raises(SettingError, match=r"MOE_FP8_BATCH_INVARIANT.*--enable-deterministic-inference"):
        runner.load_model()
    assert not runner.loaded and not warmed, "the server stops before it loads weights"
    set_variables(monkeypatch, MOE_FP8_BATCH_INVARIANT="1")
    runner.load_model()
    assert runner.loaded and len(warmed) == 1
    set_variables(monkeypatch)
    sglang.deactivate()
    runner.load_model()


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_engines_log_tells_how_many_kernels_are_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, f"{name}.moe_fp8")
    frozen: list[str] = []
    monkeypatch.setattr(planning, "load_plan", lambda plan: len(plan.specs))
    monkeypatch.setattr(planning.jit, "freeze", frozen.append)
    loaded = LoadedEngine(name, "Model", max_tokens=8, max_batch=8, max_positions=64, num_sms=132)
    loaded.dense.add((64, 128))
    made = planning.warm(loaded, [])
    count = len(made.specs)
    assert count and caplog.messages == [
        f"moe_fp8 planned {count} kernels for Model and loaded {count} of them"
    ]
    assert frozen == ["warn"]
