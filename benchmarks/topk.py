"""Class topk: the choice of keys by the indexer's logits, compared with torch.topk."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fp8

from . import inputs, random_shapes, unseen_shapes
from .compare import Contestant, Session
from .peer import DeepGemm
from .results import Row
from .shapes import TOPK, TopkShape
from .timing import l2_bytes, plan_rotation

_PEER = "torch.topk"


def run_topk(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Time the op beside torch.topk without order, because `peer` has no such op."""
    for terms, shape in session.shapes(step, TOPK, random_shapes.TOPK, unseen_shapes.topk):
        _topk(session, shape, terms)
        torch.cuda.empty_cache()


def _logits(shape: TopkShape, ends: Tensor | None) -> Tensor:
    """Normal logits, with -inf outside the ranges; torch.topk has no other way to know the ranges."""
    logits = torch.randn(shape.rows, shape.columns, device=inputs.DEVICE)
    if ends is not None:
        for row, end in enumerate(shape.ends()):
            logits[row, end:] = float("-inf")
    return logits


def _error(columns: Tensor, logits: Tensor, k: int) -> float:
    """0 if the chosen logits equal torch.topk's choice and no column is chosen twice, else infinity."""
    chosen = torch.where(columns < 0, float("-inf"), logits.gather(1, columns.long().clamp_min(0)))
    columns = columns.sort(1).values
    repeated = (columns[:, 1:] == columns[:, :-1]) & (columns[:, 1:] >= 0)
    exact = torch.equal(chosen.sort(1, descending=True).values, logits.topk(k, 1).values)
    return 0.0 if exact and not repeated.any() else float("inf")


def _topk(session: Session, shape: TopkShape, terms: dict[str, Any]) -> None:
    k, lengths = shape.k, shape.ends()
    set_bytes = 4 * sum(lengths)
    num_sets, num_calls = plan_rotation(set_bytes, l2_bytes())
    ends = None
    if shape.skew == "causal":
        ends = torch.tensor(lengths, device=inputs.DEVICE, dtype=torch.int32)
    sets = [_logits(shape, ends) for _ in range(num_sets)]
    out = torch.full((shape.rows, k), -2, device=inputs.DEVICE, dtype=torch.int32)

    def ours(logits: Tensor) -> Tensor:
        return moe_fp8.indexer_topk(logits, topk=k, ke=ends, out=out)

    def theirs(logits: Tensor) -> Tensor:
        return torch.topk(logits, k, dim=1, sorted=False).indices

    contestants = [
        Contestant.of("moe_fp8", ours, sets, partial(_error, k=k)),
        Contestant.of(_PEER, theirs, sets, partial(_error, k=k)),
    ]
    row = Row("topk", terms, 0.0, nbytes=set_bytes + 4.0 * shape.rows * k, own_bytes=set_bytes)
    session.compare(row, contestants, num_calls, 0.0)
