"""Class host: the CPU's time for one eager call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .compare import Session
from .logits import num_sms
from .peer import DeepGemm
from .results import Row
from .shapes import PagedShape, expert_counts
from .targets import AGAIN, NEW_ADDRESS, NEW_M
from .timing import Call

#: Calls in a round, and rounds.
_CALLS, _ROUNDS = 200, 100
#: The same for kinds whose calls all differ. Smaller numbers keep the queue of calls short and their M small.
_NEW_CALLS, _NEW_ROUNDS = 20, 25


class _Op(NamedTuple):
    """Makers of one op's calls, ours and the peer's; each maker takes M and an address.

    The address counts pieces of 16 bytes from the start of the first operand's buffer. `usual_m` is the M of
    calls that do not vary M.
    """

    name: str
    usual_m: int
    ours: Callable[[int, int], Call]
    theirs: Callable[[int, int], Call] | None = None


@torch.inference_mode()
def run_host(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Host time of one eager call in inference mode, as engines make it.

    Calls are enqueued without waiting, and small shapes keep the queue short. An op has three rows. `again`
    makes one call over and over. `new address` moves the first operand each time, as allocators do in a
    server that runs without graphs. `new m` has a number of rows (or of requests, for paged logits) that no
    call had before; its kernel is loaded already.
    """
    for make in (_dense, _masked, _quantize, _cache, _paged):
        try:
            op = make(peer)
        except Exception as error:
            session.fail(f"host {make.__name__[1:]}", error)
            continue
        new = range(_NEW_CALLS * _NEW_ROUNDS)
        again = [(op.usual_m, 0)] * _CALLS
        moved = [(op.usual_m, 1 + i) for i in new]
        # The timed calls have odd M; the untimed calls before them have even M and load the same kernels.
        odd, even = [(2 * i + 1, 0) for i in new], [(2 * i + 2, 0) for i in new]
        _eager(session, op, AGAIN, peer, [again] * _ROUNDS, again)
        _eager(session, op, NEW_ADDRESS, peer, _rounds(moved), again)
        _eager(session, op, NEW_M, peer, _rounds(odd), even)


def _most_m() -> int:
    """The largest M of any call; it is also not less than the number of addresses."""
    return max(64, 2 * _NEW_CALLS * _NEW_ROUNDS)


def _rounds(calls: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [calls[i : i + _NEW_CALLS] for i in range(0, len(calls), _NEW_CALLS)]


def _buffer(*shape: int) -> Tensor:
    """Random bf16 values, enough for `shape` at any address."""
    return torch.randn(math.prod(shape) + 16 * _most_m(), device=inputs.DEVICE, dtype=torch.bfloat16)


def _view(buffer: Tensor, shape: tuple[int, ...], address: int) -> Tensor:
    """A view of `shape` that begins `address` pieces of 16 bytes into the buffer."""
    first = address * 16 // buffer.element_size()
    return buffer[first : first + math.prod(shape)].view(shape)


def _scales(*shape: int) -> Tensor:
    """MN-major scales of this shape; their values do not matter."""
    *experts, m, groups = shape
    aligned = -(-m // 4) * 4
    flat = torch.full((math.prod(experts) * groups * aligned,), 0.01, device=inputs.DEVICE)
    return flat.as_strided(shape, (*[groups * aligned for _ in experts], 1, aligned))


def _dense(peer: DeepGemm | None) -> _Op:
    a = _buffer(_most_m(), 2048).to(inputs.FP8)
    b, b_scale = inputs.weights(576, 2048)
    out = torch.empty(_most_m(), 576, device=inputs.DEVICE, dtype=torch.bfloat16)

    def ours(m: int, address: int) -> Call:
        moved = _view(a, (m, 2048), address)
        return partial(
            moe_fp8.gemm_fp8, moved, _scales(m, 16), b, b_scale, out=out[:m], constant_weights=True
        )

    def theirs(m: int, address: int) -> Call:
        assert peer is not None
        scale = peer.aligned(_scales(m, 16))
        return partial(peer.gemm, _view(a, (m, 2048), address), scale, b, b_scale, out[:m])

    return _Op("gemm_fp8", 64, ours, theirs if peer is not None else None)


def _masked(peer: DeepGemm | None) -> _Op:
    experts = 8
    a = _buffer(experts, _most_m(), 2048).to(inputs.FP8)
    b, b_scale = inputs.weights(576, 2048, experts)
    out = torch.empty(experts * _most_m() * 576, device=inputs.DEVICE, dtype=torch.bfloat16)
    spread = torch.tensor(expert_counts(experts, 16, "spread"), device=inputs.DEVICE, dtype=torch.int32)

    def ours(m: int, address: int) -> Call:
        return partial(
            moe_fp8.grouped_gemm_fp8_masked,
            _view(a, (experts, m, 2048), address),
            _scales(experts, m, 16),
            b,
            b_scale,
            spread.clamp(max=m),
            expected_m=16,
            out=_view(out, (experts, m, 576), 0),
        )

    def theirs(m: int, address: int) -> Call:
        assert peer is not None
        operands = _view(a, (experts, m, 2048), address), peer.aligned(_scales(experts, m, 16)), b, b_scale
        counts = spread.clamp(max=m)
        return partial(peer.grouped_masked, *operands, _view(out, (experts, m, 576), 0), counts, 16)

    return _Op("grouped_gemm_fp8_masked", 64, ours, theirs if peer is not None else None)


def _quantize(peer: DeepGemm | None) -> _Op:
    x = _buffer(_most_m(), 2048)
    values = torch.empty(_most_m(), 2048, device=inputs.DEVICE, dtype=inputs.FP8)

    def ours(m: int, address: int) -> Call:
        out = values[:m], _scales(m, 16)
        return partial(moe_fp8.quantize_fp8, _view(x, (m, 2048), address), out=out)

    return _Op("quantize_fp8", 64, ours)


def _cache(peer: DeepGemm | None) -> _Op:
    keys = _buffer(_most_m(), 128)
    pages = torch.zeros(-(-_most_m() // 64), 64, 1, 132, device=inputs.DEVICE, dtype=torch.uint8)
    slots = torch.arange(_most_m(), device=inputs.DEVICE)

    def ours(m: int, address: int) -> Call:
        return partial(moe_fp8.indexer_quantize_and_cache, _view(keys, (m, 128), address), pages, slots[:m])

    return _Op("indexer_quantize_and_cache", 64, ours)


def _paged(peer: DeepGemm | None) -> _Op:
    """Every batch uses the schedule of its first four requests: more work would only fill the queue."""
    few = inputs.paged_inputs(PagedShape(4, 1024))
    heads, dim, width = few.q.shape[2], few.q.shape[3], few.max_context_len
    q = _buffer(_most_m(), 1, heads, dim).to(inputs.FP8)
    weights = torch.randn(_most_m(), heads, device=inputs.DEVICE)
    copies = -(-_most_m() // 4)
    lengths, table = few.lengths.repeat(copies, 1), few.block_table.repeat(copies, 1)
    logits = torch.empty(_most_m(), width, device=inputs.DEVICE)
    schedules, their_schedules = [], []
    for ends in (few.lengths[:m] for m in range(1, 5)):
        schedules.append(moe_fp8.paged_mqa_logits_metadata(ends, block_size=64, num_sms=num_sms()))
        if peer is not None:
            their_schedules.append(peer.paged_metadata(ends, 64, num_sms()))

    def operands(m: int, address: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return _view(q, (m, 1, heads, dim), address), few.kv_cache, weights[:m], lengths[:m], table[:m]

    def ours(m: int, address: int) -> Call:
        given = *operands(m, address), schedules[min(m, 4) - 1]
        return partial(moe_fp8.paged_mqa_logits_fp8, *given, max_context_len=width, out=logits[:m])

    def theirs(m: int, address: int) -> Call:
        assert peer is not None
        return partial(peer.paged_mqa_logits, *operands(m, address), their_schedules[min(m, 4) - 1], width)

    return _Op("paged_mqa_logits_fp8", 4, ours, theirs if peer is not None else None)


def _eager(
    session: Session,
    op: _Op,
    kind: str,
    peer: DeepGemm | None,
    rounds: list[list[tuple[int, int]]],
    before: list[tuple[int, int]],
) -> None:
    """Time `rounds` of calls, each an M and an address, after the calls `before`, which load the kernels."""
    try:
        contestants = [make for make in (op.ours, op.theirs) if make is not None]
        times: list[list[float]] = [[] for _ in contestants]
        for make in contestants:
            _loop(_calls(make, before))
        for calls in rounds:
            for make, samples in zip(contestants, times, strict=True):
                samples.append(_loop(_calls(make, calls)))
    except Exception as error:
        session.fail(f"host {op.name}, {kind}", error)
        return
    row = Row("host", {"op": op.name, "call": kind}, statistics.median(times[0]))
    if peer is not None and op.theirs is not None:
        row.peers[peer.name] = statistics.median(times[1])
    session.store(row)


def _calls(make: Callable[[int, int], Call], of: list[tuple[int, int]]) -> list[Call]:
    """The calls for these pairs of M and address; equal pairs share one call."""
    made = {where: make(*where) for where in dict.fromkeys(of)}
    return [made[where] for where in of]


def _loop(calls: list[Call]) -> float:
    """Host time in us for each call; the device is idle at the start, and waiting for it is not timed."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls:
        call()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / len(calls) * 1e6
