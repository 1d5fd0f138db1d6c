"""Always-on checks of shapes, dtypes, strides and devices: metadata only, no device access.

They run inside the op, so that a call through `torch.ops.moe_fp8` is checked too. Each condition is
a comparison of attributes; text is made only to raise.
"""

from __future__ import annotations

from typing import NoReturn, cast

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import scales
from moe_fp8.problems import GemmLayout, GemmProblem
from moe_fp8.settings import settings

FP8 = torch.float8_e4m3fn
F32 = torch.float32
BF16 = torch.bfloat16
I32 = torch.int32

LAYOUTS = ("m_indices", "psum", "offsets")


def refuse_shape(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"shape {expected}", list(tensor.shape), remedy)


def refuse_dtype(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"dtype {expected}", tensor.dtype, remedy)


def refuse_layout(op: str, name: str, tensor: Tensor) -> NoReturn:
    if not tensor.is_contiguous():
        raise ArgumentError(
            op, name, "a contiguous tensor", f"stride {tensor.stride()}", "call .contiguous() on it"
        )
    refuse_address(op, name, tensor)


def refuse_address(op: str, name: str, tensor: Tensor) -> NoReturn:
    raise ArgumentError(
        op, name, "a 16-byte aligned address", hex(tensor.data_ptr()), "do not slice inside a row; clone it"
    )


def contiguous(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() & 15:
            refuse_layout(op, name, tensor)


def refuse_device(op: str, first: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ArgumentError(op, name, f"device {first.device}", tensor.device, "move it there")


def rank(op: str, name: str, tensor: Tensor, expected: str, dims: int) -> None:
    """`tensor` has `dims` dimensions; `expected` spells its shape."""
    if tensor.dim() != dims:
        refuse_shape(op, name, tensor, expected)


def out_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if an op can allocate its output with it."""
    if dtype is not BF16 and dtype is not F32:
        raise ArgumentError(op, "out_dtype", "torch.bfloat16 or torch.float32", dtype)
    return dtype


def given_out(op: str, out: Tensor, dtype: torch.dtype | None) -> None:
    """A caller's `out` agrees with the caller's `out_dtype`, where both are given."""
    if dtype is not None and out.dtype is not dtype:
        raise ArgumentError(op, "out", f"dtype {dtype} (out_dtype)", out.dtype, "leave out_dtype away")


def quantize(x: Tensor, q: Tensor, scale: Tensor) -> None:
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


def _gemm_operands(
    op: str,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    leading: tuple[int, ...],
    experts: tuple[int, ...],
    n: int,
    k: int,
) -> Tensor:
    """The rules all GEMMs share, for a [*leading, K] and b [*experts, N, K]; returns `a_scale` MN-major."""
    if a.dtype is not FP8:
        refuse_dtype(op, "a", a, "float8_e4m3fn", "quantize_fp8 makes it")
    if b.dtype is not FP8:
        refuse_dtype(op, "b", b, "float8_e4m3fn", "quantize_fp8_blocks makes it")
    if a_scale.dtype is not F32:
        refuse_dtype(op, "a_scale", a_scale, "float32", "convert UE8M0 scales to float32")
    if b_scale.dtype is not F32:
        refuse_dtype(op, "b_scale", b_scale, "float32", "convert UE8M0 scales to float32")
    if k & 127 or k == 0:
        refuse_shape(
            op, "a", a, "[..., M, K] with K a positive multiple of 128", "pad K of a and b with zeros"
        )
    if n & 63 or n == 0:
        refuse_shape(op, "b", b, "[..., N, K] with N a positive multiple of 64", "pad N of b with zero rows")
    if b.shape != (*experts, n, k):
        refuse_shape(op, "b", b, f"[..., N, {k}], with the K of a", "b is [N, K]: do not transpose it")
    groups = k >> 7
    if a_scale.shape != (*leading, groups):
        refuse_shape(op, "a_scale", a_scale, f"{[*leading, groups]}: one scale per 1 x 128 of a")
    if b_scale.shape != (*experts, (n + 127) >> 7, groups):
        blocks = [*experts, (n + 127) >> 7, groups]
        refuse_shape(op, "b_scale", b_scale, f"{blocks}: one scale per 128 x 128 block of b")
    if out.shape != (*leading, n):
        refuse_shape(op, "out", out, f"{[*leading, n]}")
    if out.dtype is not BF16 and out.dtype is not F32:
        refuse_dtype(op, "out", out, "bfloat16 or float32")
    device = a.get_device()
    if not (device == b.get_device() == a_scale.get_device() == b_scale.get_device() == out.get_device()):
        refuse_device(op, a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous() and b_scale.is_contiguous()):
        contiguous(op, a=a, b=b, out=out, b_scale=b_scale)
    if (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15:
        contiguous(op, a=a, b=b, out=out)
    # The usual layout of the dense and contiguous ops, without a call: this is on the path of every launch.
    if a_scale.stride() == (1, (leading[-1] + 3) & -4) and not a_scale.data_ptr() & 15:
        return a_scale
    return a_scale if scales.is_mn_major(a_scale) else scales.converted(op, a_scale)


def int32_vector(op: str, name: str, index: Tensor, length: int, expected: str) -> None:
    if index.shape != (length,):
        refuse_shape(op, name, index, f"[{length}]: {expected}")
    if index.dtype is not I32:
        refuse_dtype(op, name, index, "int32", "call .int() on it")
    if not index.is_contiguous():
        raise ArgumentError(op, name, "a contiguous tensor", f"stride {index.stride()}", "call .contiguous()")


def gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """Dense operands; returns `a_scale` MN-major."""
    if a.dim() != 2:
        refuse_shape("gemm_fp8", "a", a, "[M, K]")
    if b.dim() != 2:
        refuse_shape("gemm_fp8", "b", b, "[N, K]")
    m, k = a.shape
    return _gemm_operands("gemm_fp8", a, a_scale, b, b_scale, out, (m,), (), b.shape[0], k)


def gemm_contiguous(
    layout: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, index: Tensor, out: Tensor
) -> Tensor:
    """Operands of the contiguous layouts; returns `a_scale` MN-major."""
    op = "grouped_gemm_fp8_contiguous"
    if a.dim() != 2:
        refuse_shape(op, "a", a, "[M, K]")
    if b.dim() != 3:
        refuse_shape(op, "b", b, "[E, N, K]")
    m, k = a.shape
    num_experts, n, _ = b.shape
    if layout == "psum":
        int32_vector(op, "psum", index, num_experts, "the end of each expert's rows")
    elif layout == "offsets":
        int32_vector(op, "offsets", index, num_experts + 1, "the start of each expert's rows, then the end")
    elif layout == "m_indices":
        int32_vector(op, "m_indices", index, m, "the expert of each row, -1 for padding")
    else:
        raise ArgumentError(op, "layout", f"one of {LAYOUTS}", layout)
    if index.get_device() != a.get_device():
        refuse_device(op, a, **{layout: index})
    return _gemm_operands(op, a, a_scale, b, b_scale, out, (m,), (num_experts,), n, k)


def gemm_masked(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, masked_m: Tensor, out: Tensor
) -> Tensor:
    """Operands of the masked layout; returns `a_scale` MN-major."""
    op = "grouped_gemm_fp8_masked"
    if a.dim() != 3:
        refuse_shape(op, "a", a, "[E, Mmax, K]")
    if b.dim() != 3:
        refuse_shape(op, "b", b, "[E, N, K]")
    num_experts, m, k = a.shape
    if b.shape[0] != num_experts:
        refuse_shape(op, "b", b, f"[{num_experts}, N, K], with the E of a")
    int32_vector(op, "masked_m", masked_m, num_experts, "the valid rows of each expert")
    if masked_m.get_device() != a.get_device():
        refuse_device(op, a, masked_m=masked_m)
    return _gemm_operands(op, a, a_scale, b, b_scale, out, (num_experts, m), (num_experts,), b.shape[1], k)


def gemm_config(layout: str, a: Tensor, b: Tensor, config: str) -> None:
    """`config` names a tile that this GEMM may use; ConfigError otherwise. The operands have been checked."""
    # Rows decide nothing here; sizes that are symbols while a call is traced become numbers.
    n, k = int(b.shape[-2]), int(a.shape[-1])
    experts = 1 if layout == "dense" else int(b.shape[0])
    invariant = settings().batch_invariant
    heuristics.gemm_config(
        GemmProblem(cast(GemmLayout, layout), 1, n, k, experts, batch_invariant=invariant, config=config)
    )
