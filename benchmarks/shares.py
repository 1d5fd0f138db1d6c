"""Which kinds of kernels a step's time goes to, from the spans of time in which its kernels ran.

This module needs only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .results import ROOT

#: The kind of the time in which no kernel runs.
IDLE = "idle"

#: A kernel of ours has the name of its entry file.
_OURS = frozenset(path.stem for path in (ROOT / "moe_fp8" / "kernels").glob("*.cuh"))

#: The kinds of torch's kernels: the first pattern that a part of the name matches, in any case. Names hold
#: the functors of a kernel's template too, so that the general patterns come last.
_TORCH = (
    ("torch matmul", "gemm|gemv|nvjet|cutlass|xmma|splitk"),
    ("torch softmax", "softmax"),
    ("torch index", "index|gather|scatter"),
    ("torch copy", "copy|memcpy|memset|catarray"),
    ("torch reduction", "reduce|norm"),
    ("torch elementwise", "elementwise"),
    ("torch other", ""),
)


@dataclass(frozen=True)
class Span:
    """The microseconds between which a kernel ran."""

    name: str
    start: float
    end: float


def steps(spans: Iterable[Span], count: int) -> list[list[Span]]:
    """The spans of each of `count` steps, which are cut at the longest times without a kernel."""
    ordered = sorted(spans, key=lambda span: span.start)
    gaps, reached = [], 0.0
    for place, span in enumerate(ordered):
        gaps.append((span.start - reached, place))
        reached = max(reached, span.end)
    cuts = sorted(place for _, place in sorted(gaps[1:])[len(gaps) - count :])
    return [ordered[begin:end] for begin, end in pairwise([0, *cuts, len(ordered)])]


def attribute(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds of each kind between the first start and the last end, the idle ones included.

    Where kernels overlap, an instant belongs to the one that started first: a kernel that was launched early
    waits for it. So the sum over the kinds is the whole time, and a kernel within another's span gets
    nothing.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    times = {IDLE: 0.0}
    reached = ordered[0].start if ordered else 0.0
    for span, kind in zip(ordered, kinds(span.name for span in ordered), strict=True):
        times[IDLE] += max(0.0, span.start - reached)
        times[kind] = times.get(kind, 0.0) + max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return times


def kinds(names: Iterable[str]) -> Iterator[str]:
    """The kind of each kernel, in the order in which they started.

    All FP8 GEMMs have one name. Those between `moe_permute` and `moe_combine` are the experts'.
    """
    routed = False
    for name in names:
        routed = name == "moe_permute" or (routed and name != "moe_combine")
        if name == "gemm_fp8":
            yield f"{name}, {'grouped' if routed else 'dense'}"
        elif name in _OURS:
            yield name
        else:
            yield next(kind for kind, part in _TORCH if re.search(part, name, re.IGNORECASE))


def shares(taken: Sequence[Sequence[Span]]) -> dict[str, float]:
    """The share of each kind in the time of all steps together, the largest first, with three digits."""
    times: dict[str, float] = {}
    for spans in taken:
        for kind, us in attribute(spans).items():
            times[kind] = times.get(kind, 0.0) + us
    whole = sum(times.values())
    return {kind: round(us / whole, 3) for kind, us in sorted(times.items(), key=lambda item: -item[1])}
