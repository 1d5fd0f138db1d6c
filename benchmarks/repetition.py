"""Check that an op gives the same bits in every call: calls run under memory traffic and are compared.

A race between a kernel's warps may show in one of a thousand calls, and only if loads are late. So calls run
back to back into a ring of poisoned outputs while another stream writes memory, reads L2 or rests. Some calls
are eager and some are replayed in a CUDA graph, with or without another kernel between them. Each output is
compared bit by bit with the first call's output, on the device. On a CPU there is no traffic and no graph.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .results import shape_dict

#: Seconds for each case by default.
SECONDS = 0.6

#: The work of the other stream during a round. Writes are drawn twice as often as each other kind.
WRITES, SPARSE, READS, REST = "writes", "sparse writes", "reads", "rest"
_DRAWN = (WRITES, WRITES, SPARSE, READS, REST)

#: Calls in one graph. The ring has as many outputs, or several times as many if they are small.
_UNIT = 8
_MOST_UNITS = 8
_RING_BYTES = 1 << 30

#: Each round fills the outputs with one of the two bytes, in turn.
_POISONS = (0x7F, 0xFF)

#: Alignment of an output in bytes: torch's allocator aligns in the same way.
_ALIGNMENT = 256

#: Elements that are compared at once; the comparison allocates as many bytes.
_AT_ONCE = 1 << 27

#: About how long a piece of traffic takes, and the most pieces for one unit of calls.
_PIECE_US = 300.0
_MOST_PIECES = 8

#: Traffic takes this many times as long as the calls that run at the same time.
_SURPLUS = 1.5

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Work:
    """The work to repeat: `call(out)` writes the elements of `out` that `defined` marks.

    The inputs never change. out: contiguous, of `shape` and `dtype`; no dimension is 0. defined: bool,
    broadcastable to `shape`; None means every element. The call is capture-safe if `device` is a GPU.
    """

    call: Callable[[Tensor], object]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    defined: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A call of `op` with the dimensions in `shape`, a dataclass.

    `make(shape, **options)` draws its inputs from torch's own generators.
    """

    op: str
    shape: Any
    make: Callable[..., Work]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, Any]:
        """The terms that distinguish the case from all other cases."""
        return {"op": self.op, **shape_dict(self.shape), **self.options}

    @property
    def name(self) -> str:
        op, *rest = self.terms.items()
        return " ".join([op[1], *(f"{name}={value}" for name, value in rest)])


@dataclass(frozen=True)
class Repetition:
    """The result of one case: `calls` were made, `compared` outputs compared, `differing` outputs wrong.

    by_traffic: the number of wrong outputs for each kind of traffic. first_was_wrong: most outputs differ
    from the first output, so `differing` counts the outputs that equal it, and the first output itself.
    example: one difference in words.
    """

    calls: int
    compared: int
    differing: int
    seconds: float
    seed: int
    by_traffic: dict[str, int]
    example: str = ""
    first_was_wrong: bool = False

    def __str__(self) -> str:
        text = (
            f"{self.differing:,} of {self.compared:,} outputs differ "
            f"({self.calls:,} calls in {self.seconds:.1f} s, seed {self.seed})"
        )
        if self.by_traffic:
            text += "; " + ", ".join(f"{count:,} beside {kind}" for kind, count in self.by_traffic.items())
        if self.first_was_wrong:
            text += "; most differ from the first one, so that this one was wrong"
        return f"{text}; {self.example}" if self.example else text


class Traffic:
    """Disturbances of calls on `device`, a GPU: work on another stream, and a small kernel between calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._written = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        self._read = torch.ones(1 << 22, device=device)  # 16 MiB: it stays in L2
        self._small = torch.zeros(1 << 20, device=device)
        for kind in _DRAWN:  # loads the kernels of the traffic before a graph is captured
            self.start(kind, 1)
        self.between()
        torch.cuda.synchronize(device)

    def start(self, kind: str, pieces: int) -> None:
        """Enqueue `pieces` of about 0.3 ms each, without waiting."""
        with torch.cuda.stream(self._stream):
            for _ in range(pieces):
                if kind == WRITES:
                    self._written.fill_(3)
                elif kind == SPARSE:
                    self._written[::128].fill_(5)
                elif kind == READS:
                    self._read.expand(64, -1).sum(1)

    def between(self) -> None:
        """Run a kernel on the current stream that has nothing to do with the calls; safe to capture."""
        self._small.add_(1)


def _units(size: int, device: torch.device) -> int:
    """The number of units of calls in a ring with outputs of `size` bytes."""
    if device.type != "cuda":
        return 1
    return max(1, min(_MOST_UNITS, _RING_BYTES // (_UNIT * size)))


class _Ring:
    """Outputs of one work, one after another in memory, and the bits of its first call."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.rows, self.columns = math.prod(work.shape[:-1]), work.shape[-1]
        elements = self.rows * self.columns
        size = elements * work.dtype.itemsize
        self.units = _units(size, work.device)
        pitch = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._storage = torch.empty(self.units * _UNIT, pitch, dtype=torch.uint8, device=work.device)
        self.outs = [line[:size].view(work.dtype).view(work.shape) for line in self._storage]
        bits = self._storage.view(_BITS[work.dtype.itemsize])
        self._bits = bits[:, :elements].unflatten(1, (self.rows, self.columns))
        self._defined = None
        if work.defined is not None:
            last = work.defined.shape[-1]
            self._defined = work.defined.expand(*work.shape[:-1], last).reshape(self.rows, last)
        step = max(1, _AT_ONCE // (len(self.outs) * self.columns))
        self._slices = [slice(row, min(row + step, self.rows)) for row in range(0, self.rows, step)]
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.poison(_POISONS[0])
        work.call(self.outs[0])
        self._first = self._bits[0].clone()

    def poison(self, byte: int) -> None:
        self._storage.fill_(byte)

    def unit(self, number: int, traffic: Traffic | None) -> None:
        """Make the eager calls of one unit; `traffic` runs its kernel after each call."""
        for out in self.outs[number * _UNIT : (number + 1) * _UNIT]:
            self.work.call(out)
            if traffic is not None:
                traffic.between()

    def capture(self, traffic: Traffic | None) -> list[torch.cuda.CUDAGraph]:
        """A graph for each unit; each graph is captured once."""
        for number in range(self.units):
            key = (number, traffic is not None)
            if key not in self._graphs:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.unit(number, traffic)
                self._graphs[key] = graph
        return [self._graphs[number, traffic is not None] for number in range(self.units)]

    def _different(self, outputs: slice, rows: slice) -> Tensor:
        """bool [outputs, rows, columns]."""
        different = self._bits[outputs, rows] != self._first[rows]
        if self._defined is not None:
            different &= self._defined[rows]
        return different

    def wrong(self) -> list[bool]:
        """For each output, whether it differs from the first result; waits for the device."""
        found = torch.zeros(len(self.outs), dtype=torch.bool, device=self.work.device)
        for rows in self._slices:
            found |= self._different(slice(None), rows).flatten(1).any(1)
        return found.tolist()

    def example(self, index: int) -> str:
        """A text that says how one output differs from the first result."""
        rows: list[int] = []
        count, columns = 0, torch.zeros(self.columns, dtype=torch.bool, device=self.work.device)
        for some in self._slices:
            different = self._different(slice(index, index + 1), some)[0]
            count += int(different.sum())
            columns |= different.any(0)
            rows += [some.start + row for row in different.any(1).nonzero().flatten().tolist()]
        row = slice(rows[0], rows[0] + 1)
        column = int(self._different(slice(index, index + 1), row)[0, 0].nonzero()[0])
        first = self._first.view(self.work.dtype)[rows[0], column]
        place = torch.unravel_index(torch.tensor(rows[0] * self.columns + column), self.work.shape)
        at = tuple(int(number) for number in place)
        elements = f"{count:,} element{'s' if count > 1 else ''}"
        return (
            f"{elements}, the first at {at}: {_value(self.outs[index][at])}, "
            f"in the first call {_value(first)}; {_numbers('row', rows)}; "
            f"{_numbers('column', columns.nonzero().flatten().tolist())}"
        )


def _value(element: Tensor) -> str:
    """An element as a number and as bits."""
    size = element.dtype.itemsize
    bits = int(element.view(_BITS[size])) & ((1 << 8 * size) - 1)
    return f"{element.item():g} (0x{bits:0{2 * size}x})"


def _numbers(what: str, numbers: Sequence[int]) -> str:
    """The numbers as text: all of them if there are few, else the first numbers and the last."""
    if len(numbers) <= 8:
        return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    shown = ", ".join(map(str, numbers[:6]))
    return f"{len(numbers):,} {what}s, {shown}... {numbers[-1]}"


def repeat(case: Case, seconds: float, seed: int, traffic: Traffic | None = None) -> Repetition:
    """Call `case` for about `seconds`, with inputs and traffic drawn from `seed`.

    The time begins after the first call, which may compile. One `traffic` may serve many cases. If it is
    None, a case on a GPU gets its own.
    """
    torch.manual_seed(seed)
    work = case.make(case.shape, **case.options)
    if traffic is None and work.device.type == "cuda":
        traffic = Traffic(work.device)
    with torch.no_grad():  # engines call ops in this way, which takes the short path through the dispatcher
        return _repeat(work, seconds, seed, traffic)


def _repeat(work: Work, seconds: float, seed: int, traffic: Traffic | None) -> Repetition:
    rng = random.Random(seed)
    ring = _Ring(work)
    compared, differing, example = {REST: 1}, {REST: 0}, ""
    call_us, rounds = math.inf, 0
    began = time.monotonic()
    while rounds == 0 or time.monotonic() - began < seconds:
        # Two quiet rounds measure how long a call takes. The first of them also prepares the launches.
        disturbed = traffic is not None and rounds >= 2
        kind = rng.choice(_DRAWN) if disturbed else REST
        between = traffic if disturbed and rng.random() < 0.5 else None
        graphs = ring.capture(between) if disturbed and rng.random() < 1 / 3 else []
        ring.poison(_POISONS[(rounds + 1) % 2])  # not the byte that filled the first output
        round_began = time.perf_counter()
        for number in range(ring.units):
            if traffic is not None and kind != REST:
                traffic.start(kind, _pieces(call_us, rng, least=1 if number == 0 else 0))
            if graphs:
                graphs[number].replay()
                if between is not None:
                    between.between()
            else:
                ring.unit(number, between)
        if traffic is not None:
            torch.cuda.synchronize(work.device)
        if kind == REST and between is None and not graphs:
            call_us = min(call_us, 1e6 * (time.perf_counter() - round_began) / len(ring.outs))
        wrong = ring.wrong()
        compared[kind] = compared.get(kind, 0) + len(wrong)
        differing[kind] = differing.get(kind, 0) + sum(wrong)
        if any(wrong) and not example:
            how = (
                f"{'replayed' if graphs else 'eager'}{', a kernel between' if between else ''}, beside {kind}"
            )
            example = f"{ring.example(wrong.index(True))} ({how})"
        rounds += 1
    calls = sum(compared.values())
    first_was_wrong = 2 * sum(differing.values()) > calls
    if first_was_wrong:
        differing = {kind: count - differing[kind] for kind, count in compared.items()}
    return Repetition(
        calls=calls,
        compared=calls,
        differing=sum(differing.values()),
        seconds=round(time.monotonic() - began, 2),
        seed=seed,
        by_traffic={kind: count for kind, count in differing.items() if count},
        example=example,
        first_was_wrong=first_was_wrong,
    )


def _pieces(call_us: float, rng: random.Random, least: int) -> int:
    """Pieces of traffic for one unit of calls; a fraction is rounded up or down at random."""
    wanted = min(_MOST_PIECES, _SURPLUS * _UNIT * call_us / _PIECE_US)
    return max(least, int(wanted + rng.random()))
