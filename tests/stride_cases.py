"""The same values at other strides; what lies between them is NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.cases import NAN_BYTE


def _nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    if like.element_size() == 1:
        return torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=like.device).view(like.dtype)
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def apart(tensor: Tensor, extra: int) -> Tensor:
    """A copy of [..., columns], all its rows `extra` elements further apart."""
    *leading, columns = tensor.shape
    storage = _nan((math.prod(leading), columns + extra), tensor)
    return storage[:, :columns].view(tensor.shape).copy_(tensor)


def behind(tensor: Tensor) -> Tensor:
    """What lies behind every row of a tensor that `apart` made."""
    storage = tensor._base
    assert storage is not None and storage.dim() == 2
    return storage[:, tensor.shape[-1] :]


def padded_scales(scale: Tensor, extra: int) -> Tensor:
    """A copy of [..., M, G], MN-major, whose groups are align(M, 4) + `extra` elements apart."""
    *experts, m, groups = scale.shape
    storage = _nan((*experts, groups, (m + 3) // 4 * 4 + extra), scale)
    return storage.mT[..., :m, :].copy_(scale)


def experts_apart(tensor: Tensor) -> Tensor:
    """A copy of [E, rows, columns] with one more row behind those of each expert."""
    num_experts, rows, columns = tensor.shape
    return _nan((num_experts, rows + 1, columns), tensor)[:, :rows].copy_(tensor)
