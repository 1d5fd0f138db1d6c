"""Classes mqa_logits, paged_mqa_logits and paged_metadata: the indexer of sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_fp8

from . import inputs, random_indexer, unseen_shapes
from .compare import Contestant, Session
from .inputs import MqaInputs, PagedInputs
from .peer import DeepGemm
from .results import Row
from .shapes import MQA_LOGITS, PAGED_METADATA, PAGED_MQA_LOGITS, MqaShape, PagedShape
from .timing import Call, l2_bytes, plan_rotation

#: Outputs are fp32; the tensor core's sum over 128 products keeps fewer bits than fp32.
TOLERANCE = 2e-3


def run_mqa_logits(session: Session, peer: DeepGemm | None, step: int) -> None:
    chosen = session.shapes(step, MQA_LOGITS, random_indexer.MQA_LOGITS, unseen_shapes.mqa_logits)
    for terms, shape in chosen:
        _mqa(session, peer, shape, terms)
        torch.cuda.empty_cache()


def run_paged_mqa_logits(session: Session, peer: DeepGemm | None, step: int) -> None:
    development, unseen = random_indexer.PAGED_MQA_LOGITS, unseen_shapes.paged_mqa_logits
    for terms, shape in session.shapes(step, PAGED_MQA_LOGITS, development, unseen):
        _paged(session, peer, shape, terms)
        torch.cuda.empty_cache()


def run_paged_metadata(session: Session, peer: DeepGemm | None, step: int) -> None:
    for shape in PAGED_METADATA[::step]:
        _metadata(session, peer, shape)


def num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _mqa(session: Session, peer: DeepGemm | None, shape: MqaShape, terms: dict[str, Any]) -> None:
    m, n, heads, dim = shape.num_queries, shape.context, shape.heads, shape.head_dim
    set_bytes = n * (dim + 4) + m * heads * (dim + 4)
    num_sets, num_calls = plan_rotation(set_bytes, l2_bytes())
    sets = [inputs.mqa_inputs(shape) for _ in range(num_sets)]
    # All sets share one output, because the peer's allocation inside a graph also gives one buffer.
    out = torch.full((m, n), float("nan"), device=inputs.DEVICE)

    def ours(s: MqaInputs) -> Tensor:
        return moe_fp8.mqa_logits_fp8(s.q, s.k, s.k_scale, s.weights, s.ks, s.ke, out=out)

    contestants = [Contestant.of("moe_fp8", ours, sets, inputs.mqa_error)]
    if peer is not None:
        theirs = peer

        def call(s: MqaInputs) -> Tensor:
            return theirs.mqa_logits(s.q, s.k, s.k_scale, s.weights, s.ks, s.ke, n)

        contestants.append(Contestant.of(peer.name, call, sets, inputs.mqa_error))
    pairs = sum(range(n - m + 1, n + 1))
    row = Row(
        "mqa_logits",
        terms,
        0.0,
        flops=2.0 * heads * dim * pairs,
        nbytes=set_bytes + 4.0 * pairs,
        own_bytes=set_bytes,
    )
    session.compare(row, contestants, num_calls, TOLERANCE)


def _paged(session: Session, peer: DeepGemm | None, shape: PagedShape, terms: dict[str, Any]) -> None:
    tokens = sum(shape.lengths())
    set_bytes = (tokens + shape.batch * shape.next_n * shape.heads) * (shape.head_dim + 4)
    num_sets, num_calls = plan_rotation(set_bytes, l2_bytes())
    sets = [inputs.paged_inputs(shape) for _ in range(num_sets)]
    width = sets[0].max_context_len
    out = torch.full((shape.batch * shape.next_n, width), float("nan"), device=inputs.DEVICE)
    schedule = moe_fp8.paged_mqa_logits_metadata(
        sets[0].lengths, block_size=shape.block_size, num_sms=num_sms(), next_n=shape.next_n
    )

    def ours(s: PagedInputs) -> Tensor:
        return moe_fp8.paged_mqa_logits_fp8(
            s.q, s.kv_cache, s.weights, s.lengths, s.block_table, schedule, max_context_len=width, out=out
        )

    contestants = [Contestant.of("moe_fp8", ours, sets, inputs.paged_error)]
    if peer is not None:
        theirs = peer
        their_schedule = theirs.paged_metadata(sets[0].lengths, shape.block_size, num_sms())

        def call(s: PagedInputs) -> Tensor:
            return theirs.paged_mqa_logits(
                s.q, s.kv_cache, s.weights, s.lengths, s.block_table, their_schedule, width
            )

        contestants.append(Contestant.of(peer.name, call, sets, inputs.paged_error))
    pairs = tokens * shape.next_n
    row = Row(
        "paged_mqa_logits",
        terms,
        0.0,
        flops=2.0 * shape.heads * shape.head_dim * pairs,
        nbytes=set_bytes + 4.0 * pairs,
        own_bytes=set_bytes,
    )
    session.compare(row, contestants, num_calls, TOLERANCE)


def _metadata(session: Session, peer: DeepGemm | None, shape: PagedShape) -> None:
    lengths = inputs.paged_lengths(shape)

    def ours() -> Tensor:
        return moe_fp8.paged_mqa_logits_metadata(
            lengths, block_size=shape.block_size, num_sms=num_sms(), next_n=shape.next_n
        )

    def check_ours() -> float:
        expected = moe_fp8.paged_mqa_logits_metadata(
            lengths.cpu(), block_size=shape.block_size, num_sms=num_sms(), next_n=shape.next_n
        )
        return 0.0 if torch.equal(ours().cpu(), expected) else float("inf")

    calls: list[Call] = [ours]
    contestants = [Contestant("moe_fp8", calls, check_ours)]
    if peer is not None:
        theirs = peer

        def call() -> Tensor:
            return theirs.paged_metadata(lengths, shape.block_size, num_sms())

        def check() -> float:
            # The peer's schedule has its own chunk size, so only the shape can be compared.
            return 0.0 if call().shape == (num_sms() + 1, 2) else float("inf")

        contestants.append(Contestant(peer.name, [call], check))
    row = Row("paged_metadata", {"batch": shape.batch, "next_n": shape.next_n}, 0.0)
    session.compare(row, contestants, 16, 0.0)
