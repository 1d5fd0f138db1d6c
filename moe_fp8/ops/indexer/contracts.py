"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of ranges, lengths, slots, pages and scales.

Each error names the first wrong entry. `op` is the op that the caller called.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.heuristics import PAGED_CHUNK
from moe_fp8.ops import contents
from moe_fp8.ops.arguments import MAX_EXTENT
from moe_fp8.ops.indexer import reference
from moe_fp8.ops.indexer.reference import token_lengths

_log = logging.getLogger(__name__)


def cache_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """No slot lies past the cache. (A negative slot skips its row.)"""
    # (torch would cut the number to the 32 bits of int32 slots.)
    at = contents.first(slot_mapping.long() >= num_slots)
    if at is not None:
        raise ContractError(
            "indexer_quantize_and_cache",
            "slot_mapping",
            f"slots below {num_slots} (pages x block_size)",
            f"{int(slot_mapping[at])} at row {at[0]}",
            "use -1 for a row that is not to be cached",
            row=at[0],
        )


def column_ranges(ks: Tensor | None, ke: Tensor | None, columns: int) -> None:
    """0 <= ks[i] <= ke[i] <= N."""
    if ks is not None and ke is not None:
        _ranges("indexer_topk", ks, ke, columns, "columns of logits")
    elif ke is not None:
        _ranges("indexer_topk", torch.zeros_like(ke), ke, columns, "columns of logits")
    elif ks is not None:
        _ranges("indexer_topk", ks, torch.full_like(ks, columns), columns, "columns of logits")


def _ranges(op: str, ks: Tensor, ke: Tensor, most: int, of: str) -> None:
    at = contents.first((ks < 0) | (ks > ke) | (ke > most))
    if at is not None:
        raise ContractError(
            op,
            "ks, ke",
            f"0 <= ks <= ke <= {most} ({of})",
            f"ks {int(ks[at])}, ke {int(ke[at])} at row {at[0]}",
            "use equal ends for an empty row",
            row=at[0],
        )


def queries(op: str, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, columns: int) -> None:
    """0 <= ks[i] <= ke[i] <= N, no row is wider than the output, and scales of what is read are finite.

    The weights, which hold the scales of q, are read for queries that see a key.
    """
    keys = k_scale.shape[0]
    _ranges(op, ks, ke, keys, "rows of k")
    at = contents.first(ke - ks > columns)
    if at is not None:
        raise ContractError(
            op,
            "max_seqlen_k",
            f"at least the widest row, {int(ke[at] - ks[at])} keys at row {at[0]}",
            columns,
            "pass a larger max_seqlen_k",
            row=at[0],
        )
    contents.finite(op, "weights", weights, ke > ks)
    # +1 where a query's range begins and -1 where it ends: the sum up to a key counts the ranges around it.
    edges = torch.zeros(keys + 1, dtype=torch.int32, device=ks.device)
    edges.index_add_(0, ks, torch.ones_like(ks)).index_add_(0, ke, -torch.ones_like(ke))
    contents.finite(op, "k_scale", k_scale, edges[:keys].cumsum(0) > 0, unit="key")


def chunk_count(context_lens: Tensor, next_n: int) -> None:
    """The chunks of all requests together can be counted in 32 bits."""
    longest = token_lengths(context_lens, next_n).amax(1)
    chunks = int(((longest + PAGED_CHUNK - 1) // PAGED_CHUNK).sum())
    if chunks > MAX_EXTENT:
        raise ContractError(
            "paged_mqa_logits_metadata",
            "context_lens",
            f"at most {MAX_EXTENT} chunks of {PAGED_CHUNK} tokens in all requests together",
            chunks,
            "schedule fewer requests at once",
        )


def schedule_of(context_lens: Tensor, next_n: int, given: Tensor) -> None:
    """The workers of the schedule `given` take all chunks of these lengths, one worker after the other.

    A schedule of other lengths may do so, too, such as a schedule of more requests.
    """
    if context_lens.shape[0] == 0:
        return
    expected = torch.empty_like(given)
    reference.paged_mqa_logits_metadata(context_lens, given.shape[0] - 1, next_n, expected)
    if torch.equal(given, expected):
        return
    places, wanted = (one[:, 0].long() * 2**32 + one[:, 1].clamp(min=0) for one in (given, expected))
    wrong = torch.zeros_like(places, dtype=torch.bool)
    wrong[1:] = places[1:] < places[:-1]
    # (The kernel takes request 0 for a negative one, but keeps the chunk.)
    wrong[0] = (places[0] > wanted[0]) | (places[0] < 0)
    wrong[-1] |= places[-1] < wanted[-1]
    at = contents.first(wrong)
    if at is not None:
        raise ContractError(
            "paged_mqa_logits_fp8",
            "metadata",
            f"a schedule that takes all chunks in their order; that of context_lens and next_n = {next_n} "
            f"begins worker {at[0]} at {expected[at].tolist()}",
            given[at].tolist(),
            "call paged_mqa_logits_metadata again when lengths change",
            row=at[0],
        )
    _say_uneven()


@cache
def _say_uneven() -> None:
    """Warn once in a process."""
    _log.warning(
        "the schedule of a call of paged_mqa_logits_fp8 is not that of its lengths: the logits are right, "
        "but some workers may have much more to do than others"
    )


def paged_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule: Tensor,
    out: Tensor,
) -> None:
    """The rules of `paged_contexts` hold, and `schedule` takes all chunks of these lengths."""
    op, next_n = "paged_mqa_logits_fp8", q.shape[1]
    paged_contexts(op, context_lens, next_n, block_table, kv_cache, weights, out.shape[1])
    schedule_of(context_lens, next_n, schedule)


def paged_contexts(
    op: str,
    context_lens: Tensor,
    next_n: int,
    block_table: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    columns: int,
) -> None:
    """Lengths fit the output and the block table, and the cache has every page that they reach.

    Scales of the keys and the weights are finite where they are read.
    """
    num_pages, block_size = kv_cache.shape[:2]
    at = contents.first(context_lens < 0)
    if at is not None:
        got = int(context_lens[at])
        raise ContractError(
            op, "context_lens", "lengths of at least 0", f"{got} at {list(at)}", "use 0 for none", row=at[0]
        )
    tokens = token_lengths(context_lens, next_n)
    lengths = tokens.amax(1)
    at = contents.first(lengths > columns)
    if at is not None:
        raise ContractError(
            op,
            "context_lens",
            f"at most max_context_len, {columns}",
            f"{int(lengths[at])} for request {at[0]}",
            "pass a larger max_context_len",
            row=at[0],
        )
    pages = (lengths + block_size - 1) // block_size
    at = contents.first(pages > block_table.shape[1])
    if at is not None:
        raise ContractError(
            op,
            "block_table",
            f"{int(pages[at])} pages for the {int(lengths[at])} tokens of request {at[0]}",
            f"{block_table.shape[1]} columns",
            "widen block_table",
            row=at[0],
        )
    reached = torch.arange(block_table.shape[1], device=pages.device) < pages[:, None]
    at = contents.first(reached & ((block_table < 0) | (block_table >= num_pages)))
    if at is not None:
        raise ContractError(
            op,
            "block_table",
            f"pages from 0 to {num_pages - 1}",
            f"{int(block_table[at])} at {list(at)}",
            "only entries past a context's last page may be anything",
            row=at[0],
        )
    contents.finite(op, "weights", weights, tokens.reshape(-1) > 0)
    _cached_scales(op, lengths, block_table, kv_cache)


def _cached_scales(op: str, lengths: Tensor, block_table: Tensor, kv_cache: Tensor) -> None:
    """The scales of all keys below the lengths are finite; the table is right."""
    num_pages, block_size, _, width = kv_cache.shape
    if num_pages == 0 or block_table.numel() == 0:
        return
    stride = kv_cache.stride(0) if num_pages > 1 else block_size * width
    begin = kv_cache.storage_offset() + block_size * (width - 4)
    scales = kv_cache.as_strided((num_pages, block_size * 4), (stride, 1), begin).clone().view(torch.float32)
    wrong = scales.isfinite().logical_not_()
    if not wrong.any():
        return
    table = block_table.clamp(0, num_pages - 1).long()
    positions = torch.arange(table.shape[1] * block_size, device=lengths.device)
    at = contents.first(wrong[table].view(table.shape[0], -1) & (positions < lengths[:, None]))
    if at is not None:
        request, position = at
        page, offset = int(table[request, position // block_size]), position % block_size
        raise ContractError(
            op,
            "kv_cache",
            "finite scales of all keys below a context's length",
            f"{float(scales[page, offset])} at position {position} of request {request} "
            f"(page {page}, token {offset})",
            "write every key with indexer_quantize_and_cache before a context counts it",
            row=request,
        )
