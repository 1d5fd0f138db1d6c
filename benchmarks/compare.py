"""The step that every GPU class shares: contestants of one shape are checked and timed, and give a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from .results import (
    DEVELOPMENT,
    FEW_ROUNDS,
    LISTED,
    UNSEEN,
    ResultsFile,
    Row,
    four_digits,
    set_of,
    shape_dict,
)
from .timing import Call, Replay, alternate, l2_bytes

_Shape = TypeVar("_Shape")
_Set = TypeVar("_Set")
_Result = TypeVar("_Result")

_SHOWN = ("us", "tflops", "gbs", "ceiling_share", "ratio", "rel_error")


#: Drawn sets have many shapes and only their summary is read, so fewer replays are enough.
_DRAWN_REPLAYS = 10


class WrongResult(Exception):
    """A contestant's output differs from the float64 result; the contestant is not timed."""


@dataclass
class Contestant:
    """One op to time: `calls` has a call for each input set, `check` runs the first and returns its error.

    The calls are capture-safe.

    `aside` marks a contestant that is no peer: it computes something easier than the op, or it is our own op
    in another mode. Its time goes into the notes and not into the ratio. `tolerance` replaces the tolerance
    of the class.
    """

    name: str
    calls: Sequence[Call]
    check: Callable[[], float]
    aside: bool = False
    tolerance: float | None = None

    @classmethod
    def of(
        cls, name: str, call: Callable[[_Set], _Result], sets: Sequence[_Set],
        error: Callable[[_Result, _Set], float], tolerance: float | None = None,
    ) -> Contestant:  # fmt: skip
        """A contestant that calls `call` with each of `sets`; `error` is that of the first set's result."""
        calls = [partial(call, given) for given in sets]
        return cls(name, calls, lambda: error(call(sets[0]), sets[0]), tolerance=tolerance)

    @classmethod
    def unavailable(cls, name: str, error: Exception) -> Contestant:
        """A contestant whose setup failed; its check raises `error`."""

        def check() -> float:
            raise error

        return cls(name, [], check)


@dataclass
class Session:
    """The results file, the sets of shapes to time, and the number of replays for each shape."""

    results: ResultsFile
    replays: int
    failures: list[str]
    sets: tuple[str, ...] = (LISTED,)

    def shapes(
        self,
        step: int,
        listed: Sequence[_Shape],
        development: Sequence[_Shape],
        unseen: Callable[[str], Sequence[_Shape]],
        few_rounds: Callable[[str], Sequence[_Shape]] = lambda commit: (),
    ) -> Iterator[tuple[dict[str, Any], _Shape]]:
        """Yield every `step`-th shape of the chosen sets, each with the terms of its row.

        `unseen` and `few_rounds` draw the shapes of their sets from the hash of the measured commit.
        """
        draws = {UNSEEN: unseen, FEW_ROUNDS: few_rounds}
        for name in self.sets:
            if name in draws:
                shapes = draws[name](str(self.results.environment["commit"]))
            else:
                shapes = {LISTED: listed, DEVELOPMENT: development}[name]
            for shape in shapes[::step]:
                yield shape_dict(shape) | ({} if name == LISTED else {"set": name}), shape

    def compare(self, row: Row, contestants: Sequence[Contestant], num_calls: int, tolerance: float) -> None:
        """Check every contestant, time them in turns, complete `row` and store it.

        The row is warm if the bytes that only one of the calls moves are together fewer than the L2 holds.

        The first contestant is ours: if it is wrong, nothing is timed and the shape counts as failed. A peer
        that is wrong or raises is left out, and the row's notes give the reason.
        """
        label = f"{row.cls} {_terms(row)}"
        ours, *peers = contestants
        try:
            row.rel_error = _checked(ours, tolerance)
            replays = [Replay(ours.calls, num_calls)]
        except Exception as error:
            torch.cuda.synchronize()
            self.fail(label, error)
            return
        timed: list[Contestant] = []
        for peer in peers:
            try:
                row.notes[f"{peer.name} rel_error"] = four_digits(_checked(peer, tolerance))
                replays.append(Replay(peer.calls, num_calls))
                timed.append(peer)
            except Exception as error:
                row.notes[f"{peer.name} left out"] = f"{type(error).__name__}: {error}"[:300]
        row.warm = len(ours.calls) * (row.own_bytes or row.nbytes) <= l2_bytes()
        is_listed = set_of(row.shape) == LISTED
        row.us, *peer_us = alternate(
            replays, self.replays if is_listed else min(self.replays, _DRAWN_REPLAYS)
        )
        for peer, us in zip(timed, peer_us, strict=True):
            if peer.aside:
                row.notes[f"{peer.name} us"] = four_digits(us)
            else:
                row.peers[peer.name] = us
        self.store(row)

    def store(self, row: Row) -> None:
        written = self.results.add(row)
        facts = " ".join(f"{name}={written[name]}" for name in _SHOWN if written[name] is not None)
        peers = " ".join(f"{name}={us}" for name, us in written["peers"].items())
        print(f"{row.cls} {_terms(row)}: {facts} {peers} {row.notes or ''}".rstrip(), flush=True)

    def fail(self, label: str, error: Exception) -> None:
        message = f"{label}: {type(error).__name__}: {error}"
        self.failures.append(message)
        print(f"FAILED {message}", flush=True)


def _checked(contestant: Contestant, tolerance: float) -> float:
    error = contestant.check()
    torch.cuda.synchronize()
    if contestant.tolerance is not None:
        tolerance = contestant.tolerance
    if math.isnan(error) or error > tolerance:
        raise WrongResult(f"{contestant.name}: relative error {error:.3g}, at most {tolerance:g} is right")
    return error


def _terms(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.shape.items())
