"""CUDA launches of the indexer's ops: problem -> spec, grid and the one struct that the kernel takes."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.ops import launch
from moe_fp8.ops.arguments import IN_DTYPES, row_stride
from moe_fp8.ops.parameters import Prepared, Tiled, prepared
from moe_fp8.params import INDEXER_CACHE, INDEXER_TOPK, MQA_LOGITS, PAGED_MQA_LOGITS, PAGED_MQA_METADATA
from moe_fp8.problems import (
    IndexerCacheProblem,
    IndexerTopkProblem,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
)
from moe_fp8.settings import settings
from moe_fp8.specs import (
    select_indexer_cache,
    select_indexer_topk,
    select_mqa_logits,
    select_paged_mqa_logits,
    select_paged_mqa_metadata,
)

_OUT_DTYPES: dict[torch.dtype, OutDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    compressed: bool,
    fill: bool,
    out: Tensor,
    whole_queries: int = 0,
    whole_keys: int = 0,
) -> Prepared:
    """Prepare prefill logits; q [M,H,D], k [N,D], weights [M,H], out [M, N or max_seqlen_k].

    `whole_queries` and `whole_keys` are the sizes of the selection that this call is a chunk of; they choose
    its kernel. They are 0 if the call is no chunk.
    """
    m, heads, dim = q.shape
    n = k.shape[0]
    width = out.shape[1]
    chosen = select_mqa_logits(
        MqaLogitsProblem(
            m,
            n,
            heads,
            dim,
            compressed,
            fill,
            launch.num_sms(q.get_device()),
            _OUT_DTYPES[out.dtype],
            settings().batch_invariant,
            whole_queries,
            whole_keys,
        )
    )
    config, division, query_blocks, items = chosen.config
    block_q, box_q = config.block_q, heuristics.query_box_rows(config.block_q, heads)
    return prepared(
        MQA_LOGITS,
        chosen.spec,
        chosen.grid,
        Tiled(q, "uint8", (dim, m * heads), (row_stride(q),), (dim, box_q), dim),
        Tiled(k, "uint8", (dim, n), (row_stride(k),), (dim, heuristics.MQA_BLOCK_KV), dim),
        Tiled(k_scale, "float32", (n, 1), ((n + 3 & -4) * 4,), (heuristics.MQA_BLOCK_KV, 1), 0),
        Tiled(weights, "float32", (heads, m), (row_stride(weights) * 4,), (heads, block_q), 0),
        out,
        ks,
        ke,
        out.stride(0),
        m,
        n,
        width,
        division.chunk_kv,
        query_blocks,
        items,
        division.even,
    )


def paged_mqa_logits_metadata(
    context_lens: Tensor,
    block_size: int,
    next_n: int,
    out: Tensor,
) -> Prepared:
    """Prepare the schedule of the paged logits; context_lens [B] or [B,next_n], out [num_workers + 1, 2]."""
    batch = context_lens.shape[0]
    num_workers = out.shape[0] - 1
    num_sms = launch.num_sms(context_lens.get_device())
    chosen = select_paged_mqa_metadata(PagedMqaMetadataProblem(batch, next_n, num_sms))
    return prepared(
        PAGED_MQA_METADATA,
        chosen.spec,
        chosen.grid,
        context_lens,
        next_n,
        context_lens.dim() == 2,
        out,
        batch,
        num_workers,
    )


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    out: Tensor,
) -> Prepared:
    """Prepare decode logits; q [B,next_n,H,D], kv_cache [pages,block,1,D+4], out [B*next_n, width]."""
    batch, next_n, heads, dim = q.shape
    pages, page_size = kv_cache.shape[0], kv_cache.shape[1]
    page_stride = kv_cache.stride(0) if pages > 1 else page_size * (dim + 4)
    chosen = select_paged_mqa_logits(
        PagedMqaLogitsProblem(
            batch,
            next_n,
            heads,
            dim,
            page_size,
            launch.num_sms(q.get_device()),
            _OUT_DTYPES[out.dtype],
            metadata.shape[0] - 1,
        )
    )
    block_q = chosen.config.block_q
    box_q = heuristics.query_box_rows(block_q, heads)
    rows = batch * next_n
    box = heuristics.key_box_rows(page_size)
    return prepared(
        PAGED_MQA_LOGITS,
        chosen.spec,
        chosen.grid,
        Tiled(q, "uint8", (dim, rows * heads), (row_stride(q),), (dim, box_q), dim),
        Tiled(kv_cache, "uint8", (dim, page_size, pages), (dim, page_stride), (dim, box, 1), dim, 128),
        # A page's scales stand behind its keys.
        Tiled(kv_cache, "float32", (page_size, pages), (page_stride,), (box, 1), 0, offset=page_size * dim),
        Tiled(weights, "float32", (heads, rows), (row_stride(weights) * 4,), (heads, block_q), 0),
        out,
        block_table,
        metadata,
        context_lens,
        next_n,
        context_lens.dim() == 2,
        out.stride(0),
        block_table.stride(0),
        batch,
        # The kernel stops at this width whatever the lengths say, and so reads no page past the table.
        min(out.shape[1], block_table.shape[1] * page_size),
    )


def indexer_quantize_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool
) -> Prepared:
    """Prepare the write of k [T,D] into the slots slot_mapping [T] of kv_cache [pages,block,1,D+4]."""
    rows, dim = k.shape
    pages, page_size = kv_cache.shape[0], kv_cache.shape[1]
    num_sms = launch.num_sms(k.get_device())
    chosen = select_indexer_cache(IndexerCacheProblem(rows, dim, IN_DTYPES[k.dtype], power_of_two, num_sms))
    return prepared(
        INDEXER_CACHE,
        chosen.spec,
        chosen.grid,
        k,
        kv_cache,
        slot_mapping,
        k.stride(0),
        kv_cache.stride(0),
        pages,
        rows,
        page_size.bit_length() - 1,
        slot_mapping.dtype is torch.int64,
    )


def indexer_topk(
    logits: Tensor,
    topk: int,
    ks: Tensor | None,
    ke: Tensor | None,
    in_order: bool,
    out: Tensor,
    values: Tensor | None,
    first_column: int = 0,
    carried: Tensor | None = None,
) -> Prepared:
    """Prepare the top-k of logits [M,N] into out and values [M,topk]; ks and ke are [M], carried is [M,W].

    All but logits and out may be None.
    """
    rows, columns = logits.shape
    num_sms = launch.num_sms(logits.get_device())
    chosen = select_indexer_topk(IndexerTopkProblem(rows, columns, _OUT_DTYPES[logits.dtype], num_sms))
    return prepared(
        INDEXER_TOPK,
        chosen.spec,
        chosen.grid,
        logits,
        ks,
        ke,
        out,
        values,
        carried,
        logits.stride(0),
        columns,
        topk,
        in_order,
        first_column,
        0 if carried is None else carried.shape[1],
    )
