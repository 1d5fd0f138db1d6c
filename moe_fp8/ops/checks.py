"""Always-on checks of shapes, dtypes, strides and devices: metadata only, no device access.

They run inside the op, so that a call through `torch.ops.moe_fp8` is checked too. Each condition is
a comparison of attributes; text is made only to raise.
"""

from __future__ import annotations

from typing import NoReturn, cast

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.errors import ArgumentError, UnsupportedError
from moe_fp8.ops import checks_cache, scales
from moe_fp8.problems import GemmLayout, GemmProblem
from moe_fp8.settings import settings

FP8 = torch.float8_e4m3fn
F32 = torch.float32
BF16 = torch.bfloat16
I32 = torch.int32

LAYOUTS = ("m_indices", "psum", "offsets")
HEADS = (8, 16, 32, 64)
HEAD_DIMS = (32, 64, 128)
MAX_NEXT_N = 8


def _shape(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"shape {expected}", list(tensor.shape), remedy)


def _dtype(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"dtype {expected}", tensor.dtype, remedy)


def _dense(op: str, name: str, tensor: Tensor) -> NoReturn:
    if not tensor.is_contiguous():
        raise ArgumentError(
            op, name, "a contiguous tensor", f"stride {tensor.stride()}", "call .contiguous() on it"
        )
    raise ArgumentError(
        op, name, "a 16-byte aligned address", hex(tensor.data_ptr()), "do not slice inside a row; clone it"
    )


def _first_not_dense(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() & 15:
            _dense(op, name, tensor)


def _device(op: str, first: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ArgumentError(op, name, f"device {first.device}", tensor.device, "move it there")


def rank(op: str, name: str, tensor: Tensor, expected: str, dims: int) -> None:
    """`tensor` has `dims` dimensions; `expected` spells its shape."""
    if tensor.dim() != dims:
        _shape(op, name, tensor, expected)


def out_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if an op can allocate its output with it."""
    if dtype is not BF16 and dtype is not F32:
        raise ArgumentError(op, "out_dtype", "torch.bfloat16 or torch.float32", dtype)
    return dtype


def logits_dtype(op: str, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, fp32 for None, if logits can be stored as that."""
    return F32 if dtype is None else out_dtype(op, dtype)


def given_out(op: str, out: Tensor, dtype: torch.dtype | None) -> None:
    """A caller's `out` agrees with the caller's `out_dtype`, where both are given."""
    if dtype is not None and out.dtype is not dtype:
        raise ArgumentError(op, "out", f"dtype {dtype} (out_dtype)", out.dtype, "leave out_dtype away")


def quantize(x: Tensor, q: Tensor, scale: Tensor) -> None:
    """x [M,K] bf16/fp16/fp32 contiguous, K % 128 == 0; q fp8 [M,K]; scale fp32 [M,K/128]."""
    op = "quantize_fp8"
    if x.dim() != 2:
        _shape(op, "x", x, "[M, K]", "flatten the leading dimensions")
    m, k = x.shape
    dtype = x.dtype
    if dtype is not BF16 and dtype is not torch.float16 and dtype is not F32:
        _dtype(op, "x", x, "bfloat16, float16 or float32")
    if k % 128 or k == 0:
        _shape(op, "x", x, "[M, K] with K a positive multiple of 128", "pad K with zeros")
    if not x.is_contiguous() or x.data_ptr() & 15:
        _dense(op, "x", x)
    if q.shape != (m, k):
        _shape(op, "q", q, f"[{m}, {k}]")
    if q.dtype is not FP8:
        _dtype(op, "q", q, "float8_e4m3fn")
    if not q.is_contiguous() or q.data_ptr() & 15:
        _dense(op, "q", q)
    if scale.shape != (m, k // 128):
        _shape(op, "scale", scale, f"[{m}, {k // 128}]")
    if scale.dtype is not F32:
        _dtype(op, "scale", scale, "float32")
    if not x.get_device() == q.get_device() == scale.get_device():
        _device(op, x, q=q, scale=scale)


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
        _dtype(op, "a", a, "float8_e4m3fn", "quantize_fp8 makes it")
    if b.dtype is not FP8:
        _dtype(op, "b", b, "float8_e4m3fn", "quantize_fp8_blocks makes it")
    if a_scale.dtype is not F32:
        _dtype(op, "a_scale", a_scale, "float32", "convert UE8M0 scales to float32")
    if b_scale.dtype is not F32:
        _dtype(op, "b_scale", b_scale, "float32", "convert UE8M0 scales to float32")
    if k & 127 or k == 0:
        _shape(op, "a", a, "[..., M, K] with K a positive multiple of 128", "pad K of a and b with zeros")
    if n & 63 or n == 0:
        _shape(op, "b", b, "[..., N, K] with N a positive multiple of 64", "pad N of b with zero rows")
    if b.shape != (*experts, n, k):
        _shape(op, "b", b, f"[..., N, {k}], with the K of a", "b is [N, K]: do not transpose it")
    groups = k >> 7
    if a_scale.shape != (*leading, groups):
        _shape(op, "a_scale", a_scale, f"{[*leading, groups]}: one scale per 1 x 128 of a")
    if b_scale.shape != (*experts, (n + 127) >> 7, groups):
        blocks = [*experts, (n + 127) >> 7, groups]
        _shape(op, "b_scale", b_scale, f"{blocks}: one scale per 128 x 128 block of b")
    if out.shape != (*leading, n):
        _shape(op, "out", out, f"{[*leading, n]}")
    if out.dtype is not BF16 and out.dtype is not F32:
        _dtype(op, "out", out, "bfloat16 or float32")
    device = a.get_device()
    if not (device == b.get_device() == a_scale.get_device() == b_scale.get_device() == out.get_device()):
        _device(op, a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous() and b_scale.is_contiguous()):
        _first_not_dense(op, a=a, b=b, out=out, b_scale=b_scale)
    if (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15:
        _first_not_dense(op, a=a, b=b, out=out)
    # The usual layout of the dense and contiguous ops, without a call: this is on the path of every launch.
    if a_scale.stride() == (1, (leading[-1] + 3) & -4) and not a_scale.data_ptr() & 15:
        return a_scale
    return a_scale if scales.is_mn_major(a_scale) else scales.converted(op, a_scale)


def _index(op: str, name: str, index: Tensor, length: int, expected: str) -> None:
    if index.shape != (length,):
        _shape(op, name, index, f"[{length}]: {expected}")
    if index.dtype is not I32:
        _dtype(op, name, index, "int32", "call .int() on it")
    if not index.is_contiguous():
        raise ArgumentError(op, name, "a contiguous tensor", f"stride {index.stride()}", "call .contiguous()")


def gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """Dense operands; returns `a_scale` MN-major."""
    if a.dim() != 2:
        _shape("gemm_fp8", "a", a, "[M, K]")
    if b.dim() != 2:
        _shape("gemm_fp8", "b", b, "[N, K]")
    m, k = a.shape
    return _gemm_operands("gemm_fp8", a, a_scale, b, b_scale, out, (m,), (), b.shape[0], k)


def gemm_contiguous(
    layout: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, index: Tensor, out: Tensor
) -> Tensor:
    """Operands of the contiguous layouts; returns `a_scale` MN-major."""
    op = "grouped_gemm_fp8_contiguous"
    if a.dim() != 2:
        _shape(op, "a", a, "[M, K]")
    if b.dim() != 3:
        _shape(op, "b", b, "[E, N, K]")
    m, k = a.shape
    num_experts, n, _ = b.shape
    if layout == "psum":
        _index(op, "psum", index, num_experts, "the end of each expert's rows")
    elif layout == "offsets":
        _index(op, "offsets", index, num_experts + 1, "the start of each expert's rows, then the end")
    elif layout == "m_indices":
        _index(op, "m_indices", index, m, "the expert of each row, -1 for padding")
    else:
        raise ArgumentError(op, "layout", f"one of {LAYOUTS}", layout)
    if index.get_device() != a.get_device():
        _device(op, a, **{layout: index})
    return _gemm_operands(op, a, a_scale, b, b_scale, out, (m,), (num_experts,), n, k)


def gemm_masked(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, masked_m: Tensor, out: Tensor
) -> Tensor:
    """Operands of the masked layout; returns `a_scale` MN-major."""
    op = "grouped_gemm_fp8_masked"
    if a.dim() != 3:
        _shape(op, "a", a, "[E, Mmax, K]")
    if b.dim() != 3:
        _shape(op, "b", b, "[E, N, K]")
    num_experts, m, k = a.shape
    if b.shape[0] != num_experts:
        _shape(op, "b", b, f"[{num_experts}, N, K], with the E of a")
    _index(op, "masked_m", masked_m, num_experts, "the valid rows of each expert")
    if masked_m.get_device() != a.get_device():
        _device(op, a, masked_m=masked_m)
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


def _heads(op: str, q: Tensor) -> None:
    if q.shape[-2] not in HEADS or q.shape[-1] not in HEAD_DIMS:
        raise UnsupportedError(
            f"{op}: q: expected heads in {HEADS} of dimension {HEAD_DIMS}, got shape {list(q.shape)}; "
            "pad heads with zero weights"
        )


def _logits_out(op: str, out: Tensor, rows: int, columns: int | None) -> None:
    if out.dim() != 2 or out.shape[0] != rows or (columns is not None and out.shape[1] != columns):
        _shape(op, "out", out, f"[{rows}, {'any width' if columns is None else columns}]")
    columns = out.shape[1]
    if out.dtype is not F32 and out.dtype is not BF16:
        _dtype(op, "out", out, "float32 or bfloat16")
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
    """q fp8 [M,H,D], k fp8 [N,D], k_scale fp32 [N], weights fp32 [M,H], ks and ke int32 [M]."""
    op = "mqa_logits_fp8"
    if q.dim() != 3:
        _shape(op, "q", q, "[M, H, D]")
    m, heads, dim = q.shape
    if k.dim() != 2 or k.shape[1] != dim:
        _shape(op, "k", k, f"[N, {dim}]")
    n = k.shape[0]
    if q.dtype is not FP8:
        _dtype(op, "q", q, "float8_e4m3fn")
    if k.dtype is not FP8:
        _dtype(op, "k", k, "float8_e4m3fn")
    _heads(op, q)
    if k_scale.shape != (n,):
        _shape(op, "k_scale", k_scale, f"[{n}]")
    if weights.shape != (m, heads):
        _shape(op, "weights", weights, f"[{m}, {heads}]")
    if k_scale.dtype is not F32:
        _dtype(op, "k_scale", k_scale, "float32")
    if weights.dtype is not F32:
        _dtype(op, "weights", weights, "float32", "call .float() on it")
    _index(op, "ks", ks, m, "the first key of each query")
    _index(op, "ke", ke, m, "one past the last key of each query")
    _logits_out(op, out, m, None if compressed else n)
    device = q.get_device()
    if (
        not device == k.get_device() == k_scale.get_device() == weights.get_device()
        or not device == ks.get_device() == ke.get_device() == out.get_device()
    ):
        _device(op, q, k=k, k_scale=k_scale, weights=weights, ks=ks, ke=ke, out=out)
    _first_not_dense(op, q=q, k=k, k_scale=k_scale, weights=weights)


def _context_lens(op: str, context_lens: Tensor, batch: int, next_n: int) -> None:
    if context_lens.shape != (batch,) and context_lens.shape != (batch, next_n):
        _shape(op, "context_lens", context_lens, f"[{batch}] or [{batch}, {next_n}]")
    if context_lens.dtype is not I32:
        _dtype(op, "context_lens", context_lens, "int32", "call .int() on it")
    if not context_lens.is_contiguous():
        _dense(op, "context_lens", context_lens)
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
        _shape(op, "context_lens", context_lens, "[B] or [B, next_n]")
    _context_lens(op, context_lens, context_lens.shape[0], next_n)
    checks_cache.block_size(op, block_size)
    if out.dim() != 2 or out.shape[1] != 2 or out.shape[0] < 2:
        _shape(op, "out", out, "[num_sms + 1, 2] with num_sms at least 1")
    if out.dtype is not I32:
        _dtype(op, "out", out, "int32")
    if not out.is_contiguous():
        _dense(op, "out", out)
    if context_lens.get_device() != out.get_device():
        _device(op, context_lens, out=out)
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
    """q fp8 [B,next_n,H,D]; kv_cache uint8 [pages,block,1,D+4]; weights fp32 [B*next_n,H]; the rest int32."""
    op = "paged_mqa_logits_fp8"
    if q.dim() != 4:
        _shape(op, "q", q, "[B, next_n, H, D]")
    batch, next_n, heads, dim = q.shape
    if q.dtype is not FP8:
        _dtype(op, "q", q, "float8_e4m3fn")
    _heads(op, q)
    checks_cache.cache_layout(op, kv_cache, dim)
    if weights.shape != (batch * next_n, heads):
        _shape(op, "weights", weights, f"[{batch * next_n}, {heads}]")
    if weights.dtype is not F32:
        _dtype(op, "weights", weights, "float32", "call .float() on it")
    _context_lens(op, context_lens, batch, next_n)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        _shape(op, "block_table", block_table, f"[{batch}, pages of a request]")
    if block_table.dtype is not I32:
        _dtype(op, "block_table", block_table, "int32", "call .int() on it")
    if block_table.stride()[1] != 1 and block_table.shape[1] > 1:
        raise ArgumentError(op, "block_table", "contiguous rows", f"stride {block_table.stride()}")
    if metadata.dim() != 2 or metadata.shape[1] != 2 or metadata.shape[0] < 2:
        _shape(op, "metadata", metadata, "[num_sms + 1, 2]", "paged_mqa_logits_metadata makes it")
    if metadata.dtype is not I32:
        _dtype(op, "metadata", metadata, "int32")
    if not metadata.is_contiguous():
        _dense(op, "metadata", metadata)
    _logits_out(op, out, batch * next_n, None)
    device = q.get_device()
    if (
        not device == kv_cache.get_device() == weights.get_device() == context_lens.get_device()
        or not device == block_table.get_device() == metadata.get_device() == out.get_device()
    ):
        others = {"kv_cache": kv_cache, "weights": weights, "context_lens": context_lens}
        _device(op, q, **others, block_table=block_table, metadata=metadata, out=out)
    _first_not_dense(op, q=q, weights=weights)
    _pair_aligned(op, "metadata", metadata)
    checks_cache.cache_address(op, kv_cache)
