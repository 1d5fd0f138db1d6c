"""The memory of CUDA graphs: what a pool takes, where an address lies, and poison for what nothing may read.

Everything here reads the snapshot of torch's caching allocator. It needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

#: A result of `torch.cuda.graph_pool_handle()`.
Pool: TypeAlias = Any

_NO_POOL = (0, 0)


@dataclass(frozen=True)
class GraphMemory:
    """Bytes of device memory that a runner takes.

    `buffers`: its static inputs. `pool`: everything that torch has reserved for its pool, scratch and
    outputs, those of other runners that share the pool included. `buckets`: how much the pool grew
    when each bucket was captured; the largest bucket is captured first, and smaller ones reuse
    its scratch. On a CPU `pool` is 0 and `buckets` is empty.
    """

    buffers: int
    pool: int
    buckets: dict[int, int] = field(default_factory=dict)


class Block(NamedTuple):
    """A piece of a pool's memory; `used`: a tensor has it."""

    address: int
    size: int
    used: bool


def pool_bytes(pool: Pool) -> int:
    """The bytes that torch has reserved for the graphs of `pool`."""
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if _pool_of(segment) == pool)


def _pool_of(segment: dict[str, Any]) -> tuple[int, ...]:
    return tuple(segment["segment_pool_id"])


def blocks(device: torch.device, pool: Pool = _NO_POOL) -> Iterator[Block]:
    """The blocks of `pool`, or those that belong to no graph."""
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == device.index and _pool_of(segment) == pool:
            address = segment["address"]
            for block in segment["blocks"]:
                yield Block(address, block["size"], block["state"] != "inactive")
                address += block["size"]


def contains(found: list[Block], tensor: Tensor) -> bool:
    """Whether the tensor's address is in one of the blocks."""
    at = tensor.data_ptr()
    return any(block.address <= at < block.address + block.size for block in found)


def poison(device: torch.device, pool: Pool, byte: int) -> None:
    """Fill the whole of `pool`, and the memory that no tensor has, with `byte`.

    A replay must write every byte of its pool that it reads. No other thread may use the device.
    """
    torch.cuda.synchronize(device)
    free = [block for block in blocks(device) if not block.used]
    for block in (*blocks(device, pool), *free):
        bytes_of(block, device).fill_(byte)


def bytes_of(block: Block, device: torch.device) -> Tensor:
    """The block as a tensor of bytes, which does not own it."""
    storage = torch._C._construct_storage_from_data_pointer(block.address, device, block.size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
