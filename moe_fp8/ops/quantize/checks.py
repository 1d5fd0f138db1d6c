"""Checks of the quantiser's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops.arguments import BF16, F32, FP8, refuse_device, refuse_dtype, refuse_layout, refuse_shape


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> None:
    """x [M,K] bf16/fp16/fp32 contiguous, K % 128 == 0; q fp8 [M,K]; scale fp32 [M,K/128]."""
    op = "quantize_fp8"
    if x.dim() != 2:
        refuse_shape(op, "x", x, "[M, K]", "flatten the leading dimensions")
    m, k = x.shape
    dtype = x.dtype
    if dtype is not BF16 and dtype is not torch.float16 and dtype is not F32:
        refuse_dtype(op, "x", x, "bfloat16, float16 or float32")
    if k % 128 or k == 0:
        refuse_shape(op, "x", x, "[M, K] with K a positive multiple of 128", "pad K with zeros")
    if not x.is_contiguous() or x.data_ptr() & 15:
        refuse_layout(op, "x", x)
    if q.shape != (m, k):
        refuse_shape(op, "q", q, f"[{m}, {k}]")
    if q.dtype is not FP8:
        refuse_dtype(op, "q", q, "float8_e4m3fn")
    if not q.is_contiguous() or q.data_ptr() & 15:
        refuse_layout(op, "q", q)
    if scale.shape != (m, k // 128):
        refuse_shape(op, "scale", scale, f"[{m}, {k // 128}]")
    if scale.dtype is not F32:
        refuse_dtype(op, "scale", scale, "float32")
    if not x.get_device() == q.get_device() == scale.get_device():
        refuse_device(op, x, q=q, scale=scale)
