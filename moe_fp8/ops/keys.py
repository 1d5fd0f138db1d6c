"""Keys that identify repeated calls of an op, so that their launches can be reused.

Two calls of the same op with the same scalars, addresses and tensor attributes pass the same checks and
launch the same kernel with the same parameters. Only the first call must be checked and prepared. Two calls
whose addresses differ, but not their alignment, launch the same kernel with parameters that differ in the
addresses. A key does not include the contents of tensors, because neither checks nor launches read them. A
key does not include the identity of tensors either, because their attributes can change in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

try:
    # One C++ call compares all attributes of all tensors; separate comparisons take four times as long.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:  # it is internal to torch.compile, and torch may remove it
    _TensorGuards = None  # type: ignore[assignment, misc]

_dispatch_keys = torch._C._dispatch_keys

#: The key of a remembered launch: the op, some shapes, a flag for each optional tensor, the scalars, and at
#: the end every tensor's address. After the look-up, `attributes_like` compares the other attributes. (A
#: launch that serves other addresses is remembered under a key without addresses, `launch.form_of`.)
Key: TypeAlias = tuple[object, ...]

#: One call of an op: its key, and every tensor that is given. (A named tuple would take 0.2 us.)
Call: TypeAlias = tuple[Key, tuple[Tensor, ...]]


def attributes_like(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A function that tells whether other tensors equal `tensors` in type, dtype, device, shape and strides.

    It takes as many tensors as `tensors` has. It may return False for equal attributes if the inference or
    autocast mode differs from the mode in which it was made.
    """
    # Guards return False if the same tensor occurs twice.
    if _TensorGuards is None or len({id(tensor) for tensor in tensors}) < len(tensors):
        expected = [_attributes(tensor) for tensor in tensors]
        return lambda *others: expected == [_attributes(tensor) for tensor in others]
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _attributes(tensor: Tensor) -> tuple[object, ...]:
    keys = _dispatch_keys(tensor).raw_repr()  # those of a functional tensor, which has no address, differ
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), keys
