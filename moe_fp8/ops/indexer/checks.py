"""Checks of the arguments of the indexer's ops: the cache, the logits, the top-k and the selection."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8 import heuristics, limits
from moe_fp8.errors import ArgumentError, UnsupportedError
from moe_fp8.ops.arguments import (
    BF16,
    CLONE,
    F32,
    FP8,
    I32,
    IN_DTYPES,
    MAKE_CONTIGUOUS,
    MAX_EXTENT,
    contiguous,
    demand_tensors,
    extent,
    int32_vector,
    integer,
    refuse_address,
    refuse_dtype,
    refuse_layout,
    refuse_shape,
    same_device,
    spaced_rows,
    unaligned,
)
from moe_fp8.ops.arguments import rows as rows_of

TOPK = "indexer_topk"

_SLOT_DTYPES = (torch.int64, torch.int32)
_LOGITS_DTYPES = (torch.float32, torch.bfloat16)
_INT32_MAX = 2**31 - 1


def refuse_size(op: str, name: str, reason: str) -> None:
    """Refuse a size that no kernel serves, unless `moe_fp8.limits` gives no reason."""
    if reason:
        raise UnsupportedError(f"{op}: {name}: {reason}")


def page_of(op: str, tokens: int) -> None:
    """Refuse a page size that no kernel serves."""
    refuse_size(op, "block_size", limits.refuse_page(tokens))


def cache_layout(op: str, kv_cache: Tensor, dim: int) -> None:
    """Check a cache, uint8 [pages,block,1,dim+4] with contiguous pages, but for its address."""
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or kv_cache.shape[3] != dim + 4:
        refuse_shape(op, "kv_cache", kv_cache, f"[pages, block_size, 1, {dim + 4}]")
    tokens = kv_cache.shape[1]
    page_of(op, tokens)
    if kv_cache.dtype is not torch.uint8:
        refuse_dtype(op, "kv_cache", kv_cache, "uint8", "view it as uint8")
    page_stride, token_stride, _, byte_stride = kv_cache.stride()
    if (
        byte_stride != 1
        or token_stride != dim + 4
        or (kv_cache.shape[0] > 1 and (page_stride < tokens * (dim + 4) or page_stride & 15))
    ):
        raise ArgumentError(
            op,
            "kv_cache",
            f"contiguous pages of {tokens * (dim + 4)} bytes, page stride a multiple of 16",
            f"stride {kv_cache.stride()}",
        )


def cache_address(op: str, kv_cache: Tensor) -> None:
    """Check that the cache is 16-byte aligned. Call this after the check of the devices."""
    if unaligned(kv_cache):
        raise ArgumentError(op, "kv_cache", "a 16-byte aligned address", hex(kv_cache.data_ptr()))


def indexer_quantize_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool = False
) -> None:
    """k bf16/fp16/fp32 [T,D]; kv_cache uint8 [pages,block,1,D+4]; slot_mapping int64 or int32 [T]."""
    op = "indexer_quantize_and_cache"
    if k.dim() != 2:
        refuse_shape(op, "k", k, "[T, D]", "flatten the leading dimensions")
    rows, dim = k.shape
    extent(op, "k", rows, "rows")
    if k.dtype not in IN_DTYPES:
        refuse_dtype(op, "k", k, "bfloat16, float16 or float32")
    refuse_size(op, "k", limits.refuse_head_dim(dim))
    spaced_rows(op, "k", k)
    cache_layout(op, kv_cache, dim)
    if slot_mapping.shape != (rows,):
        refuse_shape(op, "slot_mapping", slot_mapping, f"[{rows}]: the slot of each row")
    if slot_mapping.dtype not in _SLOT_DTYPES:
        refuse_dtype(op, "slot_mapping", slot_mapping, "int64 or int32")
    if not slot_mapping.is_contiguous():
        refuse_layout(op, "slot_mapping", slot_mapping)
    same_device(op, k, kv_cache=kv_cache, slot_mapping=slot_mapping)
    if unaligned(k):
        refuse_address(op, "k", k)
    cache_address(op, kv_cache)


def _heads(op: str, q: Tensor) -> None:
    refuse_size(op, "q", limits.refuse_heads(q.shape[-2]) or limits.refuse_head_dim(q.shape[-1]))


def _logits_out(op: str, out: Tensor, rows: int, columns: int | None) -> None:
    if out.dim() != 2 or out.shape[0] != rows or (columns is not None and out.shape[1] != columns):
        refuse_shape(op, "out", out, f"[{rows}, {'any width' if columns is None else columns}]")
    columns = out.shape[1]
    if out.dtype is not F32 and out.dtype is not BF16:
        refuse_dtype(op, "out", out, "float32 or bfloat16")
    row_stride, column_stride = out.stride()
    if (column_stride != 1 and columns > 1) or (row_stride < columns and rows > 1):
        raise ArgumentError(op, "out", "contiguous rows that do not overlap", f"stride {out.stride()}")
    extent(op, "out", columns, "columns")


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    compressed: bool,
    fill: bool,
    out: Tensor,
    whole_queries: int = 0,
    whole_keys: int = 0,
) -> None:
    """Check what `mqa_inputs` checks, and out fp32 or bf16 [M, N or any]."""
    op = "mqa_logits_fp8"
    mqa_inputs(op, q, k, k_scale, weights, ks, ke)
    _logits_out(op, out, q.shape[0], None if compressed else k.shape[0])
    if compressed:
        _compressed_sizes(op, q.shape[0], q.shape[1], k.shape[0], out.shape[1])
    same_device(op, q, out=out)


def _compressed_sizes(op: str, queries: int, heads: int, keys: int, columns: int) -> None:
    """Refuse sizes that the kernel cannot count. Full logits of such sizes would not fit any GPU's memory."""
    extent(op, "max_seqlen_k", keys + columns, "keys and columns together")
    most = heuristics.mqa_most_queries(keys, heads)
    if queries > most:
        expected = f"at most {most} queries of {heads} heads against {keys} keys (2^32 tiles of 64 keys)"
        raise ArgumentError(op, "q", expected, queries, "pass the queries in several calls")


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
    if m * heads > MAX_EXTENT or n > MAX_EXTENT:
        extent(op, "q", m * heads, "rows (queries x heads)")
        extent(op, "k", n, "keys")
    if q.dtype is not FP8:
        refuse_dtype(op, "q", q, "float8_e4m3fn")
    if k.dtype is not FP8:
        refuse_dtype(op, "k", k, "float8_e4m3fn")
    _heads(op, q)
    if k_scale.shape != (n,):
        refuse_shape(op, "k_scale", k_scale, f"[{n}]", "pass k_scale[:, 0] of quantize_fp8(k)")
    if weights.shape != (m, heads):
        refuse_shape(op, "weights", weights, f"[{m}, {heads}]")
    if k_scale.dtype is not F32:
        refuse_dtype(op, "k_scale", k_scale, "float32")
    if weights.dtype is not F32:
        refuse_dtype(op, "weights", weights, "float32", "call .float() on it")
    int32_vector(op, "ks", ks, m, "the first key of each query")
    int32_vector(op, "ke", ke, m, "one past the last key of each query")
    device = q.get_device()  # -1 for the CPU and for meta
    if (
        device < 0
        or not device == k.get_device() == k_scale.get_device() == weights.get_device()
        or not device == ks.get_device() == ke.get_device()
    ):
        same_device(op, q, k=k, k_scale=k_scale, weights=weights, ks=ks, ke=ke)
    contiguous(op, k_scale=k_scale)
    rows_of(op, q=q, k=k, weights=weights)


def _context_lens(op: str, context_lens: Tensor, batch: int, next_n: int) -> None:
    if context_lens.shape != (batch,) and context_lens.shape != (batch, next_n):
        refuse_shape(op, "context_lens", context_lens, f"[{batch}] or [{batch}, {next_n}]")
    if context_lens.dtype is not I32:
        refuse_dtype(op, "context_lens", context_lens, "int32", "call .int() on it")
    if not context_lens.is_contiguous():
        refuse_layout(op, "context_lens", context_lens)
    refuse_size(op, "next_n", limits.refuse_next_n(next_n))


def _pair_aligned(op: str, name: str, schedule: Tensor) -> None:
    # The kernels read and write each row of the schedule as a pair.
    if schedule.data_ptr() & 7:
        raise ArgumentError(op, name, "an 8-byte aligned address", hex(schedule.data_ptr()), CLONE)


def paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, next_n: int, out: Tensor) -> None:
    """context_lens int32 [B] or [B,next_n]; out int32 [num_sms+1, 2]."""
    op = "paged_mqa_logits_metadata"
    if context_lens.dim() not in (1, 2):
        refuse_shape(op, "context_lens", context_lens, "[B] or [B, next_n]")
    _context_lens(op, context_lens, context_lens.shape[0], next_n)
    page_of(op, block_size)
    if out.dim() != 2 or out.shape[1] != 2 or out.shape[0] < 2:
        refuse_shape(op, "out", out, "[num_sms + 1, 2] with num_sms at least 1")
    extent(op, "context_lens", context_lens.shape[0] * next_n, "tokens (B x next_n)")
    extent(op, "out", out.shape[0], "workers")
    if out.dtype is not I32:
        refuse_dtype(op, "out", out, "int32")
    if not out.is_contiguous():
        refuse_layout(op, "out", out)
    same_device(op, context_lens, out=out)
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
    """Check what `paged_inputs` checks, metadata int32 [num_sms+1,2], out fp32 or bf16 [B*next_n, any]."""
    op = "paged_mqa_logits_fp8"
    paged_inputs(op, q, kv_cache, weights, context_lens, block_table)
    if metadata.dim() != 2 or metadata.shape[1] != 2 or metadata.shape[0] < 2:
        refuse_shape(op, "metadata", metadata, "[num_sms + 1, 2]", "paged_mqa_logits_metadata makes it")
    if metadata.dtype is not I32:
        refuse_dtype(op, "metadata", metadata, "int32")
    if not metadata.is_contiguous():
        refuse_layout(op, "metadata", metadata)
    extent(op, "metadata", metadata.shape[0], "workers")
    _logits_out(op, out, q.shape[0] * q.shape[1], None)
    same_device(op, q, metadata=metadata, out=out)
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
    extent(op, "q", batch * next_n * heads, "rows (B x next_n x heads)")
    cache_layout(op, kv_cache, dim)
    extent(op, "kv_cache", kv_cache.shape[0], "pages")
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
        device < 0
        or not device == kv_cache.get_device() == weights.get_device()
        or not device == context_lens.get_device() == block_table.get_device()
    ):
        others = {"kv_cache": kv_cache, "weights": weights, "context_lens": context_lens}
        same_device(op, q, **others, block_table=block_table)
    rows_of(op, q=q, weights=weights)
    cache_address(op, kv_cache)


def topk_width(op: str, topk: int) -> int:
    """`topk` as an integer. Refuses a number of columns that no kernel serves."""
    topk = integer(op, "topk", topk)
    if limits.refuse_topk(topk):
        raise ArgumentError(op, "topk", f"1 to {limits.MAX_TOPK}", topk)
    return topk


def _topk_operand(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, remedy: str) -> None:
    if tensor.shape != shape:
        refuse_shape(TOPK, name, tensor, f"{list(shape)}")
    if tensor.dtype is not dtype:
        refuse_dtype(TOPK, name, tensor, f"{dtype}", remedy)
    if not tensor.is_contiguous():
        raise ArgumentError(TOPK, name, "a contiguous tensor", f"stride {tensor.stride()}", MAKE_CONTIGUOUS)


def indexer_topk(
    logits: Tensor,
    topk: int,
    ks: Tensor | None,
    ke: Tensor | None,
    in_order: bool,
    out: Tensor,
    values: Tensor | None,
    first_column: int = 0,
    carried: Tensor | None = None,
) -> None:
    """logits fp32/bf16 [M,N]; ks, ke int32 [M]; out, carried int32 [M,topk], [M,W]; values [M,topk]."""
    if logits.dim() != 2:
        refuse_shape(TOPK, "logits", logits, "[M, N]", "flatten the leading dimensions")
    rows, columns = logits.shape
    extent(TOPK, "logits", rows, "rows")
    if logits.dtype not in _LOGITS_DTYPES:
        refuse_dtype(TOPK, "logits", logits, "float32 or bfloat16")
    if columns > _INT32_MAX:
        raise ArgumentError(TOPK, "logits", f"at most {_INT32_MAX} columns", columns, "take parts of the row")
    row_stride, column_stride = logits.stride()
    if (column_stride != 1 and columns > 1) or (row_stride < 0 and rows > 1):
        got = f"stride {logits.stride()}"
        raise ArgumentError(TOPK, "logits", "contiguous rows", got, MAKE_CONTIGUOUS)
    topk_width(TOPK, topk)
    ints = "call .int() on it"
    _topk_operand("out", out, (rows, topk), torch.int32, "allocate it as int32")
    if ks is not None:
        _topk_operand("ks", ks, (rows,), torch.int32, ints)
    if ke is not None:
        _topk_operand("ke", ke, (rows,), torch.int32, ints)
    if values is not None:
        _topk_operand("values", values, (rows, topk), logits.dtype, "allocate it with the dtype of logits")
    if carried is not None:
        if carried.dim() != 2 or carried.shape[1] > columns:
            refuse_shape(TOPK, "carried", carried, f"[{rows}, at most {columns}]")
        _topk_operand("carried", carried, (rows, carried.shape[1]), torch.int32, ints)
    if not 0 <= first_column <= _INT32_MAX:
        raise ArgumentError(TOPK, "first_column", f"0 to {_INT32_MAX}", first_column)
    same_device(TOPK, logits, ks=ks, ke=ke, out=out, values=values, carried=carried)


def selection_out(op: str, rows: int, topk: int, like: Tensor, out: Tensor | None) -> Tensor:
    """Return `out`, int32 [rows, topk] on the device of `like`; allocate it if it is None."""
    topk_width(op, topk)
    if out is None:
        return torch.empty((rows, topk), dtype=torch.int32, device=like.device)
    demand_tensors(op, {"out": out})
    if out.shape != (rows, topk) or out.dtype is not torch.int32 or not out.is_contiguous():
        got = f"{out.dtype} {list(out.shape)} of stride {out.stride()}"
        raise ArgumentError(op, "out", f"contiguous int32 [{rows}, {topk}]", got)
    same_device(op, like, out=out)
    return out
