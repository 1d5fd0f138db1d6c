"""From queries and keys to the indices that sparse attention reads, within a workspace of a given size.

Logits are made a chunk of queries and of keys at a time. Chunks of keys are taken from the last to the first,
and what the later ones left is carried along behind a chunk's columns: both are in the order of positions
then, so that one top-k over the row merges them, ties included. All chunks are scored by the kernel of the
whole, and so a logit does not depend on its chunk; the result is that of one piece, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import extent, workers
from moe_fp8.ops.indexer import checks, contracts
from moe_fp8.ops.indexer.logits import metadata_op, mqa_logits_chunk_op, paged_logits_op
from moe_fp8.ops.indexer.topk import topk_chunk_op
from moe_fp8.ops.registry import checked

#: Chunks of keys are whole chunks of the paged schedule, and so whole pages and whole tiles.
_KEYS = 256

#: So many queries at once fill the GPU; below, a chunk of keys rather gets shorter.
_ENOUGH_QUERIES = 512

#: Chunks of keys are at least so many times top-k, since what is carried is read again with each.
_LEAST_CHUNK = 4

#: Every buffer in the workspace begins at a multiple of this.
_ALIGNMENT = 256


@dataclass(frozen=True)
class SelectionPlan:
    """How a selection is divided: `rows` of logits, `columns` of keys at once, and the bytes of that."""

    rows: int
    columns: int
    carried: int  # columns behind a chunk's, for the topk that later chunks left; 0 if there is one chunk
    workers: int  # of the paged schedule; 0: not paged

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer: logits, carried values, positions (2), bounds of rows (3), a schedule."""
        logits, carry = 4 * self.rows * (self.columns + self.carried), 4 * self.rows * self.carried
        return (
            logits,
            carry,
            carry,
            carry,
            *[4 * self.rows] * 3,
            8 * (self.workers + 1) if self.workers else 0,
        )

    @property
    def num_bytes(self) -> int:
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes)

    def buffers(self, workspace: Tensor) -> Iterator[Tensor]:
        """Flat int32 views of the workspace, one of each size."""
        begin = 0
        for size in self.sizes:
            yield workspace[begin : begin + size].view(torch.int32)
            begin += -(-size // _ALIGNMENT) * _ALIGNMENT


def selection_plan(
    rows: int, keys: int, topk: int, max_bytes: int | None, row_step: int = 1, workers: int = 0
) -> SelectionPlan:
    """The fewest chunks of `rows` x `keys` logits within `max_bytes`, rows in multiples of `row_step`.

    ArgumentError if there is no such plan.
    """
    most = max(row_step, rows)
    whole = max(_KEYS, -(-keys // _KEYS) * _KEYS)
    if max_bytes is None:
        return SelectionPlan(most, whole, 0, workers)

    def needed(num_rows: int, columns: int, carried: int) -> int:
        return SelectionPlan(num_rows, columns, carried, workers).num_bytes

    def most_rows(columns: int, carried: int) -> int:
        steps = min(most // row_step, max_bytes // (4 * row_step * (columns + 4 * carried)))
        while steps > 0 and needed(steps * row_step, columns, carried) > max_bytes:
            steps -= 1
        return steps * row_step

    enough = min(most, -(-_ENOUGH_QUERIES // row_step) * row_step)
    at_once = most_rows(whole, 0)
    if at_once >= enough:
        return SelectionPlan(at_once, whole, 0, workers)
    columns = min(whole, -(-_LEAST_CHUNK * topk // _KEYS) * _KEYS)
    carried = -(-topk // 4) * 4  # rows stay aligned to 16 bytes
    if at_once > 0 and whole <= columns + 4 * carried:
        return SelectionPlan(at_once, whole, 0, workers)  # carrying would take more than it saves
    at_once = min(enough, most_rows(columns, carried))
    if at_once == 0:
        least = min(needed(row_step, columns, carried), needed(row_step, whole, 0))
        raise ArgumentError("indexer_select", "workspace", f"at least {least} bytes", max_bytes)
    # _KEYS more columns are a multiple of the alignment; a chunk more than one is left.
    room = (max_bytes - needed(at_once, columns, carried)) // (4 * at_once * _KEYS)
    columns = min(columns + room * _KEYS, whole - _KEYS)
    return SelectionPlan(at_once, columns, carried, workers)


def indexer_workspace_bytes(
    *,
    num_queries: int,
    num_keys: int,
    topk: int,
    max_bytes: int | None = None,
    next_n: int = 1,
    num_sms: int = 0,
) -> int:
    """Bytes that a selection takes of its workspace: all that it takes, exactly.

    num_queries: rows; of the paged selection B * next_n. num_keys: N, or max_context_len. max_bytes: the
    budget; None: what the selection in one piece takes. next_n, num_sms: of the paged selection. A workspace
    of the size returned gives the same division as one of `max_bytes`.

    Raises ArgumentError where the budget is below what one query and a chunk of 4 * topk keys take.
    """
    return selection_plan(num_queries, num_keys, topk, max_bytes, next_n, num_sms).num_bytes


#: Writes to `out` the logits of rows and of keys `begin` to `end`, given the rows' bounds in the chunk.
_Score = Callable[[slice, int, int, Tensor | None, Tensor, Tensor], object]


def _select(
    plan: SelectionPlan,
    workspace: Tensor,
    keys: int,
    bounds: Callable[[slice, Tensor], tuple[Tensor | None, Tensor]],
    score: _Score,
    in_order: bool,
    out: Tensor,
) -> None:
    """`bounds` gives the first key (None: 0) and the end of each of some rows; a buffer may hold them."""
    num_rows, topk = out.shape
    width = plan.columns + plan.carried
    logits, values, *positions, starts, chunk_ends, ends, _ = plan.buffers(workspace)
    for first in range(0, num_rows, plan.rows):
        rows = slice(first, min(first + plan.rows, num_rows))
        count = rows.stop - first
        table = logits[: count * width].view(torch.float32).view(count, width)[:, : plan.columns + topk]
        low, high = bounds(rows, starts[:count])
        if plan.carried == 0:
            score(rows, 0, keys, low, high, table[:, :keys])
            topk_chunk_op(table[:, :keys], topk, low, high, in_order, out[rows], None, 0, None)
            continue
        left = values[: count * topk].view(torch.float32).view(count, topk)
        now, before = (buffer[: count * topk].view(count, topk) for buffer in positions)
        chunk_end, end = chunk_ends[:count], ends[:count]
        for begin in range((keys - 1) // plan.columns * plan.columns, -1, -plan.columns):
            stop = min(begin + plan.columns, keys)
            chunk_low = None
            # What later chunks left: at most topk of the keys behind this chunk, whatever a row's end says.
            if low is None:
                torch.sub(high, stop, out=end)
            else:
                chunk_low = starts[:count]
                torch.clamp(low, min=stop, out=chunk_low)
                torch.sub(high, chunk_low, out=end)
                torch.sub(low, begin, out=chunk_low).clamp_(0, stop - begin)
            end.clamp_(0, min(topk, keys - stop))
            torch.sub(high, begin, out=chunk_end).clamp_(0, stop - begin)
            end.add_(chunk_end)
            score(rows, begin, stop, chunk_low, chunk_end, table[:, : stop - begin])
            if stop < keys:
                table[:, plan.columns :].copy_(left)
            topk_chunk_op(
                table,
                topk,
                chunk_low,
                end,
                in_order and begin == 0,
                out[rows] if begin == 0 else now,
                left if begin > 0 else None,
                begin,
                before if stop < keys else None,
            )
            now, before = before, now


def _budget(workspace: Tensor | None, like: Tensor) -> int | None:
    if workspace is None:
        return None
    checks.workspace("indexer_select", workspace, like)
    return workspace.numel()


def _workspace(given: Tensor | None, like: Tensor, plan: SelectionPlan) -> Tensor:
    return torch.empty(plan.num_bytes, dtype=torch.uint8, device=like.device) if given is None else given


def indexer_select(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    topk: int,
    sorted: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Prefill: the topk keys of each query, `mqa_logits_fp8` and `indexer_topk` within a workspace.

    q, k, k_scale, weights, ks, ke: as in `mqa_logits_fp8`. topk, sorted: as in `indexer_topk`.
    workspace: uint8 `[bytes]`, contiguous, 16-byte aligned, of any size from what
    `indexer_workspace_bytes` returns for M, N and topk: queries and keys are taken in as few chunks
    as fit. Its contents are lost. None: allocated, in one piece. out: int32 `[M, topk]`, contiguous, or None.

    Returns out: columns of k, -1 behind the last. Every workspace gives the same bits. Nothing is allocated
    but the workspace and out. No host synchronisation; safe to capture. Raises what both ops raise, and
    ArgumentError for a workspace that is too small.
    """
    checks.mqa_inputs("indexer_select", q, k, k_scale, weights, ks, ke)
    num_rows, keys = q.shape[0], k.shape[0]
    if checked(q):
        contracts.query_ranges(ks, ke, keys, keys)
    out = checks.selection_out("indexer_select", num_rows, topk, q, out)
    if num_rows == 0:
        return out
    plan = selection_plan(num_rows, keys, topk, _budget(workspace, q))
    workspace = _workspace(workspace, q, plan)

    def score(rows: slice, begin: int, end: int, low: Tensor | None, high: Tensor, logits: Tensor) -> None:
        assert low is not None
        chunk = slice(begin, end)
        mqa_logits_chunk_op(
            q[rows], k[chunk], k_scale[chunk], weights[rows], low, high, False, False, logits, num_rows, keys
        )

    _select(plan, workspace, keys, lambda rows, _: (ks[rows], ke[rows]), score, sorted, out)
    return out


def paged_indexer_select(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    topk: int,
    max_context_len: int,
    num_sms: int | None = None,
    sorted: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode: the topk cached positions of each token, paged logits and `indexer_topk` in a workspace.

    q, kv_cache, weights, context_lens, block_table, max_context_len: as in `paged_mqa_logits_fp8`; num_sms:
    workers of its schedule, by default the SMs of the tensors' GPU. The rest as in `indexer_select`, with
    `indexer_workspace_bytes` of B * next_n queries, max_context_len keys, next_n and num_sms.

    Returns out: int32 `[B * next_n, topk]`, positions in the context, -1 behind the last.
    """
    checks.paged_inputs("paged_indexer_select", q, kv_cache, weights, context_lens, block_table)
    batch, next_n = q.shape[:2]
    num_sms = workers("paged_indexer_select", q, num_sms)
    if max_context_len < 0:
        raise ArgumentError("paged_indexer_select", "max_context_len", "at least 0", max_context_len)
    extent("paged_indexer_select", "max_context_len", max_context_len, "columns")
    if checked(q):
        contracts.paged_contexts(
            context_lens, next_n, block_table, kv_cache.shape[1], kv_cache.shape[0], max_context_len
        )
    out = checks.selection_out("paged_indexer_select", batch * next_n, topk, q, out)
    if batch == 0:
        return out
    plan = selection_plan(batch * next_n, max_context_len, topk, _budget(workspace, q), next_n, num_sms)
    workspace = _workspace(workspace, q, plan)
    *_, schedule = plan.buffers(workspace)
    metadata = schedule.view(-1, 2)
    block_size = kv_cache.shape[1]

    def lengths(rows: slice, buffer: Tensor) -> tuple[None, Tensor]:
        some = context_lens[rows.start // next_n : rows.stop // next_n]
        if some.dim() == 2:
            return None, some.view(-1)
        for token in range(next_n):
            torch.sub(some, next_n - 1 - token, out=buffer.view(-1, next_n)[:, token])
        return None, buffer.clamp_(min=0)

    def score(rows: slice, begin: int, end: int, _: Tensor | None, high: Tensor, logits: Tensor) -> None:
        some = slice(rows.start // next_n, rows.stop // next_n)
        lens = high.view(-1, next_n)
        metadata_op(lens, block_size, next_n, metadata)
        pages = block_table[some, begin // block_size : -(-end // block_size)]
        paged_logits_op(q[some], kv_cache, weights[rows], lens, pages, metadata, logits)

    _select(plan, workspace, max_context_len, lengths, score, sorted, out)
    return out
