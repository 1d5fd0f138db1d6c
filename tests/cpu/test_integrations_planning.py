"""Plans of a loaded engine: every call within its limits has its kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.integrations.planning import LoadedEngine, plan_loaded
from moe_fp8.limits import MAX_NEXT_N
from moe_fp8.problems import (
    GemmProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    Problem,
    QuantizeProblem,
    SiluMulQuantizeProblem,
)
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup.models import Indexer

QWEN = {"dense": {(5120, 2048), (2048, 4096)}, "experts": {(128, 1536, 2048), (128, 2048, 768)}}


def engine(**given: object) -> LoadedEngine:
    values = {
        "max_tokens": 2048,
        "max_batch": 64,
        "max_positions": 4096,
        "num_sms": 132,
        "experts_per_token": 8,
    }
    return LoadedEngine("vllm", "Qwen3", **{**values, **QWEN, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", gemm_table.devices())
def test_every_call_within_the_limits_is_planned(device: str) -> None:
    specs = set(plan_loaded(engine()).specs)
    problems: list[Problem] = []
    for m in (1, 7, 64, 65, 1000, 2048):
        problems += [GemmProblem("dense", m, n, k, device=device) for n, k in QWEN["dense"]]
        for experts, n, k in QWEN["experts"]:
            problems.append(GemmProblem("offsets", 8 * m, n, k, experts, device=device))
            problems.append(GemmProblem("m_indices", 8 * m + 127 * experts, n, k, experts, device=device))
        for power_of_two in (False, True):
            problems.append(QuantizeProblem(m, 2048, power_of_two=power_of_two))
            problems.append(SiluMulQuantizeProblem(8 * m, 768, 1, power_of_two, True))
            for wide in (False, True):
                problems.append(MoePermuteProblem(m, 8, 2048, "bfloat16", power_of_two, wide))
                problems.append(MoePermuteProblem(m, 8, 2048, None, power_of_two, wide))
        problems.append(MoeCombineProblem(m, 8, 2048))
    missing = [problem for problem in problems if kernel_spec(problem) not in specs]
    assert not missing


def test_the_tokens_of_other_ranks_and_the_indexer_are_planned() -> None:
    loaded = engine(data_parallel=8, next_n=2, indexer=Indexer(64, 128, 2048))
    specs = set(plan_loaded(loaded).specs)
    tokens = 8 * 2048
    assert kernel_spec(GemmProblem("offsets", 8 * tokens, 2048, 768, 128)) in specs
    for compressed in (False, True):
        assert kernel_spec(MqaLogitsProblem(2048, 4096, 64, 128, compressed, False)) in specs
    for next_n in (1, 2):
        assert kernel_spec(PagedMqaLogitsProblem(64, next_n, 64, 128, 64)) in specs


@pytest.mark.parametrize("device", gemm_table.devices())
def test_linear_layers_get_the_tokens_of_other_ranks(device: str) -> None:
    # SGLang gathers the tokens of all data-parallel groups in front of MLPs.
    specs = set(plan_loaded(engine(max_tokens=256, data_parallel=8, experts=set())).specs)
    for m, (n, k) in itertools.product(range(256, 2049, 64), QWEN["dense"]):
        assert kernel_spec(GemmProblem("dense", m, n, k, device=device)) in specs
        assert kernel_spec(QuantizeProblem(m, k)) in specs


def test_rows_have_room_for_all_choices_and_the_padding_of_all_experts() -> None:
    fewer = {(4, 1536, 2048), (4, 2048, 768)}
    rows = plan_loaded(engine(experts=QWEN["experts"] | fewer)).rows
    most = max(last for row in rows if row.layout == "m_indices" for _, last in row.rows)
    assert most >= 8 * 2048 + 128 * 127


def test_every_number_of_sms_is_planned_and_no_other() -> None:
    several = set(plan_loaded(engine(num_sms=(132, 72))).specs)
    apart = [set(plan_loaded(engine(num_sms=sms)).specs) for sms in (132, 72)]
    assert several == apart[0] | apart[1] and apart[1] - apart[0]
    for m, (n, k) in itertools.product(range(1, 2049, 13), QWEN["dense"]):
        assert kernel_spec(GemmProblem("dense", m, n, k, num_sms=72)) in several
    for name in ("vllm", "sglang"):
        loaded = engine(num_sms=(132, 72))
        loaded.engine = name
        assert plan_loaded(loaded).options.sm_budgets == (132, 72)


def test_an_engine_without_layers_of_ours_has_an_empty_plan() -> None:
    assert plan_loaded(engine(dense=set(), experts=set())).specs == ()


@pytest.mark.parametrize("device", gemm_table.devices())
def test_cached_latents_are_planned(device: str) -> None:
    dense = {(2048, 512), (2048, 4096)}
    loaded = engine(max_tokens=512, max_positions=65536, dense=dense, experts=set(), kv_lora_rank=512)
    specs = set(plan_loaded(loaded).specs)
    for m in (513, 1000, 3000, 4096, 20_000, 65536):
        assert kernel_spec(GemmProblem("dense", m, 2048, 512, device=device)) in specs
    without = set(plan_loaded(engine(max_tokens=512, dense=dense, experts=set())).specs)
    assert without < specs


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("device", gemm_table.devices())
def test_cached_latents_of_many_short_contexts_are_planned(device: str, name: str) -> None:
    # DeepSeek-V2-Lite at TP4. With pages of 64 tokens, vLLM's workspace has room for 4 pages of each request.
    dense = {(1024, 512)}
    loaded = engine(max_batch=256, max_positions=1024, dense=dense, experts=set(), kv_lora_rank=512)
    loaded.engine = name
    specs = set(plan_loaded(loaded).specs)
    for m in (2048, 8192, 15_680, 20_000, 65_536, 131_072):
        assert kernel_spec(GemmProblem("dense", m, 1024, 512, device=device)) in specs
    few = engine(max_batch=4, max_positions=1024, dense=dense, experts=set(), kv_lora_rank=512)
    few.engine = name
    assert set(plan_loaded(few).specs) < specs


def test_drafts_longer_than_the_kernels_take_are_no_error() -> None:
    loaded = engine(next_n=MAX_NEXT_N + 3, max_tokens=64, max_batch=4, indexer=Indexer(64, 128, 2048))
    specs = set(plan_loaded(loaded).specs)
    for next_n in range(1, MAX_NEXT_N + 1):
        assert kernel_spec(PagedMqaLogitsProblem(4, next_n, 64, 128, 64)) in specs


def test_experts_of_other_sizes_are_left_to_the_engines_own_copy() -> None:
    """As linear layers are; the module in the place of `deep_gemm` hands their calls over."""
    loaded = engine(dense=set(), experts=set())
    odd = SimpleNamespace(w13_weight=torch.empty(8, 384, 2880), w2_weight=torch.empty(8, 2880, 192), top_k=4)
    loaded.add_experts(odd)
    assert plan_loaded(loaded).specs == ()
    half = SimpleNamespace(w13_weight=torch.empty(8, 384, 2048), w2_weight=torch.empty(8, 2048, 192), top_k=4)
    loaded.add_experts(half)
    assert loaded.experts == {(8, 384, 2048)}
    assert kernel_spec(GemmProblem("masked", 64, 384, 2048, 8)) in plan_loaded(loaded).specs
