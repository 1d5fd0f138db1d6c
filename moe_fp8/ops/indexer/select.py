"""From queries and keys to the indices that sparse attention reads, within a workspace of a given size.

Logits are made for a chunk of queries and a chunk of keys at a time. Chunks of keys are taken from the last
to the first. The keys that later chunks kept are carried along behind a chunk's columns. Both are then in
the order of positions, so one top-k over the row merges them, ties included. All chunks are scored by the
kernel of the whole call, so a logit does not depend on its chunk. The result equals the result of a single
piece, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_fp8 import limits
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops import workspace as workspaces
from moe_fp8.ops.examine import examine
from moe_fp8.ops.indexer import checks, contracts
from moe_fp8.ops.indexer.logits import metadata_op, mqa_logits_chunk_op, paged_logits_op
from moe_fp8.ops.indexer.topk import topk_chunk_op
from moe_fp8.ops.registry import checked

#: A chunk of keys is a multiple of this: it has whole chunks of the paged schedule, whole pages, whole tiles.
_KEYS = 256

#: This many queries at once fill the GPU. Rather than take fewer, a plan makes its chunks of keys shorter.
_ENOUGH_QUERIES = 512

#: A chunk of keys is at least this many times topk, since every chunk reads the carried keys again.
_LEAST_CHUNK = 4


@dataclass(frozen=True)
class SelectionPlan:
    """The division of a selection: it takes `rows` of logits and `columns` of keys at once."""

    rows: int
    columns: int
    carried: int  # columns behind a chunk's own, for keys that later chunks kept; 0 if there is one chunk
    workers: int  # workers of the paged schedule; 0 if the selection is not paged

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
        return workspaces.total_bytes(self.sizes)

    def buffers(self, workspace: Tensor) -> Iterator[Tensor]:
        """Flat int32 views of the workspace, a view of each size; tensors of their own in a traced call.

        Inductor gets wrong addresses for parts of a workspace that ops write.
        """
        if arguments.traced():
            device = workspace.device
            return (torch.empty(size // 4, dtype=torch.int32, device=device) for size in self.sizes)
        return (buffer.view(torch.int32) for buffer in workspaces.buffers(workspace, self.sizes))


def selection_plan(
    rows: int,
    keys: int,
    topk: int,
    max_bytes: int | None,
    row_step: int = 1,
    workers: int = 0,
    *,
    op: str = "indexer_select",
    budget: str = "workspace",
) -> SelectionPlan:
    """Divide `rows` x `keys` logits into the fewest chunks within `max_bytes`, by `row_step` rows.

    Raises ArgumentError, which names the argument `budget` of `op`, if `max_bytes` is too small for any plan.
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
    divided = min(enough, most_rows(columns, carried))
    # Chunks of keys are of use only if more queries fit. A chunk with its carried keys is then no wider than
    # all keys together, so a plan of the model's calls has its kernels.
    if 0 < at_once >= divided:
        return SelectionPlan(at_once, whole, 0, workers)
    if divided <= 0:
        least = min(needed(row_step, columns, carried), needed(row_step, whole, 0))
        raise ArgumentError(op, budget, f"at least {least} bytes", max_bytes)
    # _KEYS more columns add a multiple of the alignment. At least two chunks remain.
    room = (max_bytes - needed(divided, columns, carried)) // (4 * divided * _KEYS)
    columns = min(columns + room * _KEYS, whole - _KEYS)
    return SelectionPlan(divided, columns, carried, workers)


def indexer_workspace_bytes(
    *,
    num_queries: int,
    num_keys: int,
    topk: int,
    max_bytes: int | None = None,
    next_n: int = 1,
    num_sms: int = 0,
) -> int:
    """Return the bytes that a selection takes of its workspace, exactly.

    num_queries: rows, which are B * next_n in the paged selection. num_keys: N, or max_context_len.
    max_bytes: the budget, or None for a selection in one piece.
    next_n, num_sms: those of the paged selection, whose schedule has a place for each SM; 0 SMs for prefill.

    A workspace of the returned size gives the same division as a workspace of `max_bytes`. Raises
    ArgumentError for a size below 0, for a topk or a next_n that the selections do not take, and if the
    budget is smaller than the need of one query and a chunk of 4 * topk keys.
    """
    op = "indexer_workspace_bytes"
    num_queries = arguments.integer(op, "num_queries", num_queries, 0)
    num_keys = arguments.integer(op, "num_keys", num_keys, 0)
    num_sms = arguments.integer(op, "num_sms", num_sms, 0)
    next_n = arguments.integer(op, "next_n", next_n, 1)
    if limits.refuse_next_n(next_n):
        raise ArgumentError(op, "next_n", f"1 to {limits.MAX_NEXT_N}", next_n)
    if max_bytes is not None:
        max_bytes = arguments.integer(op, "max_bytes", max_bytes)
    topk = checks.topk_width(op, topk)
    plan = selection_plan(num_queries, num_keys, topk, max_bytes, next_n, num_sms, op=op, budget="max_bytes")
    return plan.num_bytes


#: Takes rows, keys `begin` to `end`, the rows' bounds in that chunk, and a tensor for their logits.
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
    """`bounds` gives each row's first key (None: 0) and end; it may write them to its second argument."""
    num_rows, topk = out.shape
    width = plan.columns + plan.carried
    logits, values, *positions, starts, chunk_ends, ends, _ = plan.buffers(workspace)
    # A compiler takes the length of a range for a constant, and the batch with it.
    for first in range(0, num_rows, plan.rows) if plan.rows < num_rows else (0,):
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
            # Later chunks kept at most topk of the keys behind this chunk, whatever a row's end says.
            # (Bounds are clamped before a difference is taken, which 32 bits might not hold.)
            torch.clamp(high, stop, keys, out=end)
            if low is None:
                end.sub_(stop)
            else:
                chunk_low = starts[:count]
                torch.clamp(low, stop, keys, out=chunk_low)
                end.sub_(chunk_low)
                torch.clamp(low, begin, stop, out=chunk_low).sub_(begin)
            end.clamp_(0, min(topk, keys - stop))
            torch.clamp(high, begin, stop, out=chunk_end).sub_(begin)
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


def _checked(q: Tensor) -> bool:
    """Whether to check contents now; a traced call has none."""
    return not arguments.traced() and checked(q)


#: The tensors among the arguments of the selections, but for the workspace.
_PREFILL = ("q", "k", "k_scale", "weights", "ks", "ke", "out")
_DECODE = ("q", "kv_cache", "weights", "context_lens", "block_table", "out")


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
    """Prefill: the topk keys of each query, by `mqa_logits_fp8` and `indexer_topk` within a workspace.

    q, k, k_scale, weights, ks, ke: as in `mqa_logits_fp8`. topk, sorted: as in `indexer_topk`.
    workspace: uint8 `[bytes]`, contiguous, 16-byte aligned, of any size that holds one query and a chunk of
    4 * topk keys; `indexer_workspace_bytes` says how much of a budget is used. Queries and keys are taken in
    as few chunks as fit. Its contents are lost. It may not overlap any other argument. None: the op
    allocates enough for one piece.
    out: int32 `[M, topk]`, contiguous, or None. It shares no memory with any other argument.

    Returns out: rows of k, then -1. Every workspace gives the same bits. Nothing is allocated but the
    workspace and out. But a traced call (torch.compile) leaves its memory to the compiler, and uses of the
    workspace only its size; each number of queries that is divided is compiled anew. No host synchronization;
    safe to capture. Raises what both ops raise (ArgumentError, UnsupportedError for another H or D), and
    ArgumentError for a workspace that is too small.

    Large calls take the second kernel of `mqa_logits_fp8`, whose zeros are not exact. Keys whose logits tie
    at 0 are then chosen in any order, not the lower one first. A key may lose to a key with a smaller
    exact logit, but only if the two differ by less than the kernel's error. All chunks take the same kernel.
    """
    checks.mqa_inputs("indexer_select", q, k, k_scale, weights, ks, ke)
    num_rows, keys = q.shape[0], k.shape[0]
    if _checked(q):
        given = {"q": q, "k": k, "k_scale": k_scale, "weights": weights, "ks": ks, "ke": ke}
        contract = partial(contracts.queries, "indexer_select", k_scale, weights, ks, ke, keys)
        examine("indexer_select", {**given, "topk": topk}, contract)
    if out is not None:  # its first rows are written while other rows' inputs count
        arguments.out_apart("indexer_select", _PREFILL, (q, k, k_scale, weights, ks, ke, out))
    out = checks.selection_out("indexer_select", num_rows, topk, q, out)
    if num_rows == 0:
        return out
    budget = None
    if workspace is not None:
        workspaces.check("indexer_select", workspace, q, _PREFILL, (q, k, k_scale, weights, ks, ke, out))
        budget = workspace.numel()
    plan = selection_plan(num_rows, keys, out.shape[1], budget)
    if workspace is None:
        workspace = workspaces.new(plan.num_bytes, q)

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
    """Decode: the topk cached positions of each token, by paged logits and `indexer_topk` in a workspace.

    q, kv_cache, weights, context_lens, block_table, max_context_len: as in `paged_mqa_logits_fp8`.
    num_sms: workers of its schedule, by default `get_num_sms()` of the tensors' GPU.
    topk, sorted, workspace: as in `indexer_select`. `indexer_workspace_bytes` takes B * next_n queries,
    max_context_len keys, next_n and num_sms.
    out: int32 `[B * next_n, topk]`, contiguous, or None. It shares no memory with any other argument.

    Returns out: positions in the context, then -1. The rest is as in `indexer_select`, but that
    UnsupportedError is also for another page size or next_n.
    """
    checks.paged_inputs("paged_indexer_select", q, kv_cache, weights, context_lens, block_table)
    batch, next_n = q.shape[:2]
    num_sms = arguments.workers("paged_indexer_select", q, num_sms)
    max_context_len = arguments.columns("paged_indexer_select", "max_context_len", max_context_len)
    if _checked(q):
        op = "paged_indexer_select"
        given = {"q": q, "kv_cache": kv_cache, "weights": weights, "context_lens": context_lens}
        given |= {"block_table": block_table}
        operands = context_lens, next_n, block_table, kv_cache, weights, max_context_len
        sizes = {"topk": topk, "max_context_len": max_context_len}
        examine(op, {**given, **sizes}, partial(contracts.paged_contexts, op, *operands))
    if out is not None:
        tensors = q, kv_cache, weights, context_lens, block_table, out
        arguments.out_apart("paged_indexer_select", _DECODE, tensors)
    out = checks.selection_out("paged_indexer_select", batch * next_n, topk, q, out)
    if batch == 0:
        return out
    budget = None
    if workspace is not None:
        others = q, kv_cache, weights, context_lens, block_table, out
        workspaces.check("paged_indexer_select", workspace, q, _DECODE, others)
        budget = workspace.numel()
    plan = selection_plan(
        batch * next_n, max_context_len, out.shape[1], budget, next_n, num_sms, op="paged_indexer_select"
    )
    if workspace is None:
        workspace = workspaces.new(plan.num_bytes, q)
    *_, schedule = plan.buffers(workspace)
    metadata = schedule.view(-1, 2)
    block_size = kv_cache.shape[1]

    def lengths(rows: slice, buffer: Tensor) -> tuple[None, Tensor]:
        some = context_lens[rows.start // next_n : rows.stop // next_n]
        if some.dim() == 2:
            return None, some.view(-1)
        # (Lengths are clamped before a difference is taken, which 32 bits might not hold.)
        ends = buffer.view(-1, next_n)
        torch.clamp(some[:, None].expand_as(ends), min=0, out=ends)
        for token in range(next_n - 1):
            ends[:, token].sub_(next_n - 1 - token)
        return None, buffer.clamp_(min=0)

    def score(rows: slice, begin: int, end: int, _: Tensor | None, high: Tensor, logits: Tensor) -> None:
        some = slice(rows.start // next_n, rows.stop // next_n)
        lens = high.view(-1, next_n)
        metadata_op(lens, block_size, next_n, metadata)
        pages = block_table[some, begin // block_size : -(-end // block_size)]
        paged_logits_op(q[some], kv_cache, weights[rows], lens, pages, metadata, logits)

    _select(plan, workspace, max_context_len, lengths, score, sorted, out)
    return out
