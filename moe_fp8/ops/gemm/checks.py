"""Checks of the GEMMs' arguments; they run on every call that does not reuse an earlier call's launch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias, cast

from torch import Tensor

from moe_fp8 import heuristics, limits
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import scales
from moe_fp8.ops.arguments import (
    BF16,
    F32,
    FP8,
    MAX_EXTENT,
    extent,
    int32_vector,
    overlap,
    refuse_dtype,
    refuse_layout,
    refuse_shape,
    rows,
    same_device,
    unaligned,
)
from moe_fp8.problems import GemmLayout, GemmProblem
from moe_fp8.settings import settings

LAYOUTS = ("m_indices", "psum", "offsets")

_FP32_OUT = "pass out_dtype=torch.float32, or an fp32 out"

#: The kernel that reads 1 x 128 scales of both operands.
_ROWS_KERNEL = "k_grouped_gemm_fp8"


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
    accumulate: bool,
    block: int = 128,
) -> Tensor:
    """Check the rules of all GEMMs, for a [*leading,K] and b [*experts,N,K]; returns `a_scale` MN-major.

    `block`: the rows of b that share a scale: 128, or 1 with scales of any stride.
    """
    if a.dtype is not FP8:
        refuse_dtype(op, "a", a, "float8_e4m3fn", "quantize_fp8 makes it")
    if b.dtype is not FP8:
        refuse_dtype(op, "b", b, "float8_e4m3fn", "quantize_fp8_blocks makes it")
    if a_scale.dtype is not F32:
        refuse_dtype(op, "a_scale", a_scale, "float32", "convert UE8M0 scales to float32")
    if b_scale.dtype is not F32:
        refuse_dtype(op, "b_scale", b_scale, "float32", "convert UE8M0 scales to float32")
    if limits.refuse_k(k):
        refuse_shape(
            op, "a", a, "[..., M, K] with K a positive multiple of 128", "pad K of a and b with zeros"
        )
    if limits.refuse_n(n):
        refuse_shape(op, "b", b, "[..., N, K] with N a positive multiple of 64", "pad N of b with zero rows")
    if b.shape != (*experts, n, k):
        refuse_shape(op, "b", b, f"[..., N, {k}], with the K of a", "b is [N, K]: do not transpose it")
    if max(k, prod(leading), prod(experts) * n) > MAX_EXTENT:
        extent(op, "a", k, "elements along K")
        extent(op, "a", prod(leading), "rows, those of all experts together")
        extent(op, "b", prod(experts) * n, "rows, those of all experts together")
    groups = k >> 7
    if a_scale.shape != (*leading, groups):
        refuse_shape(op, "a_scale", a_scale, f"{[*leading, groups]}: one scale per 1 x 128 of a")
    if b_scale.shape != (*experts, -(-n // block), groups):
        blocks = [*experts, -(-n // block), groups]
        refuse_shape(op, "b_scale", b_scale, f"{blocks}: one scale per {block} x 128 block of b")
    if out.shape != (*leading, n):
        refuse_shape(op, "out", out, f"{[*leading, n]}")
    if out.dtype is not BF16 and out.dtype is not F32:
        refuse_dtype(op, "out", out, "bfloat16 or float32")
    if accumulate and out.dtype is not F32:
        refuse_dtype(op, "out", out, "float32, since c is added", _FP32_OUT)
    device = a.get_device()
    if not (device == b.get_device() == a_scale.get_device() == b_scale.get_device() == out.get_device()):
        same_device(op, a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    if block > 1 and not b_scale.is_contiguous():
        refuse_layout(op, "b_scale", b_scale)
    if (
        not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous())
        or (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15
    ):
        rows(op, a=a, b=b, out=out)
    # Test the usual layout of the dense and contiguous ops without a function call, which saves time.
    if a_scale.stride() == (1, (leading[-1] + 3) & -4) and not unaligned(a_scale):
        return a_scale
    return scales.mn_major(op, a_scale, _ROWS_KERNEL if block == 1 else "gemm_fp8")


#: Result of a check: other arguments to run with, or None to run with the given arguments.
Others: TypeAlias = tuple[Any, ...] | None


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    config: str | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
) -> Others:
    """Check dense operands. Returns the arguments with converted scales, if any are."""
    if a.dim() != 2:
        refuse_shape("gemm_fp8", "a", a, "[M, K]")
    if b.dim() != 2:
        refuse_shape("gemm_fp8", "b", b, "[N, K]")
    m, k = a.shape
    n, row_scaled = b.shape[0], scales.row_scaled(b, b_scale)
    block = 1 if row_scaled else 128
    found = _gemm_operands("gemm_fp8", a, a_scale, b, b_scale, out, (m,), (), n, k, accumulate, block)
    if config is not None:
        _config("dense", a, b, b_scale, config)
    found_b = scales.mn_major("gemm_fp8", b_scale, _ROWS_KERNEL, "b_scale") if row_scaled else b_scale
    if found is a_scale and found_b is b_scale:
        return None
    # The kernel that converts scales may still run.
    constant_weights = constant_weights and found_b is b_scale
    return a, found, b, found_b, out, config, constant_weights, accumulate


def gemm_contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    index: Tensor,
    layout: str,
    expected_m: int | None,
    out: Tensor,
    config: str | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
) -> Others:
    """Check operands of the contiguous layouts; returns as `gemm` does."""
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
    if index.get_device() != a.get_device():  # faster than a call
        same_device(op, a, **{layout: index})
    mn_major = _gemm_operands(op, a, a_scale, b, b_scale, out, (m,), (num_experts,), n, k, accumulate)
    if config is not None:
        _config(layout, a, b, b_scale, config)
    if mn_major is a_scale:
        return None
    return a, mn_major, b, b_scale, index, layout, expected_m, out, config, constant_weights, accumulate


def gemm_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    expected_m: int | None,
    out: Tensor,
    config: str | None = None,
    accumulate: bool = False,
) -> Others:
    """Check operands of the masked layout; returns as `gemm` does."""
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
        same_device(op, a, masked_m=masked_m)
    n = b.shape[1]
    leading, experts = (num_experts, m), (num_experts,)
    mn_major = _gemm_operands(op, a, a_scale, b, b_scale, out, leading, experts, n, k, accumulate)
    if config is not None:
        _config("masked", a, b, b_scale, config)
    if mn_major is a_scale:
        return None
    return a, mn_major, b, b_scale, masked_m, expected_m, out, config, accumulate


def k_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    accumulate: bool = False,
) -> Others:
    """Check operands of the GEMM of ragged K. Returns the arguments with converted scales, if any are."""
    op = "k_grouped_gemm_fp8"
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            refuse_shape(op, name, x, "[rows, K]")
        if x.dtype is not FP8:
            refuse_dtype(op, name, x, "float8_e4m3fn", "quantize_fp8 makes it")
    (m, k), n = a.shape, b.shape[0]
    if k % limits.SCALE_BLOCK:
        refuse_shape(op, "a", a, "[M, K] with K a multiple of 128", "pad K of a and b with zeros")
    if limits.refuse_n(n):
        refuse_shape(op, "b", b, "[N, K] with N a positive multiple of 64", "pad N of b with zero rows")
    if b.shape[1] != k:
        refuse_shape(op, "b", b, f"[N, {k}], with the K of a", "b is [N, K]: do not transpose it")
    for name, scale, height in (("a_scale", a_scale, m), ("b_scale", b_scale, n)):
        if scale.dtype is not F32:
            refuse_dtype(op, name, scale, "float32", "convert UE8M0 scales to float32")
        if scale.shape != (height, k >> 7):
            refuse_shape(op, name, scale, f"{[height, k >> 7]}: one scale per 1 x 128 of {name[0]}")
    if out.shape[1:] != (m, n):
        refuse_shape(op, "out", out, f"[E, {m}, {n}]")
    int32_vector(op, "offsets", offsets, out.shape[0] + 1, "the start of each expert's columns, then the end")
    if out.dtype is not F32:
        refuse_dtype(op, "out", out, "float32")
    same_device(op, a, a_scale=a_scale, b=b, b_scale=b_scale, offsets=offsets, out=out)
    extent(op, "a", k, "elements along K")
    extent(op, "b", n, "rows")
    extent(op, "out", out.shape[0] * m, "rows, those of all experts together")
    rows(op, a=a, b=b, out=out)
    if k == 0:  # no kernel reads the scales
        return None
    found_a = scales.mn_major(op, a_scale, _ROWS_KERNEL)
    found_b = scales.mn_major(op, b_scale, _ROWS_KERNEL, "b_scale")
    if found_a is a_scale and found_b is b_scale:
        return None
    return a, found_a, b, found_b, offsets, out, accumulate


def addend(op: str, c: Tensor, out: Tensor) -> None:
    """`c` and `out` are fp32, of the same shape and on the same device."""
    if out.dtype is not F32:
        refuse_dtype(op, "out", out, "float32, since c is added", _FP32_OUT)
    if c.dtype is not F32:
        refuse_dtype(op, "c", c, "float32")
    if c.shape != out.shape:
        refuse_shape(op, "c", c, f"{list(out.shape)}, as out")
    same_device(op, out, c=c)


def addend_memory(op: str, c: Tensor, out: Tensor) -> bool:
    """`c` and `out`, which `addend` has checked, share all memory or none.

    Returns whether they are the same elements, so that `out` needs no copy of `c`.
    """
    same = c.data_ptr() == out.data_ptr() and all(
        size == 1 or one == other for size, one, other in zip(c.shape, c.stride(), out.stride(), strict=True)
    )
    if not same and not out.is_meta and overlap(c, out):  # the meta device has no memory
        raise ArgumentError(op, "c", "out itself, or no memory of out", "memory that both share", "clone c")
    return same and c.is_neg() == out.is_neg()


def _config(layout: str, a: Tensor, b: Tensor, b_scale: Tensor, config: str) -> None:
    """Raise TileError unless `config` names a tile that this GEMM may use. The operands are valid already."""
    if layout == "dense" and scales.row_scaled(b, b_scale):
        raise ArgumentError(
            "gemm_fp8",
            "config",
            "None where b has scales of 1 x 128",
            config,
            "the selector chooses the tile",
        )
    # The number of rows has no effect here. int() turns the symbolic sizes of a traced call into numbers.
    n, k = int(b.shape[-2]), int(a.shape[-1])
    experts = 1 if layout == "dense" else int(b.shape[0])
    invariant = settings().batch_invariant
    heuristics.gemm_config(
        GemmProblem(cast(GemmLayout, layout), 1, n, k, experts, batch_invariant=invariant, config=config)
    )


def traced_config(layout: str | None, position: int) -> Callable[..., None]:
    """The meta implementation of a GEMM, which checks only that the config is legal.

    `layout`: the GEMM's layout, or None if it is an argument of the call. `position`: the index of the config
    among the arguments after `b_scale`.
    """

    def fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
        if len(rest) > position and rest[position] is not None:
            _config(layout or rest[1], a, b, b_scale, rest[position])

    return fake
