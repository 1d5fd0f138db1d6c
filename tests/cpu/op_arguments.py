"""Arguments of every op by their names in its schema, for tests that call ops as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_fp8.ops import registry
from tests import cache_cases, cases
from tests.k_grouped_cases import k_grouped_case

I32 = torch.int32


def _quantize() -> dict[str, Any]:
    q = torch.zeros(5, 256, dtype=torch.float8_e4m3fn)
    scale = torch.empty_strided((5, 2), (1, 8)).zero_()
    return {"x": torch.randn(5, 256), "q": q, "scale": scale, "power_of_two": False}


def _silu_mul() -> dict[str, Any]:
    x = torch.randn(2, 5, 512).bfloat16()
    outputs = {
        "q": torch.zeros(2, 5, 256, dtype=torch.float8_e4m3fn),
        "scale": torch.zeros(2, 2, 8).mT[:, :5],
    }
    named = {"power_of_two": False, "limit": None, "rounded": False}
    return {"x": x, "masked_m": torch.tensor([2, 5], dtype=I32), **outputs, **named}


def _permute() -> dict[str, Any]:
    return {
        "x": torch.randn(3, 256).to(torch.float8_e4m3fn),
        "x_scale": torch.rand(3, 2),
        "topk_ids": torch.tensor([[0, 7], [5, 2], [4, 1]], dtype=I32),
        "expert_map": torch.tensor([-1, 0, 1, -1, 2, 3, -1, 0], dtype=I32),
        "a": torch.zeros(6, 256, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(2, 8).T[:6],
        "offsets": torch.zeros(5, dtype=I32),
        "rows": torch.zeros(3, 2, dtype=I32),
        "power_of_two": False,
    }


def _combine() -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "y": torch.randn(6, 64).to(bf16),
        "rows": torch.tensor([[0, 3], [-1, 2], [1, -1]], dtype=I32),
        "weights": torch.rand(3, 2),
        "out": torch.zeros(3, 64, dtype=bf16),
    }


def _route() -> dict[str, Any]:
    tensors = {"logits": torch.randn(3, 64), "correction_bias": torch.randn(64)}
    outputs = {"weights": torch.zeros(3, 4), "ids": torch.zeros(3, 4, dtype=I32)}
    groups = {"num_expert_group": 8, "topk_group": 4}
    named = {"scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5}
    return {**tensors, **outputs, **groups, **named}


def _cache() -> dict[str, Any]:
    case = cache_cases.cache_case(5, slot_dtype=I32)
    arguments = {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}
    return {**arguments, "power_of_two": False}


def _topk() -> dict[str, Any]:
    names = ("ks", "ke", "out", "values")
    ks, ke = torch.tensor([[0, 3, 5], [9, 7, 5]], dtype=I32)
    tensors = ks, ke, torch.zeros(3, 4, dtype=I32), torch.zeros(3, 4)
    arguments = dict(zip(names, tensors, strict=True))
    named = {"first_column": 0, "carried": torch.zeros(3, 2, dtype=I32)}
    return {"logits": torch.randn(3, 9), "topk": 4, "sorted": False, **arguments, **named}


def _gemm() -> dict[str, Any]:
    case = cases.masked_case((3, 2), 4, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {
        **arguments,
        "masked_m": case.index,
        "expected_m": None,
        "out": case.poisoned(),
        "config": None,
        "accumulate": False,
    }


def _dense() -> dict[str, Any]:
    case = cases.dense_case(3, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    options = {"config": None, "constant_weights": False, "accumulate": False}
    return {**arguments, "out": case.poisoned(), **options}


def _contiguous() -> dict[str, Any]:
    case = cases.contiguous_case("psum", (3, 2), 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    hint = {"index": case.index, "layout": "psum", "expected_m": None}
    options = {"config": None, "constant_weights": False, "accumulate": False}
    return {**arguments, **hint, "out": case.poisoned(), **options}


def _gemm_silu_mul() -> dict[str, Any]:
    case = cases.contiguous_case("offsets", (3, 2), 256, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "w13": case.b, "w13_scale": case.b_scale}
    options = {"expected_m": None, "limit": None, "power_of_two": False, "rounded": False}
    q, scale = torch.zeros(5, 128, dtype=torch.float8_e4m3fn), torch.empty_strided((5, 1), (1, 8)).zero_()
    return {**arguments, "offsets": case.index, **options, "q": q, "scale": scale}


def _k_grouped() -> dict[str, Any]:
    case = k_grouped_case((128, 0, 256), 5, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    return {**dict(zip(names, case.operands(), strict=True)), "out": case.poisoned(), "accumulate": False}


def _mqa() -> dict[str, Any]:
    names = ("q", "k", "k_scale", "weights", "ks", "ke")
    arguments = dict(zip(names, cases.mqa_case(4, 9, 8).arguments(), strict=True))
    flags = {"compressed": False, "fill": True, "whole_queries": 0, "whole_keys": 0}
    return {**arguments, "out": torch.zeros(4, 9), **flags}


def _metadata() -> dict[str, Any]:
    context_lens = torch.tensor([3, 700], dtype=I32)
    return {"context_lens": context_lens, "block_size": 64, "next_n": 1, "out": torch.zeros(5, 2, dtype=I32)}


def _paged() -> dict[str, Any]:
    case = cases.paged_case([64, 128], 1, 8, 64)
    return {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "weights": case.weights,
        "context_lens": case.context_lens,
        "block_table": case.block_table,
        "metadata": torch.zeros(4, 2, dtype=I32),
        "out": torch.zeros(2, 128),
    }


OPS: dict[str, Callable[[], dict[str, Any]]] = {
    "quantize_fp8": _quantize,
    "silu_mul_quantize": _silu_mul,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "route_topk": _route,
    "indexer_quantize_and_cache": _cache,
    "indexer_topk": _topk,
    "_indexer_topk_chunk": _topk,
    "gemm_fp8": _dense,
    "grouped_gemm_fp8_contiguous": _contiguous,
    "grouped_gemm_fp8_masked": _gemm,
    "grouped_gemm_silu_mul_fp8": _gemm_silu_mul,
    "k_grouped_gemm_fp8": _k_grouped,
    "mqa_logits_fp8": _mqa,
    "_mqa_logits_fp8_chunk": _mqa,
    "paged_mqa_logits_metadata": _metadata,
    "paged_mqa_logits_fp8": _paged,
}


def run(op: str, arguments: dict[str, Any]) -> None:
    """Run the op as torch calls it, with its arguments given by name."""
    registered = registry.OPS[op]
    registered.run(*(arguments[name] for name in registered.arguments))


#: The ops whose `a_scale` is converted if it is not MN-major.
SCALED_GEMMS = (
    "gemm_fp8",
    "grouped_gemm_fp8_contiguous",
    "grouped_gemm_fp8_masked",
    "grouped_gemm_silu_mul_fp8",
    "k_grouped_gemm_fp8",
)
