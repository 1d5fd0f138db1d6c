"""Always-on checks of `indexer_topk`; as in `checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.errors import ArgumentError

OP = "indexer_topk"

_DTYPES = (torch.float32, torch.bfloat16)
_INT32_MAX = 2**31 - 1


def width(k: int) -> None:
    """A row may be asked for this many columns."""
    if not 1 <= k <= heuristics.TOPK_MAX_K:
        raise ArgumentError(OP, "k", f"1 to {heuristics.TOPK_MAX_K}", k)


def _contiguous(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, remedy: str) -> None:
    if tensor.shape != shape:
        raise ArgumentError(OP, name, f"shape {list(shape)}", list(tensor.shape))
    if tensor.dtype is not dtype:
        raise ArgumentError(OP, name, f"dtype {dtype}", tensor.dtype, remedy)
    if not tensor.is_contiguous():
        raise ArgumentError(OP, name, "a contiguous tensor", f"stride {tensor.stride()}", "clone it")


def indexer_topk(
    logits: Tensor, k: int, starts: Tensor | None, ends: Tensor | None, out: Tensor, values: Tensor | None
) -> None:
    """logits fp32/bf16 [M,N]; starts, ends int32 [M] or None; out int32 [M,k]; values [M,k] or None."""
    if logits.dim() != 2:
        raise ArgumentError(
            OP, "logits", "shape [M, N]", list(logits.shape), "flatten the leading dimensions"
        )
    rows, columns = logits.shape
    if logits.dtype not in _DTYPES:
        raise ArgumentError(OP, "logits", "dtype float32 or bfloat16", logits.dtype)
    if columns > _INT32_MAX:
        raise ArgumentError(OP, "logits", f"at most {_INT32_MAX} columns", columns, "take parts of the row")
    row_stride, column_stride = logits.stride()
    if (column_stride != 1 and columns > 1) or (row_stride < 0 and rows > 1):
        got = f"stride {logits.stride()}"
        raise ArgumentError(OP, "logits", "contiguous rows", got, "call .contiguous() on it")
    width(k)
    ints = "call .int() on it"
    _contiguous("out", out, (rows, k), torch.int32, "allocate it as int32")
    if starts is not None:
        _contiguous("starts", starts, (rows,), torch.int32, ints)
    if ends is not None:
        _contiguous("ends", ends, (rows,), torch.int32, ints)
    if values is not None:
        _contiguous("values", values, (rows, k), logits.dtype, "allocate it with the dtype of logits")
    for name, tensor in (("starts", starts), ("ends", ends), ("out", out), ("values", values)):
        if tensor is not None and tensor.get_device() != logits.get_device():
            raise ArgumentError(OP, name, f"device {logits.device}", tensor.device, "move it there")
