"""What is read from the allocator's snapshot: the pools' sizes, their blocks, and the memory to poison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_fp8.graph import memory
from moe_fp8.graph.memory import Block

_POOL, _OTHER, _NONE = (0, 7), (0, 8), (0, 0)
_HERE, _ELSEWHERE = torch.device("cpu"), torch.device("cpu", 1)


def _segment(device: torch.device, pool: tuple[int, int], start: Tensor, *blocks: tuple[int, str]) -> Any:
    return {
        "device": device.index,
        "segment_pool_id": list(pool),
        "address": start.data_ptr(),
        "total_size": sum(size for size, _ in blocks) + 100,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


@pytest.fixture
def bytes_of_segments(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The bytes of five segments of 16 bytes. Two belong to the pool, one to another pool, one to no pool.

    The last one is on another device.
    """
    data = torch.zeros(5, 16, dtype=torch.uint8)
    states = (4, "active_allocated"), (4, "inactive"), (8, "active_pending_free")
    where = (_HERE, _POOL), (_HERE, _POOL), (_HERE, _OTHER), (_HERE, _NONE), (_ELSEWHERE, _NONE)
    segments = [_segment(*place, row, *states) for place, row in zip(where, data, strict=True)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return data


def test_a_pool_has_the_size_of_its_segments(bytes_of_segments: Tensor) -> None:
    assert memory.pool_bytes(_POOL) == 2 * 116
    assert memory.pool_bytes(_OTHER) == 116
    assert memory.pool_bytes((0, 9)) == 0


def test_blocks_lie_one_behind_another(bytes_of_segments: Tensor) -> None:
    at = bytes_of_segments[2].data_ptr()
    expected = [Block(at, 4, True), Block(at + 4, 4, False), Block(at + 8, 8, True)]
    assert list(memory.blocks(_HERE, _OTHER)) == expected
    assert [block.address for block in memory.blocks(_ELSEWHERE)] == [
        bytes_of_segments[4].data_ptr() + offset for offset in (0, 4, 8)
    ]


def test_a_block_contains_its_first_byte_and_not_the_byte_behind_it(bytes_of_segments: Tensor) -> None:
    row = bytes_of_segments[0]
    block = Block(row.data_ptr() + 4, 4, True)
    assert [memory.contains([block], row[offset:]) for offset in (3, 4, 7, 8)] == [False, True, True, False]
    assert not memory.contains([], row)


def test_the_whole_pool_and_what_no_tensor_has_are_poisoned(bytes_of_segments: Tensor) -> None:
    memory.poison(_HERE, _POOL, 0x7F)
    whole, untouched = [0x7F] * 16, [0] * 16
    free_only = [0] * 4 + [0x7F] * 4 + [0] * 8
    assert bytes_of_segments.tolist() == [whole, whole, untouched, free_only, untouched]
