"""Always-on checks of `indexer_topk`; as in `checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.errors import ArgumentError
from moe_fp8.ops.checks import refuse_device, refuse_dtype, refuse_shape

OP = "indexer_topk"

_DTYPES = (torch.float32, torch.bfloat16)
_INT32_MAX = 2**31 - 1


def width(k: int) -> None:
    """A row may be asked for this many columns."""
    if not 1 <= k <= heuristics.TOPK_MAX_K:
        raise ArgumentError(OP, "k", f"1 to {heuristics.TOPK_MAX_K}", k)


def _contiguous(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, remedy: str) -> None:
    if tensor.shape != shape:
        refuse_shape(OP, name, tensor, f"{list(shape)}")
    if tensor.dtype is not dtype:
        refuse_dtype(OP, name, tensor, f"{dtype}", remedy)
    if not tensor.is_contiguous():
        raise ArgumentError(OP, name, "a contiguous tensor", f"stride {tensor.stride()}", "clone it")


def indexer_topk(
    logits: Tensor,
    k: int,
    starts: Tensor | None,
    ends: Tensor | None,
    out: Tensor,
    values: Tensor | None,
    first_column: int,
    carried: Tensor | None,
) -> None:
    """logits fp32/bf16 [M,N]; starts, ends int32 [M]; out, carried int32 [M,k], [M,W]; values [M,k]."""
    if logits.dim() != 2:
        refuse_shape(OP, "logits", logits, "[M, N]", "flatten the leading dimensions")
    rows, columns = logits.shape
    if logits.dtype not in _DTYPES:
        refuse_dtype(OP, "logits", logits, "float32 or bfloat16")
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
    if carried is not None:
        if carried.dim() != 2 or carried.shape[1] > columns:
            refuse_shape(OP, "carried", carried, f"[{rows}, at most {columns}]")
        _contiguous("carried", carried, (rows, carried.shape[1]), torch.int32, ints)
    if not 0 <= first_column <= _INT32_MAX - columns:
        raise ArgumentError(OP, "first_column", f"0 to {_INT32_MAX - columns}", first_column)
    others = {"starts": starts, "ends": ends, "out": out, "values": values, "carried": carried}
    for name, tensor in others.items():
        if tensor is not None and tensor.get_device() != logits.get_device():
            refuse_device(OP, logits, **{name: tensor})


def selection_out(op: str, rows: int, topk: int, like: Tensor, out: Tensor | None) -> Tensor:
    """`out`, int32 [rows, topk] beside `like`; allocated if None."""
    width(topk)
    if out is None:
        return torch.empty((rows, topk), dtype=torch.int32, device=like.device)
    if out.shape != (rows, topk) or out.dtype is not torch.int32 or not out.is_contiguous():
        got = f"{out.dtype} {list(out.shape)} of stride {out.stride()}"
        raise ArgumentError(op, "out", f"contiguous int32 [{rows}, {topk}]", got)
    return out


def workspace(op: str, tensor: Tensor, like: Tensor) -> None:
    """uint8 [bytes], contiguous, 16-byte aligned, on the device of `like`."""
    if tensor.dim() != 1 or tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
        got = f"{tensor.dtype} {list(tensor.shape)} of stride {tensor.stride()}"
        raise ArgumentError(op, "workspace", "contiguous uint8 [bytes]", got)
    if tensor.data_ptr() & 15:
        raise ArgumentError(op, "workspace", "a 16-byte aligned address", hex(tensor.data_ptr()), "clone it")
    if tensor.device != like.device:
        refuse_device(op, like, workspace=tensor)
