"""Always-on checks of the indexer's paged cache, and of the op that writes it; as in `checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError, UnsupportedError
from moe_fp8.ops.checks import refuse_address, refuse_device, refuse_dtype, refuse_layout, refuse_shape

BLOCK_SIZES = (32, 64, 128)
HEAD_DIMS = (32, 64, 128)

_IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOT_DTYPES = (torch.int64, torch.int32)


def block_size(op: str, tokens: int) -> None:
    """A page may have this many tokens."""
    if tokens not in BLOCK_SIZES:
        raise UnsupportedError(f"{op}: block_size: expected one of {BLOCK_SIZES} tokens, got {tokens}")


def cache_layout(op: str, kv_cache: Tensor, dim: int) -> None:
    """uint8 [pages,block,1,dim+4], pages contiguous; the address is left to `cache_address`."""
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or kv_cache.shape[3] != dim + 4:
        refuse_shape(op, "kv_cache", kv_cache, f"[pages, block_size, 1, {dim + 4}]")
    tokens = kv_cache.shape[1]
    block_size(op, tokens)
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
    """A 16-byte boundary; asked once devices are known to agree."""
    if kv_cache.data_ptr() & 15:
        raise ArgumentError(op, "kv_cache", "a 16-byte aligned address", hex(kv_cache.data_ptr()))


def indexer_quantize_and_cache(k: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """k bf16/fp16/fp32 [T,D]; kv_cache uint8 [pages,block,1,D+4]; slot_mapping int64 or int32 [T]."""
    op = "indexer_quantize_and_cache"
    if k.dim() != 2:
        refuse_shape(op, "k", k, "[T, D]", "flatten the leading dimensions")
    rows, dim = k.shape
    if k.dtype not in _IN_DTYPES:
        refuse_dtype(op, "k", k, "bfloat16, float16 or float32")
    if dim not in HEAD_DIMS:
        raise UnsupportedError(f"{op}: k: expected a head dimension of {HEAD_DIMS}, got {dim}")
    row_stride, column_stride = k.stride()
    if column_stride != 1:
        raise ArgumentError(op, "k", "contiguous rows", f"stride {k.stride()}", "call .contiguous() on it")
    if rows > 1 and row_stride * k.element_size() & 15:
        got = f"stride {k.stride()} of {k.dtype}"
        raise ArgumentError(op, "k", "rows a multiple of 16 bytes apart", got, "call .contiguous() on it")
    cache_layout(op, kv_cache, dim)
    if slot_mapping.shape != (rows,):
        refuse_shape(op, "slot_mapping", slot_mapping, f"[{rows}]: the slot of each row")
    if slot_mapping.dtype not in _SLOT_DTYPES:
        refuse_dtype(op, "slot_mapping", slot_mapping, "int64 or int32")
    if not slot_mapping.is_contiguous():
        refuse_layout(op, "slot_mapping", slot_mapping)
    for name, tensor in (("kv_cache", kv_cache), ("slot_mapping", slot_mapping)):
        if tensor.get_device() != k.get_device():
            refuse_device(op, k, **{name: tensor})
    if k.data_ptr() & 15:
        refuse_address(op, "k", k)
    cache_address(op, kv_cache)
