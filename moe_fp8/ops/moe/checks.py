"""Checks of the arguments of the ops around the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.limits import (
    MAX_EXPERT_GROUPS,
    MAX_EXPERTS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_ROUTED_EXPERTS,
)
from moe_fp8.ops import scales
from moe_fp8.ops.arguments import (
    BF16,
    F32,
    F32_MAX,
    FP8,
    I32,
    IN_DTYPES,
    MAKE_CONTIGUOUS,
    contiguous,
    demand_tensors,
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

#: The kernel of `moe_permute` multiplies groups of 128 columns by the number of a CTA in 32 bits.
_MOST_COLUMNS = 1 << 24


def permute(
    x: Tensor,
    x_scale: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    a: Tensor,
    a_scale: Tensor,
    offsets: Tensor,
    rows: Tensor,
    power_of_two: bool,
) -> None:
    """x [T,K]; topk_ids [T,k]; a fp8 [R,K], a_scale fp32 [R,K/128] MN-major; offsets [E+1]; rows [T,k]."""
    op = "moe_permute"
    if x.dim() != 2 or x.shape[1] % 128 or x.shape[1] == 0:
        refuse_shape(op, "x", x, "[T, K] with K a positive multiple of 128")
    tokens, k = x.shape
    if k > _MOST_COLUMNS:
        raise ArgumentError(op, "x", f"at most {_MOST_COLUMNS} columns", k, "divide the call")
    if x.dtype is FP8:
        if x_scale is None or x_scale.shape != (tokens, k // 128) or x_scale.dtype is not F32:
            got = None if x_scale is None else [*x_scale.shape, x_scale.dtype]
            raise ArgumentError(op, "x_scale", f"fp32 [{tokens}, {k // 128}], as x is FP8", got)
    elif x.dtype is not BF16:
        refuse_dtype(op, "x", x, "bfloat16, or float8_e4m3fn with x_scale")
    elif x_scale is not None:
        raise ArgumentError(op, "x_scale", "None, as x is bfloat16", list(x_scale.shape))
    _rows_apart(op, "x", x)
    if topk_ids.dim() != 2 or topk_ids.shape[0] != tokens:
        refuse_shape(op, "topk_ids", topk_ids, f"[{tokens}, k]")
    if not 1 <= topk_ids.shape[1] <= MAX_EXPERTS_PER_TOKEN:
        refuse_shape(op, "topk_ids", topk_ids, f"[T, k] with k from 1 to {MAX_EXPERTS_PER_TOKEN}")
    if topk_ids.dtype is not I32 and topk_ids.dtype is not torch.int64:
        remedy = "route_topk returns (weights, ids)" if topk_ids.is_floating_point() else "call .int() on it"
        refuse_dtype(op, "topk_ids", topk_ids, "int32 or int64", remedy)
    if topk_ids.stride(1) != 1 and topk_ids.shape[1] > 1 and tokens:
        refuse_layout(op, "topk_ids", topk_ids)
    extent(op, "x", topk_ids.numel(), "rows, those of all places together")
    if a.dim() != 2 or a.shape[1] != k or a.shape[0] < topk_ids.numel():
        refuse_shape(op, "a", a, f"[at least {topk_ids.numel()}, {k}]")
    if a.dtype is not FP8:
        refuse_dtype(op, "a", a, "float8_e4m3fn")
    if not a.is_contiguous() or unaligned(a):
        refuse_layout(op, "a", a)
    if a_scale.shape != (a.shape[0], k // 128):
        refuse_shape(op, "a_scale", a_scale, f"[{a.shape[0]}, {k // 128}]")
    if a_scale.dtype is not F32:
        refuse_dtype(op, "a_scale", a_scale, "float32")
    scales.check_written(op, "a_scale", a_scale)
    if offsets.dim() != 1 or not 2 <= offsets.shape[0] <= MAX_EXPERTS + 1:
        refuse_shape(op, "offsets", offsets, f"[num_experts + 1], 1 to {MAX_EXPERTS} experts")
    if rows.shape != topk_ids.shape:
        refuse_shape(op, "rows", rows, f"{list(topk_ids.shape)}")
    for name, index in (("offsets", offsets), ("rows", rows), ("expert_map", expert_map)):
        if index is not None:
            _int32(op, name, index)
    if expert_map is not None:
        if expert_map.dim() != 1:
            refuse_shape(op, "expert_map", expert_map, "[experts of all ranks]")
        extent(op, "expert_map", expert_map.shape[0], "experts")
    same_device(op, x, topk_ids=topk_ids, a=a, a_scale=a_scale, offsets=offsets, rows=rows)
    same_device(op, x, x_scale=x_scale, expert_map=expert_map)


def gemm_silu_mul(
    a: Tensor,
    a_scale: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    offsets: Tensor,
    expected_m: int | None,
    limit: float | None,
    power_of_two: bool,
    rounded: bool,
    q: Tensor,
    scale: Tensor,
) -> tuple[Any, ...] | None:
    """a fp8 [M,K], w13 fp8 [E,2I,K] interleaved; q fp8 [M,I], scale fp32 [M,I/128].

    If `a_scale` is not MN-major, returns the arguments with converted scales.
    """
    op = "grouped_gemm_silu_mul_fp8"
    if a.dim() != 2 or a.shape[1] % 128 or not a.shape[1]:
        refuse_shape(op, "a", a, "[M, K] with K a positive multiple of 128")
    m, k = a.shape
    if w13.dim() != 3 or w13.shape[2] != k or w13.shape[1] % 256 or not w13.numel():
        refuse_shape(op, "w13", w13, f"[E, 2I, {k}] with I a positive multiple of 128")
    num_experts, n, _ = w13.shape
    extent(op, "a", k, "elements along K")
    extent(op, "a", m, "rows")
    extent(op, "w13", num_experts * n, "rows, those of all experts together")
    expected = {
        "a_scale": (a_scale, (m, k // 128), F32),
        "w13_scale": (w13_scale, (num_experts, n // 128, k // 128), F32),
        "q": (q, (m, n // 2), FP8),
        "scale": (scale, (m, n // 256), F32),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != shape:
            refuse_shape(op, name, tensor, f"{list(shape)}")
        if tensor.dtype is not dtype:
            refuse_dtype(op, name, tensor, str(dtype).removeprefix("torch."))
    for name, tensor in (("a", a), ("w13", w13)):
        if tensor.dtype is not FP8:
            refuse_dtype(op, name, tensor, "float8_e4m3fn")
    contiguous(op, a=a, w13=w13, q=q)
    scales.check_written(op, "scale", scale)
    if not w13_scale.is_contiguous():
        refuse_layout(op, "w13_scale", w13_scale)
    swiglu_limit(op, limit)
    int32_vector(op, "offsets", offsets, num_experts + 1, "the start of each expert's rows, then the end")
    same_device(op, a, a_scale=a_scale, w13=w13, w13_scale=w13_scale, offsets=offsets, q=q, scale=scale)
    mn_major = scales.mn_major(op, a_scale, "gemm_silu_mul_fp8")
    if mn_major is a_scale:
        return None
    return a, mn_major, w13, w13_scale, offsets, expected_m, limit, power_of_two, rounded, q, scale


def combine(y: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """y bf16 [R,N], N % 8 == 0; rows int32 [T,k]; weights fp32 [T,k] or None; out bf16 [T,N]."""
    op = "moe_combine"
    if y.dim() != 2 or y.shape[1] % 8 or y.shape[1] == 0:
        refuse_shape(op, "y", y, "[R, N] with N a positive multiple of 8")
    if rows.dim() != 2 or not 1 <= rows.shape[1] <= MAX_EXPERTS_PER_TOKEN:
        refuse_shape(op, "rows", rows, f"[T, k] with k from 1 to {MAX_EXPERTS_PER_TOKEN}")
    _int32(op, "rows", rows)
    expected = (rows.shape[0], y.shape[1])
    if out.shape != expected:
        refuse_shape(op, "out", out, f"{list(expected)}")
    for name, tensor in (("y", y), ("out", out)):
        if tensor.dtype is not BF16:
            refuse_dtype(op, name, tensor, "bfloat16")
        _rows_apart(op, name, tensor)
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ArgumentError(op, "out", "rows that do not overlap", f"stride {out.stride()}")
    extent(op, "y", max(*y.shape, rows.numel()), "rows and columns, and places of all tokens")
    if weights is not None:
        if weights.shape != rows.shape:
            refuse_shape(op, "weights", weights, f"{list(rows.shape)}")
        if weights.dtype is not F32:
            refuse_dtype(op, "weights", weights, "float32", "call .float() on it")
        if weights.stride(1) != 1 and weights.shape[1] > 1 and weights.shape[0]:
            refuse_layout(op, "weights", weights)
    same_device(op, y, rows=rows, out=out, weights=weights)


def layer_weights(x: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> None:
    """x [T,K]; w13 fp8 [E,2I,K], w2 fp8 [E,K,I], with fp32 scales of 128 x 128 blocks; K and I % 128 == 0.

    The GEMMs check the rest.
    """
    op, k = "fused_moe", x.shape[1]
    demand_tensors(op, {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale})
    if w13.dim() != 3 or w13.shape[2] != k or w13.shape[1] % 256 or not w13.numel():
        refuse_shape(op, "w13", w13, f"[E, 2I, {k}] with I a positive multiple of 128")
    num_experts, width = w13.shape[0], w13.shape[1] // 2
    if num_experts > MAX_EXPERTS:
        refuse_shape(op, "w13", w13, f"[E, 2I, {k}] with at most {MAX_EXPERTS} experts")
    if w2.shape != (num_experts, k, width):
        refuse_shape(op, "w2", w2, f"{[num_experts, k, width]}")
    for name, weight, scale in (("w13_scale", w13, w13_scale), ("w2_scale", w2, w2_scale)):
        expected = (num_experts, -(-weight.shape[1] // 128), -(-weight.shape[2] // 128))
        if scale.shape != expected:
            refuse_shape(op, name, scale, f"{list(expected)}")


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    scoring: str,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    """logits [T,E]; correction_bias fp32 [E] or None; weights fp32 [T,k]; ids int32 or int64 [T,k]."""
    op = "route_topk"
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        refuse_shape(op, "logits", logits, f"[T, E] with E from 1 to {MAX_EXPERTS}")
    if logits.dtype not in IN_DTYPES:
        refuse_dtype(op, "logits", logits, "bfloat16, float16 or float32")
    tokens, num_experts = logits.shape
    extent(op, "logits", tokens, "rows")
    if correction_bias is not None:
        if correction_bias.shape != (num_experts,):
            refuse_shape(op, "correction_bias", correction_bias, f"[{num_experts}]")
        if correction_bias.dtype is not F32:
            refuse_dtype(op, "correction_bias", correction_bias, "float32", "call .float() on it, once")
        if not correction_bias.is_contiguous():
            refuse_layout(op, "correction_bias", correction_bias)
    if scoring not in ("softmax", "sigmoid"):
        raise ArgumentError(op, "scoring", '"softmax" or "sigmoid"', scoring)
    if not abs(scaling_factor) <= F32_MAX:
        raise ArgumentError(op, "scaling_factor", "a number within float32's range", scaling_factor)
    if ids.dim() != 2 or ids.shape[0] != tokens or not 1 <= ids.shape[1] <= MAX_ROUTED_EXPERTS:
        refuse_shape(op, "ids", ids, f"[{tokens}, k] with k from 1 to {MAX_ROUTED_EXPERTS}")
    if weights.shape != ids.shape:
        refuse_shape(op, "weights", weights, f"{list(ids.shape)}")
    if ids.dtype is not I32 and ids.dtype is not torch.int64:
        refuse_dtype(op, "ids", ids, "int32 or int64")
    if weights.dtype is not F32:
        refuse_dtype(op, "weights", weights, "float32")
    for name, tensor, apart in (("logits", logits, 0), ("weights", weights, 1), ("ids", ids, 1)):
        columns = tensor.shape[1]
        if (columns > 1 and tensor.stride(1) != 1) or (tokens > 1 and tensor.stride(0) < columns * apart):
            overlap = " that do not overlap" if apart else ""
            got = f"stride {tensor.stride()}"
            raise ArgumentError(op, name, f"contiguous rows{overlap}", got, MAKE_CONTIGUOUS)
    _groups(op, num_experts, ids.shape[1], num_expert_group, topk_group)
    same_device(op, logits, weights=weights, ids=ids, correction_bias=correction_bias)


def _groups(op: str, num_experts: int, topk: int, groups: int, kept: int) -> None:
    """The groups divide the experts, and those that are kept have enough experts."""
    if not 1 <= groups <= MAX_EXPERT_GROUPS or num_experts % groups:
        expected = f"a divisor of {num_experts} experts, 1 to {MAX_EXPERT_GROUPS}"
        raise ArgumentError(op, "num_expert_group", expected, groups)
    if not 1 <= kept <= groups:
        raise ArgumentError(op, "topk_group", f"1 to {groups} (num_expert_group)", kept)
    size = num_experts // groups
    if kept < groups and size < 2:
        raise ArgumentError(op, "num_expert_group", "groups of two experts or more", groups)
    if topk > kept * size:
        raise ArgumentError(op, "topk", f"at most {kept * size} experts of {kept} groups", topk)


def _int32(op: str, name: str, index: Tensor) -> None:
    if index.dtype is not I32:
        refuse_dtype(op, name, index, "int32")
    if not index.is_contiguous():
        refuse_layout(op, name, index)


def _rows_apart(op: str, name: str, tensor: Tensor) -> None:
    """Rows are contiguous, 16-byte aligned and a multiple of 16 bytes apart."""
    spaced_rows(op, name, tensor)
    if unaligned(tensor):
        refuse_address(op, name, tensor)
