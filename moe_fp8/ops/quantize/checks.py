"""Checks of the quantizers' arguments."""

from __future__ import annotations

from torch import Tensor

from moe_fp8.ops import scales
from moe_fp8.ops.arguments import (
    BF16,
    F32,
    FP8,
    IN_DTYPES,
    MAX_EXTENT,
    extent,
    int32_vector,
    refuse_address,
    refuse_dtype,
    refuse_layout,
    refuse_shape,
    same_device,
    spaced_rows,
    swiglu_limit,
    unaligned,
)
from moe_fp8.specs import SILU_ROWS


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> None:
    """x [M,K] bf16/fp16/fp32, K % 128 == 0; q fp8 [M,K]; scale fp32 [M,K/128]."""
    op = "quantize_fp8"
    if x.dim() != 2:
        refuse_shape(op, "x", x, "[M, K]", "flatten the leading dimensions")
    m, k = x.shape
    if x.dtype not in IN_DTYPES:
        refuse_dtype(op, "x", x, "bfloat16, float16 or float32")
    if k % 128 or k == 0:
        refuse_shape(op, "x", x, "[M, K] with K a positive multiple of 128", "pad K with zeros")
    if m > MAX_EXTENT or k > MAX_EXTENT:
        extent(op, "x", max(m, k), "rows, and as many columns")
    if not x.is_contiguous():
        spaced_rows(op, "x", x)
    _outputs(op, q, scale, (m, k))
    if not x.get_device() == q.get_device() == scale.get_device():
        same_device(op, x, q=q, scale=scale)
    if unaligned(x):
        refuse_address(op, "x", x)


def _outputs(op: str, q: Tensor, scale: Tensor, shape: tuple[int, ...]) -> None:
    """q fp8 of `shape`, contiguous; scale fp32, one column for 128 columns of q; devices are not checked."""
    if q.shape != shape:
        refuse_shape(op, "q", q, f"{list(shape)}")
    if q.dtype is not FP8:
        refuse_dtype(op, "q", q, "float8_e4m3fn")
    if not q.is_contiguous() or unaligned(q):
        refuse_layout(op, "q", q)
    groups = (*shape[:-1], shape[-1] // 128)
    if scale.shape != groups:
        refuse_shape(op, "scale", scale, f"{list(groups)}")
    if scale.dtype is not F32:
        refuse_dtype(op, "scale", scale, "float32")
    scales.check_written(op, "scale", scale)


def silu_mul_quantize(
    x: Tensor,
    masked_m: Tensor | None,
    q: Tensor,
    scale: Tensor,
    power_of_two: bool,
    limit: float | None,
    rounded: bool = False,
) -> None:
    """x bf16 [M,2I], or [E,M,2I] with masked_m int32 [E]; q fp8 [..,I]; scale fp32 [..,I/128]."""
    op = "silu_mul_quantize"
    if masked_m is None:
        if x.dim() != 2:
            refuse_shape(op, "x", x, "[M, 2I]", "flatten the leading dimensions, or pass masked_m")
    else:
        if x.dim() != 3:
            refuse_shape(op, "x", x, "[E, Mmax, 2I], as masked_m is given")
        int32_vector(op, "masked_m", masked_m, x.shape[0], "the valid rows of each expert")
    if x.dtype is not BF16:
        refuse_dtype(op, "x", x, "bfloat16")
    *leading, width = x.shape
    if width % 256 or width == 0:
        refuse_shape(
            op, "x", x, "[..., 2I] with I a positive multiple of 128", "pad gate and up with zeros each"
        )
    rows, columns = x.shape[-2], width // 2
    experts = 1 if masked_m is None else x.shape[0]
    extent(op, "x", max(experts * rows, width), "rows, those of all experts together, and as many columns")
    extent(op, "x", experts * -(-rows // SILU_ROWS) * (columns // 128), f"tiles of {SILU_ROWS} x 128 of q")
    if not x.is_contiguous():
        spaced_rows(op, "x", x)
    swiglu_limit(op, limit)
    if not x.get_device() == q.get_device() == scale.get_device():
        same_device(op, x, q=q, scale=scale)
    if masked_m is not None and masked_m.get_device() != x.get_device():
        same_device(op, x, masked_m=masked_m)
    if unaligned(x):
        refuse_address(op, "x", x)
    _outputs(op, q, scale, (*leading, width // 2))
