"""Workspaces: memory that a caller gives to an op for the op's intermediate results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import demand_tensors, end_of, overlap, same_device, same_storage, traced

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


def check(
    op: str, workspace: Tensor, like: Tensor, names: Sequence[str], others: Sequence[Tensor | None]
) -> None:
    """Raise ArgumentError unless it is uint8 [bytes], contiguous, 16-byte aligned, on `like`'s device.

    `names`, `others`: the op's other tensors, whose memory it may not share.
    """
    try:
        fits = workspace.dim() == 1 and workspace.dtype is torch.uint8 and workspace.is_contiguous()
    except AttributeError:  # such as a number of bytes
        demand_tensors(op, {"workspace": workspace})
        raise
    if not fits:
        got = f"{workspace.dtype} {list(workspace.shape)} of stride {workspace.stride()}"
        raise ArgumentError(op, "workspace", "contiguous uint8 [bytes]", got)
    same_device(op, like, workspace=workspace)
    if traced():
        return
    begin = workspace.data_ptr()
    if begin & 15:
        raise ArgumentError(op, "workspace", "a 16-byte aligned address", hex(begin), "clone it")
    # Every call comes here. A tensor that shares memory begins in this storage, before the workspace ends.
    storage, end = begin - workspace.storage_offset(), begin + workspace.numel()
    for tensor in others:
        if (
            tensor is not None
            and storage <= tensor.data_ptr() < end
            and end_of(tensor) > begin
            and same_storage(workspace, tensor)
            and overlap(workspace, tensor)
        ):
            name = next(name for name, other in zip(names, others, strict=True) if other is tensor)
            expected = f"no memory of {name}"
            raise ArgumentError(op, "workspace", expected, "memory that both share", "clone one of them")


def new(num_bytes: int, like: Tensor) -> Tensor:
    """A workspace on `like`'s device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
