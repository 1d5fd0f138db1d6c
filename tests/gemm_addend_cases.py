"""Calls of the GEMMs with an addend, and checks of their sums, for the CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_fp8 import gemm_fp8, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked
from tests import cases
from tests.cases import F64, GemmCase


def named_case(
    name: str, rows: Sequence[int], n: int, k: int, device: str = "cpu", seed: int = 0
) -> GemmCase:
    """A case of a layout, or "dense" with all rows, or "dense of rows" with scales of 1 x 128 on b too."""
    if name == "masked":
        return cases.masked_case(rows, -(-max(rows) // 16) * 16, n, k, device, seed)
    if name in ("dense", "dense of rows"):
        case = cases.dense_case(sum(rows), n, k, device, seed)
        if name == "dense":
            return case
        b, b_scale = cases.activations(n, k, cases.generator(seed + 1, device))
        return replace(case, b=b, b_scale=b_scale)
    return cases.contiguous_case(name, rows, n, k, device, seed)


def addend(case: GemmCase, seed: int = 0) -> Tensor:
    """fp32 of the output's shape, about as large as the product."""
    gen = cases.generator(seed + 7, str(case.a.device))
    return 30 * torch.randn(case.out_shape(), generator=gen, device=case.a.device)


def call(case: GemmCase, **options: Any) -> Tensor:
    """The op of the case; `options` may have other operands too."""
    operands = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale} | options
    if case.layout == "dense":
        return gemm_fp8(**operands)
    if case.layout == "masked":
        return grouped_gemm_fp8_masked(**operands, masked_m=case.index)
    return grouped_gemm_fp8_contiguous(**operands, **{case.layout: case.index})


def check_sum(case: GemmCase, out: Tensor, c: Tensor) -> None:
    """Valid rows are `c` plus the product.

    Other rows are `c`, except rows of padding before the last row of an expert within the same 128.
    """
    assert out.dtype is torch.float32
    untouched = torch.ones(out.shape[:-1], dtype=torch.bool, device=out.device)
    for run in case.runs:
        e, start, end = run
        rows = (e, slice(start, end)) if case.layout == "masked" else slice(start, end)
        product = cases.run_reference(case, run)
        expected = c[rows].to(F64) + product
        assert cases.relative_error(out[rows], expected) < cases.F32_TOLERANCE
        # Rounding to fp32, besides the error of the product.
        scale = product.norm(dim=1) + c[rows].to(F64).norm(dim=1)
        assert ((out[rows].to(F64) - expected).norm(dim=1) <= 2 * cases.F32_TOLERANCE * scale).all()
        untouched[rows] = False
        if case.layout == "m_indices":
            untouched[start // 128 * 128 : end] = False
    assert torch.equal(out[untouched], c[untouched])
