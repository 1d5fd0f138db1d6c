"""Classes dense, contiguous and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import moe_fp8
from moe_fp8.heuristics import gemm_config
from moe_fp8.problems import GemmProblem

from . import cublas, inputs, random_shapes, unseen_shapes
from .compare import Contestant, Session
from .inputs import Quantized
from .peer import DeepGemm
from .results import BATCH_INVARIANT, Row
from .shapes import CONTIGUOUS, DENSE, MASKED, DenseShape, GroupedShape, aligned_starts
from .timing import MOST_SETS, Call, l2_bytes, plan_rotation

#: Rounding to a bf16 output makes a relative error of about 1.7e-3.
TOLERANCE = 3e-3

#: Rows of an expert's buffer in masked mode. A low-latency dispatch of 128 tokens from 8 ranks reserves them.
_MASKED_ROWS = 1024

#: Upper bound in bytes for the activations and outputs of all contestants together. If it limits the number
#: of input sets, the bytes that pass between two uses of a set still exceed the L2 by far.
_MOST_ROW_BYTES = 6 << 30

_Shape = TypeVar("_Shape", DenseShape, GroupedShape)


#: Makers of cuBLASLt's contestants for class dense, from input sets. A contestant whose setup fails has a
#: check that raises the reason.
CUBLAS: list[Callable[[list[Quantized], list[Quantized]], Contestant]] = [
    cublas.scaled_mm,
    cublas.per_tensor,
]


def run_dense(session: Session, peer: DeepGemm | None, step: int) -> None:
    chosen = session.shapes(
        step, DENSE, random_shapes.DENSE, unseen_shapes.dense, unseen_shapes.few_rounds_dense
    )
    for row, shape in _rows("dense", chosen):
        _dense(session, peer, shape, row)
        torch.cuda.empty_cache()


def run_contiguous(session: Session, peer: DeepGemm | None, step: int) -> None:
    chosen = session.shapes(
        step,
        CONTIGUOUS,
        random_shapes.CONTIGUOUS,
        unseen_shapes.contiguous,
        unseen_shapes.few_rounds_contiguous,
    )
    for row, shape in _rows("contiguous", chosen):
        _contiguous(session, peer, shape, row)
        torch.cuda.empty_cache()


def run_masked(session: Session, peer: DeepGemm | None, step: int) -> None:
    chosen = session.shapes(
        step, MASKED, random_shapes.MASKED, unseen_shapes.masked, unseen_shapes.few_rounds_masked
    )
    for row, shape in _rows("masked", chosen):
        _masked(session, peer, shape, row)
        torch.cuda.empty_cache()


def gemm_bytes(counts: Sequence[int], n: int, k: int) -> float:
    """The least traffic of the GEMM in bytes.

    It counts the weights of experts that have rows, valid rows of inputs, valid rows of bf16 outputs, and
    scales.
    """
    active = sum(1 for count in counts if count)
    weights = n * k + 4 * -(-n // 128) * (k // 128)
    return active * weights + sum(counts) * (k + 4 * (k // 128) + 2 * n)


def _rows(cls: str, chosen: Iterable[tuple[dict[str, Any], _Shape]]) -> Iterator[tuple[Row, _Shape]]:
    """Yield every chosen shape with a row to fill in; each shape comes with the terms of its row."""
    for terms, shape in chosen:
        counts = [shape.m] if isinstance(shape, DenseShape) else shape.counts()
        flops = 2.0 * sum(counts) * shape.n * shape.k
        yield Row(cls, terms, 0.0, flops, gemm_bytes(counts, shape.n, shape.k)), shape


def _rotation(weight_bytes: int, rows: int, n: int, k: int, contestants: int) -> tuple[int, int]:
    """(input sets, calls of a graph). A set has `rows` rows of activations.

    Each contestant has as many rows of outputs.
    """
    row_bytes = max(1, rows) * (k + 2 * n * contestants)
    most_sets = min(MOST_SETS, max(2, _MOST_ROW_BYTES // row_bytes))
    return plan_rotation(weight_bytes, l2_bytes(), most_sets)


def _poisoned(*size: int) -> Tensor:
    return torch.full(size, float("nan"), device=inputs.DEVICE, dtype=torch.bfloat16)


def _dense(session: Session, peer: DeepGemm | None, shape: DenseShape, row: Row) -> None:
    m, n, k = shape.m, shape.n, shape.k
    num_sets, num_calls = _rotation(n * k, m, n, k, contestants=5)
    a = [inputs.activations(m, k) for _ in range(num_sets)]
    b = [inputs.weights(n, k) for _ in range(num_sets)]

    def contestant(name: str, outs: list[Tensor], calls: list[Call]) -> Contestant:
        def check() -> float:
            calls[0]()
            return inputs.gemm_error(outs[0], *a[0], *b[0])

        return Contestant(name, calls, check)

    outs = [_poisoned(m, n) for _ in range(num_sets)]
    calls: list[Call] = [
        partial(moe_fp8.gemm_fp8, *a[i], *b[i], out=outs[i], constant_weights=True) for i in range(num_sets)
    ]
    contestants = [contestant("moe_fp8", outs, calls)]
    if peer is not None:
        outs = [_poisoned(m, n) for _ in range(num_sets)]
        calls = [partial(peer.gemm, a[i][0], peer.aligned(a[i][1]), *b[i], outs[i]) for i in range(num_sets)]
        contestants.append(contestant(peer.name, outs, calls))
    contestants += [make(a, b) for make in CUBLAS]
    # The mode is a setting of the process. It changes only the config, so the config is enough here.
    invariant = str(gemm_config(GemmProblem("dense", m, n, k, batch_invariant=True)))
    outs = [_poisoned(m, n) for _ in range(num_sets)]
    calls = [
        partial(moe_fp8.gemm_fp8, *a[i], *b[i], out=outs[i], config=invariant, constant_weights=True)
        for i in range(num_sets)
    ]
    contestants.append(replace(contestant(BATCH_INVARIANT, outs, calls), aside=True))
    session.compare(row, contestants, num_calls, TOLERANCE)


def _expert_error(
    out: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    starts: Sequence[int],
    counts: Sequence[int],
) -> float:
    """The worst expert's error; `starts` are rows of `a` and of `out`."""
    worst = 0.0
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count:
            rows = slice(start, start + count)
            error = inputs.gemm_error(out[rows], a[0][rows], a[1][rows], b[0][expert], b[1][expert])
            worst = inputs.worse(worst, error)
    return worst


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device=inputs.DEVICE, dtype=torch.int32)


def _m_indices(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    indices = torch.full((starts[-1],), -1, dtype=torch.int32)
    for expert, count in enumerate(counts):
        indices[starts[expert] : starts[expert] + count] = expert
    return indices.to(inputs.DEVICE)


def _contiguous(session: Session, peer: DeepGemm | None, shape: GroupedShape, row: Row) -> None:
    num_experts, n, k = shape.num_experts, shape.n, shape.k
    counts = shape.counts()
    aligned = aligned_starts(counts)
    ragged = [sum(counts[:expert]) for expert in range(num_experts + 1)]
    starts = ragged if shape.layout == "offsets" else aligned
    psum = _int32([start + count for start, count in zip(aligned[:-1], counts, strict=True)])
    m_indices = _m_indices(aligned, counts) if shape.layout == "m_indices" else None
    # An engine that knows how many rows it routed passes our op the hint `expected_m`, except with m_indices.
    # Engines pass DeepGEMM no hint here, and a hint makes it no faster on Hopper.
    index: dict[str, Any] = {"psum": psum, "expected_m": shape.rows_per_expert}
    if shape.layout == "offsets":
        index = {"offsets": _int32(ragged), "expected_m": shape.rows_per_expert}
    elif m_indices is not None:
        index = {"m_indices": m_indices}
    num_sets, num_calls = _rotation(num_experts * n * k, aligned[-1], n, k, contestants=2)
    b = [inputs.weights(n, k, num_experts) for _ in range(num_sets)]

    def contestant(
        name: str, rows: Sequence[int], a: list[Quantized], outs: list[Tensor], calls: list[Call]
    ) -> Contestant:
        def check() -> float:
            calls[0]()
            return _expert_error(outs[0], a[0], b[0], rows[:-1], counts)

        return Contestant(name, calls, check)

    a = [inputs.activations(starts[-1], k) for _ in range(num_sets)]
    outs = [_poisoned(starts[-1], n) for _ in range(num_sets)]
    calls: list[Call] = [
        partial(moe_fp8.grouped_gemm_fp8_contiguous, *a[i], *b[i], **index, out=outs[i])
        for i in range(num_sets)
    ]
    contestants = [contestant("moe_fp8", starts, a, outs, calls)]
    if peer is not None:
        # The peer has no ragged offsets. For that layout it computes the same experts in its psum layout.
        if shape.layout == "offsets":
            a = [inputs.activations(aligned[-1], k) for _ in range(num_sets)]
        outs = [_poisoned(aligned[-1], n) for _ in range(num_sets)]
        calls = [
            partial(peer.grouped_contiguous, a[i][0], peer.aligned(a[i][1]), *b[i], outs[i], psum, m_indices)
            for i in range(num_sets)
        ]
        contestants.append(contestant(peer.name, aligned, a, outs, calls))
    session.compare(row, contestants, num_calls, TOLERANCE)


def _masked(session: Session, peer: DeepGemm | None, shape: GroupedShape, row: Row) -> None:
    num_experts, n, k = shape.num_experts, shape.n, shape.k
    counts = shape.counts()
    rows = max(_MASKED_ROWS, -(-max(counts) // 128) * 128)
    masked_m = _int32(counts)
    num_sets, num_calls = _rotation(num_experts * n * k, num_experts * rows, n, k, contestants=2)
    a = [inputs.expert_activations(num_experts, rows, k) for _ in range(num_sets)]
    b = [inputs.weights(n, k, num_experts) for _ in range(num_sets)]

    def contestant(name: str, outs: list[Tensor], calls: list[Call]) -> Contestant:
        def check() -> float:
            calls[0]()
            fp8, scale = a[0]
            flat = (fp8.flatten(0, 1), scale.flatten(0, 1))
            starts = range(0, num_experts * rows, rows)
            return _expert_error(outs[0].flatten(0, 1), flat, b[0], starts, counts)

        return Contestant(name, calls, check)

    outs = [_poisoned(num_experts, rows, n) for _ in range(num_sets)]
    calls: list[Call] = [
        partial(
            moe_fp8.grouped_gemm_fp8_masked,
            *a[i],
            *b[i],
            masked_m,
            expected_m=shape.rows_per_expert,
            out=outs[i],
        )
        for i in range(num_sets)
    ]
    contestants = [contestant("moe_fp8", outs, calls)]
    if peer is not None:
        outs = [_poisoned(num_experts, rows, n) for _ in range(num_sets)]
        calls = [
            partial(
                peer.grouped_masked,
                a[i][0],
                peer.aligned(a[i][1]),
                *b[i],
                outs[i],
                masked_m,
                shape.rows_per_expert,
            )
            for i in range(num_sets)
        ]
        contestants.append(contestant(peer.name, outs, calls))
    session.compare(row, contestants, num_calls, TOLERANCE)
