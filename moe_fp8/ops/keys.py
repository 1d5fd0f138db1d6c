"""Calls as the launches that are remembered tell them apart.

Two calls of the same op with the same scalars, addresses and tensor attributes pass the same checks and
launch the same kernel with the same parameters, so that only the first need be checked and prepared.
Contents of tensors are no part of this: neither checks nor launches read them. Nor is the identity of
tensors, whose attributes can change in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

try:
    # One call in C++ for all attributes of all tensors; reading them one by one takes four times as long.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:  # it is torch.compile's own, and may go
    _TensorGuards = None  # type: ignore[assignment, misc]

#: What a launch is looked up by, before `attributes_like` has the last word: the op, some shapes, which
#: optional tensors are given, the scalars, every tensor's address.
Key: TypeAlias = tuple[object, ...]

#: One call of an op: its key, and every tensor that is given. (A plain tuple: a named one takes 0.2 us.)
Call: TypeAlias = tuple[Key, tuple[Tensor, ...]]


def attributes_like(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A function of as many tensors: whether type, dtype, device, shape and strides are those of `tensors`.

    It may say no where they are: under another inference or autocast mode than it was made in.
    """
    # Guards say no to a tensor that comes twice.
    if _TensorGuards is None or len({id(tensor) for tensor in tensors}) < len(tensors):
        expected = [_attributes(tensor) for tensor in tensors]
        return lambda *others: expected == [_attributes(tensor) for tensor in others]
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _attributes(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
