"""Class k_grouped: weight gradients of experts, added to fp32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .compare import Contestant, Session
from .inputs import Quantized
from .peer import DeepGemm
from .results import Row
from .shapes import K_GROUPED, KGroupedShape
from .timing import Call, l2_bytes, plan_rotation

#: The tensor core keeps about 14 bits within 128 of K.
TOLERANCE = 1e-3

#: Rows of each expert that are compared with float64.
_SAMPLED_ROWS = 64


def run_k_grouped(session: Session, peer: DeepGemm | None, step: int) -> None:
    for terms, shape in session.shapes(step, K_GROUPED, (), lambda commit: ()):
        counts = shape.counts()
        flops = 2.0 * sum(counts) * shape.m * shape.n
        row = Row("k_grouped", terms, 0.0, flops, k_grouped_bytes(counts, shape.m, shape.n))
        _k_grouped(session, peer, shape, row)
        torch.cuda.empty_cache()


def k_grouped_bytes(counts: Sequence[int], m: int, n: int) -> float:
    """The least traffic in bytes: both inputs with their scales, and outputs that are read and written.

    An expert without columns has no traffic.
    """
    active = sum(1 for count in counts if count)
    return sum(counts) * (m + n) * (1 + 4 / 128) + active * 8.0 * m * n


def _error(
    out: Tensor, before: Tensor, a: Quantized, b: Quantized, ends: Sequence[int], rows: Tensor
) -> float:
    """The worst expert's error; `before` and `out` [E, rows, N] have the sampled `rows` alone."""
    worst = 0.0
    for expert in range(len(ends) - 1):
        columns = slice(ends[expert], ends[expert + 1])
        groups = slice(ends[expert] // 128, ends[expert + 1] // 128)
        left = inputs.dequantize_rows(a[0][rows, columns], a[1][rows, groups])
        right = inputs.dequantize_rows(b[0][:, columns], b[1][:, groups])
        exact = before[expert].double() + left @ right.t()
        worst = inputs.worse(worst, inputs.relative_error(out[expert], exact))
    return worst


def _flat(values: Tensor, ends: Sequence[int]) -> Tensor:
    """[rows, K] -> one dimension: each expert's [rows, K_e], one behind the other."""
    parts = [values.view(torch.uint8)[:, start:end].reshape(-1) for start, end in pairwise(ends)]
    return torch.cat(parts).view(values.dtype)


def _k_grouped(session: Session, peer: DeepGemm | None, shape: KGroupedShape, row: Row) -> None:
    m, n, counts = shape.m, shape.n, shape.counts()
    ends = [sum(counts[:expert]) for expert in range(len(counts) + 1)]
    offsets = torch.tensor(ends, device=inputs.DEVICE, dtype=torch.int32)
    num_sets, num_calls = plan_rotation(int(row.nbytes), l2_bytes())
    a = [inputs.activations(m, ends[-1]) for _ in range(num_sets)]
    b = [inputs.activations(n, ends[-1]) for _ in range(num_sets)]
    outs = [torch.empty(len(counts), m, n, device=inputs.DEVICE) for _ in range(num_sets)]
    rows = torch.linspace(0, m - 1, min(m, _SAMPLED_ROWS), device=inputs.DEVICE).long()

    def contestant(name: str, calls: list[Call]) -> Contestant:
        def check() -> float:
            outs[0].normal_()
            before = outs[0][:, rows].clone()
            calls[0]()
            return _error(outs[0][:, rows], before, a[0], b[0], ends, rows)

        return Contestant(name, calls, check)

    # All contestants add to the same outputs.
    calls: list[Call] = [
        partial(moe_fp8.k_grouped_gemm_fp8, *a[i], *b[i], offsets, c=outs[i], out=outs[i])
        for i in range(num_sets)
    ]
    contestants = [contestant("moe_fp8", calls)]
    if peer is not None:
        sizes = torch.tensor(counts, device=inputs.DEVICE, dtype=torch.int32)
        calls = [
            partial(
                peer.k_grouped,
                _flat(a[i][0], ends),
                peer.aligned(a[i][1]),
                _flat(b[i][0], ends),
                peer.aligned(b[i][1]),
                outs[i],
                counts,
                sizes,
            )
            for i in range(num_sets)
        ]
        contestants.append(contestant(peer.name, calls))
    session.compare(row, contestants, num_calls, TOLERANCE)
