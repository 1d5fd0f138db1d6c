"""Every kernel that the engine would launch on Hopper is in the plan that it makes at the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8.ops import registry
from moe_fp8.ops.indexer import select
from moe_fp8.problems import (
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
)
from moe_fp8.specs import kernel_spec
from moe_fp8.warmup import load_model
from server_example.backend import plan_kernels
from server_example.model.transformer import Transformer
from tests.demo_model import demo_folder, demo_model, model_run, new_caches

__all__ = ["demo_folder", "demo_model"]

SMS = 132
PREFILL_CHUNK = 256
MAX_BATCH = 8

#: The module and the name of each op that a selection calls.
SELECTION = {
    "mqa_logits_fp8": (select, "mqa_logits_chunk_op"),
    "paged_mqa_logits_metadata": (select, "metadata_op"),
    "paged_mqa_logits_fp8": (select, "paged_logits_op"),
    "indexer_topk": (select, "topk_chunk_op"),
}


#: The ops that a linear layer and a layer of experts call, and the first operands of their public functions.
SEQUENCES: dict[str, tuple[str, ...]] = {
    "quantize_fp8": ("x",),
    "gemm_fp8": ("a", "a_scale", "b"),
    "moe_permute": ("x", "topk_ids"),
    "grouped_gemm_fp8_contiguous": ("a", "a_scale", "b"),
    "silu_mul_quantize": ("x",),
    "moe_combine": ("y", "rows"),
}


def record(monkeypatch: pytest.MonkeyPatch, problems: dict[Problem, None]) -> None:
    """Make the public ops record the problems that their CUDA launches would select kernels for."""

    def problem_of(name: str, args: tuple, kwargs: dict) -> Problem:
        first = args[0]
        if name == "quantize_fp8":
            return QuantizeProblem(*first.shape, "bfloat16", kwargs["power_of_two"], SMS)
        if name == "indexer_quantize_and_cache":
            assert first.dtype is torch.bfloat16
            return IndexerCacheProblem(*first.shape, "bfloat16", kwargs["power_of_two"], SMS)
        if name == "mqa_logits_fp8":
            m, heads, dim = first.shape
            return MqaLogitsProblem(m, args[1].shape[0], heads, dim, *args[6:8], SMS)
        if name == "paged_mqa_logits_metadata":
            return PagedMqaMetadataProblem(first.shape[0], 1, SMS)
        if name == "paged_mqa_logits_fp8":
            batch, next_n, heads, dim = first.shape
            return PagedMqaLogitsProblem(batch, next_n, heads, dim, args[1].shape[1], SMS)
        if name == "indexer_topk":
            return IndexerTopkProblem(*first.shape, "float32", SMS)
        if name == "route_topk":
            return RouteTopkProblem(*first.shape, args[1], "float32", SMS)
        if name == "moe_permute":
            tokens, topk = args[1].shape
            return MoePermuteProblem(
                tokens, topk, first.shape[1], "bfloat16", kwargs["power_of_two"], num_sms=SMS
            )
        if name == "moe_combine":
            return MoeCombineProblem(*args[1].shape, first.shape[1], SMS)
        m, k = first.shape[-2:]
        if name == "silu_mul_quantize":
            experts = None if kwargs.get("masked_m") is None else first.shape[0]
            return SiluMulQuantizeProblem(m, k // 2, experts, kwargs["power_of_two"], num_sms=SMS)
        n = args[2].shape[-2]
        if name == "gemm_fp8":
            return GemmProblem("dense", m, n, k, num_sms=SMS)
        return GemmProblem("offsets", m, n, k, args[2].shape[0], kwargs.get("expected_m"), num_sms=SMS)

    def wrap(module: ModuleType, attribute: str, name: str) -> None:
        original = getattr(module, attribute)

        def op(*args: object, **kwargs: object) -> torch.Tensor:
            problems[problem_of(name, args, kwargs)] = None
            return original(*args, **kwargs)

        monkeypatch.setattr(module, attribute, op)

    def wrap_op(name: str, operands: tuple[str, ...]) -> None:
        op = registry.OPS[name]

        def call(*arguments: Any) -> None:
            given = dict(zip(op.arguments, arguments, strict=True))
            problems[problem_of(name, tuple(given[operand] for operand in operands), given)] = None
            op.call(*arguments)

        monkeypatch.setitem(registry.OPS, name, op._replace(call=call))

    for name in (
        "quantize_fp8",
        "indexer_quantize_and_cache",
        "gemm_fp8",
        "silu_mul_quantize",
        "route_topk",
    ):
        wrap(moe_fp8, name, name)
    for name, operands in SEQUENCES.items():
        wrap_op(name, operands)
    for name, (module, attribute) in SELECTION.items():
        wrap(module, attribute, name)


def test_plan_covers_prefill_and_decode(
    demo_folder: Path, demo_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: dict[Problem, None] = {}
    record(monkeypatch, problems)
    for length in (1, 2, 5, 16, 33, 64, 100, 129, PREFILL_CHUNK):
        model_run(demo_model, length).prefill([3] * length)
    caches = new_caches(demo_model, 4)
    for batch in range(1, MAX_BATCH + 1):
        inputs = {
            "tokens": torch.ones(batch, dtype=torch.int64),
            "context_lens": torch.full((batch,), 3, dtype=torch.int32),
            "block_table": torch.ones(batch, 2, dtype=torch.int32),
        }
        demo_model.decode(inputs, caches)
    kinds = {type(problem) for problem in problems}
    layouts = {problem.layout for problem in problems if isinstance(problem, GemmProblem)}
    assert len(kinds) == 11
    assert layouts == {"dense", "offsets"}
    planned = plan_kernels(demo_folder, PREFILL_CHUNK, MAX_BATCH, SMS)
    missing = {problem: kernel_spec(problem) for problem in problems if kernel_spec(problem) not in planned}
    assert not missing


def test_kernels_are_those_of_bf16_whatever_the_config_names(demo_folder: Path, tmp_path: Path) -> None:
    config = json.loads((demo_folder / "config.json").read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    assert names
    (tmp_path / "config.json").write_text(json.dumps({**config, **dict.fromkeys(names, "float32")}))
    assert load_model(tmp_path).dtype == "float32"
    planned, usual = (
        plan_kernels(folder, PREFILL_CHUNK, MAX_BATCH, SMS) for folder in (tmp_path, demo_folder)
    )
    assert planned.specs == usual.specs
