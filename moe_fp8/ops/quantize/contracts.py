"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of the quantizers' index tensors."""

from __future__ import annotations

from torch import Tensor

from moe_fp8.ops import contents


def silu_mul_quantize(x: Tensor, masked_m: Tensor | None) -> None:
    """0 <= masked_m[e] <= Mmax. (The op itself takes another count as the nearest of these.)"""
    if masked_m is not None:
        contents.counts("silu_mul_quantize", "masked_m", masked_m, x.shape[1], "x")
