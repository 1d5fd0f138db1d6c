"""Arguments that GEMMs, quantizers, the cache and logits accept, by name, for tests that change one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import moe_fp8
from tests import cache_cases, cases
from tests.k_grouped_cases import k_grouped_case

I32 = torch.int32


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor.float(), tensor.float()], -1).to(tensor.dtype)[..., 0]


def dense() -> dict[str, Any]:
    case = cases.dense_case(4, 64, 256)
    out = case.poisoned()
    return {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale, "out": out}


def dense_of_rows() -> dict[str, Any]:
    """b has scales of 1 x 128."""
    return dense() | {"b_scale": torch.ones(2, 64).T}


def contiguous() -> dict[str, Any]:
    case = cases.contiguous_case("offsets", (3, 2), 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {**arguments, "offsets": case.index, "out": case.poisoned()}


def masked() -> dict[str, Any]:
    case = cases.masked_case((3, 2), 4, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {**arguments, "masked_m": case.index, "out": case.poisoned()}


def k_grouped() -> dict[str, Any]:
    case = k_grouped_case((128, 0, 256), 8, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    return {**dict(zip(names, case.operands(), strict=True)), "out": torch.zeros(case.out_shape())}


def mqa() -> dict[str, Any]:
    case = cases.mqa_case(4, 9, 8)
    names = ("q", "k", "k_scale", "weights", "ks", "ke")
    return {**dict(zip(names, case.arguments(), strict=True)), "out": torch.zeros(4, 9)}


def paged() -> dict[str, Any]:
    case = cases.paged_case([3, 70], 2, 8, 64)
    return {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "weights": case.weights,
        "context_lens": case.context_lens,
        "block_table": case.block_table,
        "metadata": moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=3, next_n=2),
        "max_context_len": 80,
        "out": torch.zeros(4, 80),
    }


def metadata() -> dict[str, Any]:
    return {"context_lens": torch.zeros(3, dtype=I32), "block_size": 64, "num_sms": 4}


def quantize() -> dict[str, Any]:
    return {"x": torch.zeros(3, 256)}


def silu_mul() -> dict[str, Any]:
    out = torch.zeros(2, 3, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 3, 1)
    x = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    return {"x": x, "masked_m": torch.zeros(2, dtype=I32), "limit": 7.0, "out": out}


def cache() -> dict[str, Any]:
    case = cache_cases.cache_case(3)
    return {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}


#: Op -> its function, and what makes arguments that it accepts.
OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "gemm_fp8": (moe_fp8.gemm_fp8, dense),
    "grouped_gemm_fp8_contiguous": (moe_fp8.grouped_gemm_fp8_contiguous, contiguous),
    "grouped_gemm_fp8_masked": (moe_fp8.grouped_gemm_fp8_masked, masked),
    "gemm_fp8 of rows": (moe_fp8.gemm_fp8, dense_of_rows),
    "k_grouped_gemm_fp8": (moe_fp8.k_grouped_gemm_fp8, k_grouped),
    "mqa_logits_fp8": (moe_fp8.mqa_logits_fp8, mqa),
    "paged_mqa_logits_fp8": (moe_fp8.paged_mqa_logits_fp8, paged),
    "paged_mqa_logits_metadata": (moe_fp8.paged_mqa_logits_metadata, metadata),
    "quantize_fp8": (moe_fp8.quantize_fp8, quantize),
    "silu_mul_quantize": (moe_fp8.silu_mul_quantize, silu_mul),
    "indexer_quantize_and_cache": (moe_fp8.indexer_quantize_and_cache, cache),
}

GEMMS = ("gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked")

#: A bad argument in the place of a good one.
Change = Callable[[Any], Any]
