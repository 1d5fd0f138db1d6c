"""Class indexer_select: from bf16 queries to the keys that sparse attention reads.

DeepGEMM's logits and torch.topk together are the peer, with our quantizer before them. In prefill the peer
takes queries in chunks whose logits fit the same number of bytes. It also adds a mask, made in advance, that
hides the keys a query must not see.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .compare import Contestant, Session
from .inputs import MqaInputs, PagedInputs
from .logits import num_sms
from .peer import DeepGemm
from .results import Row, shape_dict
from .shapes import MqaShape, PagedShape
from .timing import l2_bytes, plan_rotation

_TOPK = 2048

#: Bytes for the logits of a prefill chunk.
_WORKSPACE = 1 << 30

_PREFILL = MqaShape(4096, 131_072)
_DECODE = PagedShape(64, 65_536)


def run_indexer_select(session: Session, peer: DeepGemm | None, step: int) -> None:
    _prefill(session, peer)
    torch.cuda.empty_cache()
    _decode(session, peer)


def _quantize(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x bf16 [..., D], weights fp32 [rows, H] -> fp8 of x's shape, weights times the queries' scales."""
    q, scale = moe_fp8.quantize_fp8(x.view(-1, x.shape[-1]))
    return q.view(x.shape), weights * scale.view_as(weights)


def _difference(chosen: Tensor, logits: Tensor) -> float:
    """The relative difference between the logits of `chosen` [M, k] and the logits of torch.topk's choice.

    The columns of a row may be in any order.
    """
    picked = logits.gather(1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, -torch.inf)
    best = logits.topk(chosen.shape[1], dim=1).values
    picked = picked.sort(dim=1, descending=True).values
    return inputs.relative_error(picked, best.double())


def _prefill(session: Session, peer: DeepGemm | None) -> None:
    shape = _PREFILL
    m, n = shape.num_queries, shape.context
    s = inputs.mqa_inputs(shape)
    x = torch.randn(m, shape.heads, shape.head_dim, device=inputs.DEVICE, dtype=torch.bfloat16)
    workspace = torch.empty(
        moe_fp8.indexer_workspace_bytes(num_queries=m, num_keys=n, topk=_TOPK, max_bytes=_WORKSPACE),
        device=inputs.DEVICE,
        dtype=torch.uint8,
    )
    rows = _WORKSPACE // (4 * n)
    hidden = torch.zeros(m, m, device=inputs.DEVICE).masked_fill_(
        torch.arange(n - m, n, device=inputs.DEVICE) >= s.ke[:, None], -torch.inf
    )

    def ours() -> Tensor:
        q, weights = _quantize(x, s.weights)
        return moe_fp8.indexer_select(q, s.k, s.k_scale, weights, s.ks, s.ke, topk=_TOPK, workspace=workspace)

    def theirs(peer: DeepGemm) -> list[Tensor]:
        q, weights = _quantize(x, s.weights)
        return [_their_chunk(peer, s, q, weights, slice(i, i + rows), hidden) for i in range(0, m, rows)]

    def check(chosen: Tensor) -> float:
        q, weights = _quantize(x, s.weights)
        some = slice(0, m, 64)
        # All queries are scored, because another kernel may score a smaller number of queries.
        logits = moe_fp8.mqa_logits_fp8(q, s.k, s.k_scale, weights, s.ks, s.ke, fill=True)
        return _difference(chosen[some], logits[some])

    contestants = [Contestant("moe_fp8", [ours], lambda: check(ours()))]
    if peer is not None:
        given = peer
        contestants.append(
            Contestant(
                f"{peer.name} + torch.topk",
                [partial(theirs, given)],
                lambda: check(torch.cat(theirs(given))),
                tolerance=1e-3,
            )
        )
    pairs = sum(range(n - m + 1, n + 1))
    terms = shape_dict(shape) | {"topk": _TOPK, "workspace": workspace.numel()}
    row = Row("indexer_select", terms, 0.0, flops=2.0 * shape.heads * shape.head_dim * pairs)
    session.compare(row, contestants, 1, 1e-6)


def _their_chunk(
    peer: DeepGemm, s: MqaInputs, q: Tensor, weights: Tensor, rows: slice, hidden: Tensor
) -> Tensor:
    m, n = hidden.shape[0], s.k.shape[0]
    logits = peer.mqa_logits(q[rows], s.k, s.k_scale, weights[rows], s.ks[rows], s.ke[rows], n)
    logits[:, n - m :].nan_to_num_(0.0, 0.0, 0.0).add_(hidden[rows])
    return logits.topk(_TOPK, dim=1, sorted=False).indices


def _decode(session: Session, peer: DeepGemm | None) -> None:
    shape = _DECODE
    sets_count, num_calls = plan_rotation(sum(shape.lengths()) * (shape.head_dim + 4), l2_bytes())
    sets = [inputs.paged_inputs(shape) for _ in range(sets_count)]
    width, rows = sets[0].max_context_len, shape.batch * shape.next_n
    x = torch.randn(
        shape.batch, shape.next_n, shape.heads, shape.head_dim, device=inputs.DEVICE, dtype=torch.bfloat16
    )
    workspace = torch.empty(
        moe_fp8.indexer_workspace_bytes(
            num_queries=rows, num_keys=width, topk=_TOPK, next_n=shape.next_n, num_sms=num_sms()
        ),
        device=inputs.DEVICE,
        dtype=torch.uint8,
    )
    columns = torch.arange(width, device=inputs.DEVICE, dtype=torch.int32)

    def ours(s: PagedInputs) -> Tensor:
        q, weights = _quantize(x, s.weights)
        return moe_fp8.paged_indexer_select(
            q,
            s.kv_cache,
            weights,
            s.lengths,
            s.block_table,
            topk=_TOPK,
            max_context_len=width,
            num_sms=num_sms(),
            workspace=workspace,
        )

    def hide(logits: Tensor, s: PagedInputs) -> Tensor:
        return logits.masked_fill_(columns >= s.lengths.view(-1, 1), -torch.inf)

    def theirs(peer: DeepGemm, s: PagedInputs) -> Tensor:
        q, weights = _quantize(x, s.weights)
        schedule = peer.paged_metadata(s.lengths, shape.block_size, num_sms())
        logits = peer.paged_mqa_logits(q, s.kv_cache, weights, s.lengths, s.block_table, schedule, width)
        return hide(logits, s).topk(_TOPK, dim=1, sorted=False).indices

    def error(chosen: Tensor, s: PagedInputs) -> float:
        q, weights = _quantize(x, s.weights)
        schedule = moe_fp8.paged_mqa_logits_metadata(
            s.lengths, block_size=shape.block_size, num_sms=num_sms()
        )
        logits = moe_fp8.paged_mqa_logits_fp8(
            q, s.kv_cache, weights, s.lengths, s.block_table, schedule, max_context_len=width
        )
        return _difference(chosen, hide(logits, s))

    contestants = [Contestant.of("moe_fp8", ours, sets, error)]
    if peer is not None:
        name, call = f"{peer.name} + torch.topk", partial(theirs, peer)
        contestants.append(Contestant.of(name, call, sets, error, tolerance=1e-3))
    row = Row("indexer_select", shape_dict(shape) | {"topk": _TOPK}, 0.0)
    session.compare(row, contestants, num_calls, 1e-6)
