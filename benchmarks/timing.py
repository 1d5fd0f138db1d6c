"""How a contestant is timed: with replays, as in `moe-fp8 tune`, over rotating input sets."""

from __future__ import annotations

from moe_fp8.tune.replay import Call, Replay, alternate, l2_bytes

__all__ = ["Call", "Replay", "alternate", "l2_bytes", "plan_rotation"]


def plan_rotation(set_bytes: int, l2: int, max_sets: int = 64) -> tuple[int, int]:
    """(input sets, calls of a graph): together the sets exceed 4 x the L2.

    The calls use each set equally often. There are at least 2 sets, at most `max_sets`, and at least 8 calls.
    """
    sets = min(max_sets, max(2, 4 * l2 // max(set_bytes, 1) + 1))
    return sets, -(-8 // sets) * sets
