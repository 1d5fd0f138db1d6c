"""Cases of `repetition`: the indexer of sparse attention, from keys in the cache to the selected keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .logits import num_sms
from .repetition import Case, Work
from .shapes import MqaShape, PagedShape, TopkShape


@dataclass(frozen=True)
class CacheShape:
    """Every slot of `pages` is written once, and some rows have no slot."""

    pages: int
    head_dim: int = 128
    block_size: int = 64


def mqa(
    shape: MqaShape,
    out_dtype: str = "float32",
    fill: bool = False,
    compressed: bool = False,
    window: bool = False,
) -> Work:
    """Causal ranges; with `window` a query does not see the first third of the keys before it."""
    given = inputs.mqa_inputs(shape)
    if window:
        torch.floor_divide(given.ke, 3, out=given.ks)
    width = int((given.ke - given.ks).max()) if compressed else shape.context
    operands = (given.q, given.k, given.k_scale, given.weights, given.ks, given.ke)

    def call(out: Tensor) -> None:
        moe_fp8.mqa_logits_fp8(*operands, max_seqlen_k=width if compressed else None, fill=fill, out=out)

    columns = torch.arange(width, device=inputs.DEVICE)
    low, high = given.ks[:, None], given.ke[:, None]
    if fill:
        defined = None
    elif compressed:
        defined = columns < high - low
    else:
        defined = (columns >= low) & (columns < high)
    return Work(call, (shape.num_queries, width), getattr(torch, out_dtype), inputs.DEVICE, defined)


def paged(shape: PagedShape, out_dtype: str = "float32", schedule_ahead: bool = False) -> Work:
    """The schedule is made once ahead, or by a kernel just before each call."""
    given = inputs.paged_inputs(shape)
    made = moe_fp8.paged_mqa_logits_metadata(given.lengths, block_size=shape.block_size, num_sms=num_sms())

    def call(out: Tensor) -> None:
        schedule = made
        if not schedule_ahead:
            schedule = moe_fp8.paged_mqa_logits_metadata(
                given.lengths, block_size=shape.block_size, num_sms=num_sms()
            )
        _paged_logits(given, schedule, out)

    size = (shape.batch * shape.next_n, given.max_context_len)
    return Work(call, size, getattr(torch, out_dtype), inputs.DEVICE, _seen(given))


def _paged_logits(given: inputs.PagedInputs, schedule: Tensor, out: Tensor) -> None:
    moe_fp8.paged_mqa_logits_fp8(
        given.q,
        given.kv_cache,
        given.weights,
        given.lengths,
        given.block_table,
        schedule,
        max_context_len=given.max_context_len,
        out=out,
    )


def _seen(given: inputs.PagedInputs) -> Tensor:
    """bool [B * next_n, max_context_len]: the positions that each token sees."""
    return torch.arange(given.max_context_len, device=inputs.DEVICE) < given.lengths.view(-1, 1)


def metadata(shape: PagedShape) -> Work:
    lengths = inputs.paged_lengths(shape)

    def call(out: Tensor) -> None:
        moe_fp8.paged_mqa_logits_metadata(lengths, block_size=shape.block_size, num_sms=num_sms(), out=out)

    return Work(call, (num_sms() + 1, 2), torch.int32, inputs.DEVICE)


def cache(shape: CacheShape, in_dtype: str = "bfloat16", power_of_two: bool = False) -> Work:
    """The output holds bytes: the whole cache, with one page in each row."""
    num_slots = shape.pages * shape.block_size
    slots = torch.randperm(num_slots + num_slots // 4, device=inputs.DEVICE)
    slots[slots >= num_slots] = -1
    k = torch.randn(len(slots), shape.head_dim, device=inputs.DEVICE).to(getattr(torch, in_dtype))
    width = shape.head_dim + 4

    def call(out: Tensor) -> None:
        pages = out.view(shape.pages, shape.block_size, 1, width)
        moe_fp8.indexer_quantize_and_cache(k, pages, slots, power_of_two=power_of_two)

    return Work(call, (shape.pages, shape.block_size * width), torch.uint8, inputs.DEVICE)


def cache_and_score(shape: PagedShape) -> Work:
    """One kernel writes the keys, the next reads them; if it reads too early, it finds other keys."""
    given = inputs.paged_inputs(shape)
    num_slots = given.kv_cache.shape[0] * shape.block_size
    slots = torch.randperm(num_slots, device=inputs.DEVICE)
    others, k = (torch.randn(num_slots, shape.head_dim, device=inputs.DEVICE).bfloat16() for _ in range(2))

    def call(out: Tensor) -> None:
        schedule = moe_fp8.paged_mqa_logits_metadata(
            given.lengths, block_size=shape.block_size, num_sms=num_sms()
        )
        moe_fp8.indexer_quantize_and_cache(others, given.kv_cache, slots)
        moe_fp8.indexer_quantize_and_cache(k, given.kv_cache, slots)
        _paged_logits(given, schedule, out)

    size = (shape.batch * shape.next_n, given.max_context_len)
    return Work(call, size, torch.float32, inputs.DEVICE, _seen(given))


def topk(shape: TopkShape, in_dtype: str = "float32", ties: bool = False, in_order: bool = False) -> Work:
    """out[0] holds the chosen columns and out[1] the bits of their logits.

    `ties`: the logits have few distinct values.
    """
    logits = torch.randn(shape.rows, shape.columns, device=inputs.DEVICE)
    logits = (logits.mul_(2).round_() if ties else logits).to(getattr(torch, in_dtype))
    ends = torch.tensor(shape.ends(), device=inputs.DEVICE, dtype=torch.int32)
    values = logits.new_empty(shape.rows, shape.k)

    def call(out: Tensor) -> None:
        moe_fp8.indexer_topk(logits, topk=shape.k, ke=ends, sorted=in_order, out=out[0], values=values)
        out[1].view(torch.float32).copy_(values)

    return Work(call, (2, shape.rows, shape.k), torch.int32, inputs.DEVICE)


def select(shape: MqaShape, topk: int, max_bytes: int | None = None) -> Work:
    """Select in one piece, or in the chunks that `max_bytes` of workspace allow."""
    given = inputs.mqa_inputs(shape)
    workspace = _workspace(shape.num_queries, shape.context, topk, max_bytes)

    def call(out: Tensor) -> None:
        moe_fp8.indexer_select(
            given.q,
            given.k,
            given.k_scale,
            given.weights,
            given.ks,
            given.ke,
            topk=topk,
            workspace=workspace,
            out=out,
        )

    return Work(call, (shape.num_queries, topk), torch.int32, inputs.DEVICE)


def paged_select(shape: PagedShape, topk: int, max_bytes: int | None = None) -> Work:
    """The same as `select`, with the paged cache."""
    given = inputs.paged_inputs(shape)
    rows = shape.batch * shape.next_n
    workspace = _workspace(
        rows, given.max_context_len, topk, max_bytes, next_n=shape.next_n, num_sms=num_sms()
    )

    def call(out: Tensor) -> None:
        moe_fp8.paged_indexer_select(
            given.q,
            given.kv_cache,
            given.weights,
            given.lengths,
            given.block_table,
            topk=topk,
            max_context_len=given.max_context_len,
            num_sms=num_sms(),
            workspace=workspace,
            out=out,
        )

    return Work(call, (rows, topk), torch.int32, inputs.DEVICE)


def _workspace(rows: int, keys: int, topk: int, max_bytes: int | None, **paged: int) -> Tensor:
    size = moe_fp8.indexer_workspace_bytes(
        num_queries=rows, num_keys=keys, topk=topk, max_bytes=max_bytes, **paged
    )
    return torch.empty(size, device=inputs.DEVICE, dtype=torch.uint8)


def _mqa(shape: MqaShape, **options: Any) -> Case:
    return Case("mqa_logits_fp8", shape, mqa, options)


def _paged(shape: PagedShape, **options: Any) -> Case:
    return Case("paged_mqa_logits_fp8", shape, paged, options)


def _topk(shape: TopkShape, **options: Any) -> Case:
    return Case("indexer_topk", shape, topk, options)


#: Calls that are large enough for the kernel with terms. The first four calls once showed a race between
#: warps.
_MQA_WITH_TERMS = [
    _mqa(MqaShape(8192, 65536, 32)),
    _mqa(MqaShape(8192, 32768, 64)),
    _mqa(MqaShape(2048, 16384, 64), fill=True),
    _mqa(MqaShape(2048, 65536, 32), out_dtype="bfloat16", compressed=True, window=True),
    _mqa(MqaShape(48, 200_000, 64)),
    _mqa(MqaShape(4096, 16384, 64, 64)),
    _mqa(MqaShape(4096, 16384, 16), window=True),
    _mqa(MqaShape(4096, 16384, 8, 32), out_dtype="bfloat16"),
    _mqa(MqaShape(4096, 8192, 32, 32), fill=True, compressed=True, window=True),
]

_MQA_WITHOUT_TERMS = [
    _mqa(MqaShape(512, 8192, 64)),
    _mqa(MqaShape(100, 30_000, 64), fill=True),
    _mqa(MqaShape(1000, 4096, 32), out_dtype="bfloat16", fill=True, compressed=True, window=True),
    _mqa(MqaShape(5, 100_000, 32, 64)),
    _mqa(MqaShape(300, 6000, 16, 64), compressed=True),
    _mqa(MqaShape(256, 8192, 8, 32), out_dtype="bfloat16"),
]

_PAGED = [
    _paged(PagedShape(64, 32_768)),
    _paged(PagedShape(256, 8192, 2), schedule_ahead=True),
    _paged(PagedShape(8, 65_536, 4, 32)),
    _paged(PagedShape(128, 16_384, 1, 32, 128, 32), out_dtype="bfloat16"),
    _paged(PagedShape(33, 4096, 8, 64, 128, 128), schedule_ahead=True),
    _paged(PagedShape(300, 4096, 1, 16, 64, 64)),
    _paged(PagedShape(40, 6000, 4, 8, 32, 128), out_dtype="bfloat16", schedule_ahead=True),
    _paged(PagedShape(64, 2048, 2, 16, 128, 32)),
    Case("paged_mqa_logits_metadata", PagedShape(64, 32_768), metadata),
    Case("paged_mqa_logits_metadata", PagedShape(1500, 3000, 4), metadata),
]

_CACHE = [
    Case("indexer_quantize_and_cache", CacheShape(2, 128, 32), cache),
    Case("indexer_quantize_and_cache", CacheShape(300, 64, 128), cache, {"in_dtype": "float32"}),
    Case("indexer_quantize_and_cache", CacheShape(400), cache, {"power_of_two": True}),
    Case("indexer_quantize_and_cache + paged_mqa_logits_fp8", PagedShape(32, 1024), cache_and_score),
]

#: One, two, four or eight CTAs work on a row. Some cases have many equal logits.
_TOPK = [
    _topk(TopkShape(1, 1_048_576, 2048)),
    _topk(TopkShape(7, 200_000, 512, "causal"), ties=True, in_order=True),
    _topk(TopkShape(32, 40_000, 2048)),
    _topk(TopkShape(32, 131_072, 4096), ties=True),
    _topk(TopkShape(64, 65_536, 2048, "causal"), in_order=True),
    _topk(TopkShape(100, 30_000, 1024), in_dtype="bfloat16"),
    _topk(TopkShape(2048, 16_384, 2048, "causal"), ties=True),
    _topk(TopkShape(4096, 4096, 512)),
]

_SELECT = [
    Case("indexer_select", MqaShape(1024, 16_384), select, {"topk": 2048}),
    Case("indexer_select", MqaShape(600, 30_000), select, {"topk": 512, "max_bytes": 16 << 20}),
    Case("paged_indexer_select", PagedShape(64, 16_384), paged_select, {"topk": 2048}),
    Case("paged_indexer_select", PagedShape(16, 8192, 2), paged_select, {"topk": 512, "max_bytes": 1 << 20}),
]

CASES = [*_MQA_WITH_TERMS, *_MQA_WITHOUT_TERMS, *_PAGED, *_CACHE, *_TOPK, *_SELECT]
