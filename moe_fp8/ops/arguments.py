"""Checks of shapes, dtypes, strides and devices that the ops share; they read metadata, not the device.

Checks run inside the op, so that a call through `torch.ops.moe_fp8` is checked too. Each check compares
attributes; a message is built only for an error.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.modes import get_num_sms
from moe_fp8.problems import InDtype

FP8 = torch.float8_e4m3fn
F32 = torch.float32
BF16 = torch.bfloat16
I32 = torch.int32
F32_MAX = torch.finfo(F32).max

#: The dtypes of values to quantize and of a router's logits, with the names that problems have for them.
IN_DTYPES: dict[torch.dtype, InDtype] = {BF16: "bfloat16", torch.float16: "float16", F32: "float32"}

same_storage = torch._C._is_alias_of  # type: ignore[attr-defined]
_tracing, _dispatch_modes = torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack

#: Remedies for the layout of an argument that may be an output, of which a copy would not do.
MAKE_CONTIGUOUS = "call .contiguous() on it; allocate it contiguous if it is an output"
CLONE = "clone it; give an output memory of its own"

#: Kernels count rows, columns and coordinates in signed 32 bits. The last tile may reach 2^17 further.
MAX_EXTENT = 2**31 - 2**17


def demand_tensors(op: str, named: Mapping[str, object]) -> None:
    """Raise ArgumentError for the first argument that is no tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(op, name, "a tensor", type(value).__name__)


def refuse_shape(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"shape {expected}", list(tensor.shape), remedy)


def refuse_dtype(op: str, name: str, tensor: Tensor, expected: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(op, name, f"dtype {expected}", tensor.dtype, remedy)


def refuse_layout(op: str, name: str, tensor: Tensor) -> NoReturn:
    if not tensor.is_contiguous():
        raise ArgumentError(op, name, "a contiguous tensor", f"stride {tensor.stride()}", MAKE_CONTIGUOUS)
    refuse_address(op, name, tensor)


def refuse_address(op: str, name: str, tensor: Tensor) -> NoReturn:
    raise ArgumentError(
        op, name, "a 16-byte aligned address", hex(tensor.data_ptr()), f"do not slice inside a row; {CLONE}"
    )


def traced() -> bool:
    """Whether calls are traced now: by torch.compile, by an exporter (a dispatch mode) or by `torch.func`.

    Traced tensors have no address and no contents. They are checked when the op runs.
    """
    return _tracing() or _dispatch_modes() > 0 or _transform() is not None


def unaligned(tensor: Tensor) -> bool:
    """Whether 16 does not divide the address. A traced tensor has none, and is checked when the op runs."""
    return not traced() and tensor.data_ptr() & 15 != 0


def contiguous(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or unaligned(tensor):
            refuse_layout(op, name, tensor)


def row_stride(tensor: Tensor) -> int:
    """Elements from one row of `tensor` to the next; its leading dimensions together count the rows.

    Returns 0 if elements within a row are not neighbours, or if no single number leads from every row to the
    next. The stride of a dimension of size 1 does not matter.
    """
    if tensor.is_contiguous():
        return tensor.shape[-1]
    *sizes, columns = tensor.shape
    *strides, column_stride = tensor.stride()
    if column_stride != 1 and columns > 1:
        return 0
    stride, rows = columns, 1
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if rows == 1:
            stride = step
        elif step != stride * rows:
            return 0
        rows *= size
    return stride


def rows(op: str, **tensors: Tensor) -> None:
    """TMA can copy each tensor's rows: `row_stride` is a multiple of 16 bytes, and rows do not overlap."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            stride, columns = row_stride(tensor), tensor.shape[-1]
            if stride < columns or stride * tensor.element_size() & 15:
                evenly = "" if tensor.dim() == 2 else ", at one distance over all leading dimensions"
                raise ArgumentError(
                    op,
                    name,
                    f"contiguous rows that start {columns} elements or more, and a multiple of 16 bytes, "
                    f"apart{evenly}",
                    f"stride {tensor.stride()} of shape {list(tensor.shape)}",
                    MAKE_CONTIGUOUS,
                )
        if unaligned(tensor):
            refuse_address(op, name, tensor)


def spaced_rows(op: str, name: str, tensor: Tensor) -> None:
    """Rows are contiguous and a multiple of 16 bytes apart; they may overlap, or all be the same one.

    The stride of a dimension of size 1 does not matter.
    """
    *strides, column_stride = tensor.stride()
    size = tensor.element_size()
    if (column_stride != 1 and tensor.shape[-1] > 1) or any(
        stride * size & 15 and length > 1 for stride, length in zip(strides, tensor.shape, strict=False)
    ):
        got = f"stride {tensor.stride()} of {tensor.dtype}"
        expected = "contiguous rows that are a multiple of 16 bytes apart"
        raise ArgumentError(op, name, expected, got, MAKE_CONTIGUOUS)


def end_of(tensor: Tensor) -> int:
    """The address behind the last element."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.data_ptr() + tensor.nbytes
    last = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * step
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same device may share an element.

    Columns of one buffer do not, as long as rows are as far apart in both tensors. A single row goes with any
    distance. The rows of an MN-major buffer are columns of its transpose.
    """
    after = other.data_ptr() - one.data_ptr()
    if other.data_ptr() >= end_of(one) or one.data_ptr() >= end_of(other):
        return False
    if not (one.numel() and other.numel()):
        return False
    if not (one.dim() and other.dim()):
        return True
    one, other = map(_with_columns, (one, other))
    distances = {row_stride(x) * x.element_size() for x in (one, other) if prod(x.shape[:-1]) > 1}
    if len(distances) != 1 or 0 in distances:
        return True
    distance = distances.pop()
    columns, others = (tensor.shape[-1] * tensor.element_size() for tensor in (one, other))
    return after % distance < columns or after % distance + others > distance


def _with_columns(x: Tensor) -> Tensor:
    """`x`, or its transpose if neighbours lie in a column, or if `x` is a single row with a stride."""
    if x.stride(-1) != 1 and prod(x.shape[:-1]) == 1 < x.shape[-1]:
        return (x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)).t()
    return x.t() if x.dim() == 2 and x.stride(0) == 1 else x


def apart(
    op: str,
    names: tuple[str, ...],
    tensors: tuple[int, ...],
    written: tuple[int, ...],
    arguments: tuple[Any, ...],
) -> None:
    """No argument that the op writes shares memory with another argument.

    `tensors` and `written`: the positions of tensors, and of outputs.
    """
    for position in written:
        out = arguments[position]
        if out is None:
            continue
        for at in tensors:
            other = arguments[at]
            if other is None or at == position:
                continue
            # Tensors seldom have memory of one allocation, so this comes first.
            if same_storage(out, other) and overlap(out, other):
                expected = f"no memory of {names[at]}"
                raise ArgumentError(
                    op, names[position], expected, "memory that both share", "clone one of them"
                )


def out_apart(op: str, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """The last of `tensors`, an output of a function of several ops, shares no memory with the others.

    A traced call is not checked.
    """
    if not traced():
        last = len(names) - 1
        apart(op, names, tuple(range(last)), (last,), tensors)


def integer(op: str, name: str, value: int, least: int | None = None) -> int:
    """`value` as a Python int, since NumPy's and torch's overflow, and at least `least`. Refuses all else.

    The symbolic sizes of a traced call stay as they are.
    """
    if not isinstance(value, (int, torch.SymInt)):
        try:
            value = operator.index(value)
        except (TypeError, RuntimeError, ValueError):
            raise ArgumentError(op, name, "an integer", value) from None
    if least is not None and value < least:
        raise ArgumentError(op, name, f"at least {least}", value)
    return value


def flag(op: str, name: str, value: object) -> bool:
    """`value` as a bool. It may be a number or a tensor, as torch's ops take them, but no text."""
    if isinstance(value, (str, bytes)):
        raise ArgumentError(op, name, "True or False", value)
    return bool(value)


def swiglu_limit(op: str, limit: float | None) -> None:
    try:
        valid = limit is None or 0 < limit <= F32_MAX
    except TypeError:  # no number
        valid = False
    if not valid:
        raise ArgumentError(op, "limit", "a positive number within float32's range, or None", limit)


def same_device(op: str, first: Tensor, **others: Tensor | None) -> None:
    """Check that the other tensors that are given are on the device of the first."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ArgumentError(op, name, f"device {first.device}", tensor.device, "move it there")


def rank(op: str, name: str, tensor: Tensor, expected: str, dims: int) -> None:
    """Check that `tensor` has `dims` dimensions; `expected` is its shape as text."""
    if tensor.dim() != dims:
        refuse_shape(op, name, tensor, expected)


def out_dtype(op: str, dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Check that an op can allocate its output with `dtype`, and return `dtype`, or `default` for None."""
    if dtype is None:
        return default
    if dtype is not BF16 and dtype is not F32:
        raise ArgumentError(op, "out_dtype", "torch.bfloat16 or torch.float32", dtype)
    return dtype


def given_out(op: str, out: Tensor, dtype: torch.dtype | None) -> None:
    """Check that the dtype of the caller's `out` is the caller's `out_dtype`, if both are given."""
    if dtype is not None and out.dtype is not dtype:
        raise ArgumentError(op, "out", f"dtype {dtype} (out_dtype)", out.dtype, "omit out_dtype")


def outputs(op: str, out: Sequence[Tensor], *names: str) -> None:
    """Check that the caller's `out` has a tensor for each of `names`."""
    if not isinstance(out, (tuple, list)):
        got = type(out).__name__
    elif len(out) != len(names):
        got = f"{len(out)} tensors"
    elif all(isinstance(each, Tensor) for each in out):
        return
    else:
        got = ", ".join(type(each).__name__ for each in out)
    raise ArgumentError(op, "out", f"({', '.join(names)})", got)


def no_overlap(op: str, name: str, tensor: Tensor) -> None:
    """Check an output's strides: each passes all elements of the smaller strides, so no two elements meet."""
    reached = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reached:
                got = f"stride {tensor.stride()} of shape {list(tensor.shape)}"
                raise ArgumentError(op, name, "elements that do not overlap", got, "allocate it contiguous")
            reached += step * (size - 1)


def extent(op: str, name: str, size: int, unit: str) -> None:
    """`size` is at most MAX_EXTENT; `unit` says what it counts."""
    if size > MAX_EXTENT:
        raise ArgumentError(op, name, f"at most {MAX_EXTENT} {unit}", size, "divide the call")


def columns(op: str, name: str, number: int) -> int:
    """Check that an output can have so many columns, and return their number."""
    number = integer(op, name, number, 0)
    extent(op, name, number, "columns")
    return number


def workers(op: str, tensor: Tensor, num_sms: int | None) -> int:
    """`num_sms`, or `get_num_sms()` of the tensor's GPU if `num_sms` is None."""
    if num_sms is None:
        if tensor.device.type != "cuda":
            raise ArgumentError(op, "num_sms", f"a number of workers on {tensor.device}", None, "pass it")
        return get_num_sms(tensor.device)
    num_sms = integer(op, "num_sms", num_sms, 1)
    extent(op, "num_sms", num_sms, "workers")
    return num_sms


def int32_vector(op: str, name: str, index: Tensor, length: int, expected: str) -> None:
    if index.shape != (length,):
        refuse_shape(op, name, index, f"[{length}]: {expected}")
    if index.dtype is not I32:
        refuse_dtype(op, name, index, "int32", "call .int() on it")
    if not index.is_contiguous():
        raise ArgumentError(op, name, "a contiguous tensor", f"stride {index.stride()}", MAKE_CONTIGUOUS)
