"""Workspaces: memory that a caller gives to an op for what the op computes on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import refuse_device, unaligned

#: Every buffer in a workspace begins at a multiple of this.
_ALIGNMENT = 256


def total_bytes(sizes: Sequence[int]) -> int:
    """The bytes of a workspace with buffers of these sizes."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def buffers(workspace: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Flat uint8 views of the workspace, a view of each size."""
    begin = 0
    for size in sizes:
        yield workspace[begin : begin + size]
        begin += -(-size // _ALIGNMENT) * _ALIGNMENT


def check(op: str, workspace: Tensor, like: Tensor) -> None:
    """Raise ArgumentError unless it is uint8 [bytes], contiguous, 16-byte aligned, on `like`'s device."""
    if workspace.dim() != 1 or workspace.dtype is not torch.uint8 or not workspace.is_contiguous():
        got = f"{workspace.dtype} {list(workspace.shape)} of stride {workspace.stride()}"
        raise ArgumentError(op, "workspace", "contiguous uint8 [bytes]", got)
    if unaligned(workspace):
        address = hex(workspace.data_ptr())
        raise ArgumentError(op, "workspace", "a 16-byte aligned address", address, "clone it")
    if workspace.device != like.device:
        refuse_device(op, like, workspace=workspace)


def new(num_bytes: int, like: Tensor) -> Tensor:
    """A workspace on `like`'s device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)


def given_or_new(op: str, workspace: Tensor | None, like: Tensor, num_bytes: int) -> Tensor:
    """The caller's workspace, or a new one. Raises ArgumentError if the caller's is unfit or too small."""
    if workspace is None:
        return new(num_bytes, like)
    check(op, workspace, like)
    if workspace.numel() < num_bytes:
        raise ArgumentError(op, "workspace", f"at least {num_bytes} bytes", workspace.numel())
    return workspace
