"""Always-on checks of the indexer's logits; as in `checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError, UnsupportedError
from moe_fp8.ops import checks_cache
from moe_fp8.ops.checks import (
    BF16,
    F32,
    FP8,
    I32,
    contiguous,
    int32_vector,
    out_dtype,
    refuse_device,
    refuse_dtype,
    refuse_layout,
    refuse_shape,
)

HEADS = (8, 16, 32, 64)
MAX_NEXT_N = 8


def logits_dtype(op: str, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, fp32 for None, if logits can be stored as that."""
    return F32 if dtype is None else out_dtype(op, dtype)


def _heads(op: str, q: Tensor) -> None:
    if q.shape[-2] not in HEADS or q.shape[-1] not in checks_cache.HEAD_DIMS:
        raise UnsupportedError(
            f"{op}: q: expected heads in {HEADS} of dimension {checks_cache.HEAD_DIMS}, "
            f"got shape {list(q.shape)}; pad heads with zero weights"
        )


def _logits_out(op: str, out: Tensor, rows: int, columns: int | None) -> None:
    if out.dim() != 2 or out.shape[0] != rows or (columns is not None and out.shape[1] != columns):
        refuse_shape(op, "out", out, f"[{rows}, {'any width' if columns is None else columns}]")
    columns = out.shape[1]
    if out.dtype is not F32 and out.dtype is not BF16:
        refuse_dtype(op, "out", out, "float32 or bfloat16")
    row_stride, column_stride = out.stride()
    if (column_stride != 1 and columns > 1) or (row_stride < columns and rows > 1):
        raise ArgumentError(op, "out", "contiguous rows that do not overlap", f"stride {out.stride()}")


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    out: Tensor,
    compressed: bool,
) -> None:
    """As `mqa_inputs`; out fp32 or bf16 [M, N or any]."""
    op = "mqa_logits_fp8"
    mqa_inputs(op, q, k, k_scale, weights, ks, ke)
    _logits_out(op, out, q.shape[0], None if compressed else k.shape[0])
    if q.get_device() != out.get_device():
        refuse_device(op, q, out=out)


def mqa_inputs(
    op: str, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
) -> None:
    """q fp8 [M,H,D], k fp8 [N,D], k_scale fp32 [N], weights fp32 [M,H], ks and ke int32 [M]."""
    if q.dim() != 3:
        refuse_shape(op, "q", q, "[M, H, D]")
    m, heads, dim = q.shape
    if k.dim() != 2 or k.shape[1] != dim:
        refuse_shape(op, "k", k, f"[N, {dim}]")
    n = k.shape[0]
    if q.dtype is not FP8:
        refuse_dtype(op, "q", q, "float8_e4m3fn")
    if k.dtype is not FP8:
        refuse_dtype(op, "k", k, "float8_e4m3fn")
    _heads(op, q)
    if k_scale.shape != (n,):
        refuse_shape(op, "k_scale", k_scale, f"[{n}]")
    if weights.shape != (m, heads):
        refuse_shape(op, "weights", weights, f"[{m}, {heads}]")
    if k_scale.dtype is not F32:
        refuse_dtype(op, "k_scale", k_scale, "float32")
    if weights.dtype is not F32:
        refuse_dtype(op, "weights", weights, "float32", "call .float() on it")
    int32_vector(op, "ks", ks, m, "the first key of each query")
    int32_vector(op, "ke", ke, m, "one past the last key of each query")
    device = q.get_device()
    if (
        not device == k.get_device() == k_scale.get_device() == weights.get_device()
        or not device == ks.get_device() == ke.get_device()
    ):
        refuse_device(op, q, k=k, k_scale=k_scale, weights=weights, ks=ks, ke=ke)
    contiguous(op, q=q, k=k, k_scale=k_scale, weights=weights)


def _context_lens(op: str, context_lens: Tensor, batch: int, next_n: int) -> None:
    if context_lens.shape != (batch,) and context_lens.shape != (batch, next_n):
        refuse_shape(op, "context_lens", context_lens, f"[{batch}] or [{batch}, {next_n}]")
    if context_lens.dtype is not I32:
        refuse_dtype(op, "context_lens", context_lens, "int32", "call .int() on it")
    if not context_lens.is_contiguous():
        refuse_layout(op, "context_lens", context_lens)
    if not 1 <= next_n <= MAX_NEXT_N:
        raise UnsupportedError(f"{op}: next_n: expected 1 to {MAX_NEXT_N}, got {next_n}")


def _pair_aligned(op: str, name: str, schedule: Tensor) -> None:
    # The kernels read and write its rows as pairs.
    if schedule.data_ptr() & 7:
        raise ArgumentError(op, name, "an 8-byte aligned address", hex(schedule.data_ptr()), "clone it")


def paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, next_n: int, out: Tensor) -> None:
    """context_lens int32 [B] or [B,next_n]; out int32 [num_sms+1, 2]."""
    op = "paged_mqa_logits_metadata"
    if context_lens.dim() not in (1, 2):
        refuse_shape(op, "context_lens", context_lens, "[B] or [B, next_n]")
    _context_lens(op, context_lens, context_lens.shape[0], next_n)
    checks_cache.block_size(op, block_size)
    if out.dim() != 2 or out.shape[1] != 2 or out.shape[0] < 2:
        refuse_shape(op, "out", out, "[num_sms + 1, 2] with num_sms at least 1")
    if out.dtype is not I32:
        refuse_dtype(op, "out", out, "int32")
    if not out.is_contiguous():
        refuse_layout(op, "out", out)
    if context_lens.get_device() != out.get_device():
        refuse_device(op, context_lens, out=out)
    _pair_aligned(op, "out", out)


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    out: Tensor,
) -> None:
    """As `paged_inputs`; metadata int32 [num_sms+1,2], out fp32 or bf16 [B*next_n, any]."""
    op = "paged_mqa_logits_fp8"
    paged_inputs(op, q, kv_cache, weights, context_lens, block_table)
    if metadata.dim() != 2 or metadata.shape[1] != 2 or metadata.shape[0] < 2:
        refuse_shape(op, "metadata", metadata, "[num_sms + 1, 2]", "paged_mqa_logits_metadata makes it")
    if metadata.dtype is not I32:
        refuse_dtype(op, "metadata", metadata, "int32")
    if not metadata.is_contiguous():
        refuse_layout(op, "metadata", metadata)
    _logits_out(op, out, q.shape[0] * q.shape[1], None)
    if not q.get_device() == metadata.get_device() == out.get_device():
        refuse_device(op, q, metadata=metadata, out=out)
    _pair_aligned(op, "metadata", metadata)


def paged_inputs(
    op: str, q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor
) -> None:
    """q fp8 [B,next_n,H,D]; kv_cache uint8 [pages,block,1,D+4]; weights fp32 [B*next_n,H]; the rest int32."""
    if q.dim() != 4:
        refuse_shape(op, "q", q, "[B, next_n, H, D]")
    batch, next_n, heads, dim = q.shape
    if q.dtype is not FP8:
        refuse_dtype(op, "q", q, "float8_e4m3fn")
    _heads(op, q)
    checks_cache.cache_layout(op, kv_cache, dim)
    if weights.shape != (batch * next_n, heads):
        refuse_shape(op, "weights", weights, f"[{batch * next_n}, {heads}]")
    if weights.dtype is not F32:
        refuse_dtype(op, "weights", weights, "float32", "call .float() on it")
    _context_lens(op, context_lens, batch, next_n)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        refuse_shape(op, "block_table", block_table, f"[{batch}, pages of a request]")
    if block_table.dtype is not I32:
        refuse_dtype(op, "block_table", block_table, "int32", "call .int() on it")
    if block_table.stride()[1] != 1 and block_table.shape[1] > 1:
        raise ArgumentError(op, "block_table", "contiguous rows", f"stride {block_table.stride()}")
    device = q.get_device()
    if (
        not device == kv_cache.get_device() == weights.get_device()
        or not device == context_lens.get_device() == block_table.get_device()
    ):
        others = {"kv_cache": kv_cache, "weights": weights, "context_lens": context_lens}
        refuse_device(op, q, **others, block_table=block_table)
    contiguous(op, q=q, weights=weights)
    checks_cache.cache_address(op, kv_cache)
