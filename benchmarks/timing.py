"""How contestants are timed: by replays over rotating input sets, as in `moe-fp8 tune`, or by whole steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from moe_fp8.tune.replay import Call, Replay, alternate, l2_bytes

__all__ = [
    "MOST_SETS",
    "Call",
    "Replay",
    "alternate",
    "alternate_walls",
    "in_a_row",
    "l2_bytes",
    "plan_rotation",
]


#: Sets take time to make. 512 sets of 0.5 MB exceed 4 x the L2 of an H200.
MOST_SETS = 512


def plan_rotation(set_bytes: int, l2: int, max_sets: int = MOST_SETS) -> tuple[int, int]:
    """(input sets, calls of a graph): together the sets exceed 4 x the L2, unless `max_sets` are too few.

    The calls use each set equally often. There are at least 2 sets, at most `max_sets`, and at least 8 calls.
    """
    sets = min(max_sets, max(2, 4 * l2 // max(set_bytes, 1) + 1))
    return sets, -(-8 // sets) * sets


def alternate_walls(steps: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Median microseconds of each step with its synchronization; the steps take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for taken, one in zip(times, steps, strict=True):
            begun = time.perf_counter()
            one()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - begun) * 1e6)
    return [statistics.median(taken) for taken in times]


def in_a_row(step: Callable[[], object], count: int) -> float:
    """Mean microseconds of a step that is called `count` times without waiting for the device."""
    step()
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begun) * 1e6 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count
