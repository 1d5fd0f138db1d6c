"""Checked mode (MOE_FP8_CHECKED=1): looks at what index tensors contain, and names the first offender.

Reading contents waits for the device, so none of this runs while a stream is being captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.ops.reference import token_lengths
from moe_fp8.problems import SEGMENT_ALIGNMENT
from moe_fp8.settings import settings


def enabled(tensor: Tensor) -> bool:
    """Whether to look at contents now: checked mode is on, and `tensor`'s stream is not being captured."""
    if not settings().checked:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def contiguous_layout(layout: str, index: Tensor, m: int, num_experts: int) -> None:
    """The segments of `index` lie within the `m` rows of `a`, in order and aligned where they must be."""
    values = index.tolist()
    if layout == "m_indices":
        _m_indices(values, num_experts)
    elif layout == "psum":
        _psum(values, m)
    else:
        _offsets(values, m)


def _fail(
    argument: str, expected: str, got: object, remedy: str, expert: int | None, row: int | None = None
) -> None:
    raise ContractError(
        "grouped_gemm_fp8_contiguous", argument, expected, got, remedy, expert=expert, row=row
    )


def _m_indices(values: list[int], num_experts: int) -> None:
    # Within an aligned block of rows there is one expert, and then perhaps padding to the block's end
    # or in between; two experts in one block would be multiplied with one expert's weights.
    for row, expert in enumerate(values):
        if not -1 <= expert < num_experts:
            _fail(
                "m_indices",
                f"experts from 0 to {num_experts - 1}, or -1 for padding",
                f"{expert} at row {row}",
                "",
                expert,
                row,
            )
    for start in range(0, len(values), SEGMENT_ALIGNMENT):
        owner = -1
        for row in range(start, min(start + SEGMENT_ALIGNMENT, len(values))):
            expert = values[row]
            if expert < 0 or expert == owner:
                continue
            if owner >= 0:
                _fail(
                    "m_indices",
                    f"segments that start at multiples of {SEGMENT_ALIGNMENT} rows",
                    f"expert {expert} starting at row {row}, where rows from {start} are expert {owner}'s",
                    "pad each expert's rows with -1, or use offsets, which need no alignment",
                    expert,
                    row,
                )
            owner = expert


def _psum(values: list[int], m: int) -> None:
    start = 0
    for expert, end in enumerate(values):
        if end < start or end > m:
            _fail(
                "psum",
                f"an end from {start} (where the expert's rows start) to {m} (rows of a)",
                f"{end} for expert {expert}",
                f"psum[e] = align(psum[e-1], {SEGMENT_ALIGNMENT}) + rows of e",
                expert,
                end,
            )
        start = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


def _offsets(values: list[int], m: int) -> None:
    if values[0] < 0:
        _fail("offsets", "a first row of at least 0", values[0], "", 0, values[0])
    for expert in range(len(values) - 1):
        if values[expert + 1] < values[expert] or values[expert + 1] > m:
            _fail(
                "offsets",
                f"non-decreasing rows of at most {m} (rows of a)",
                f"{values[expert]} to {values[expert + 1]} for expert {expert}",
                "offsets are a prefix sum of the rows of each expert",
                expert,
                values[expert + 1],
            )


def masked_m(counts: Tensor, m_max: int) -> None:
    """0 <= masked_m[e] <= Mmax."""
    for expert, count in enumerate(counts.tolist()):
        if not 0 <= count <= m_max:
            raise ContractError(
                "grouped_gemm_fp8_masked",
                "masked_m",
                f"0 to {m_max} (rows of a) valid rows",
                f"{count} for expert {expert}",
                "enlarge the buffer of a, or drop tokens before the op",
                expert=expert,
            )


def cache_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """No slot lies past the cache; negative ones skip their row."""
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_slots:
            raise ContractError(
                "indexer_quantize_and_cache",
                "slot_mapping",
                f"slots below {num_slots} (pages x block_size)",
                f"{slot} at row {row}",
                "use -1 for a row that is not to be cached",
                row=row,
            )


def column_ranges(starts: Tensor | None, ends: Tensor | None, rows: int, columns: int) -> None:
    """0 <= starts[i] <= ends[i] <= N."""
    firsts = [0] * rows if starts is None else starts.tolist()
    lasts = [columns] * rows if ends is None else ends.tolist()
    for row, (start, end) in enumerate(zip(firsts, lasts, strict=True)):
        if not 0 <= start <= end <= columns:
            raise ContractError(
                "indexer_topk",
                "starts, ends",
                f"0 <= starts <= ends <= {columns} (columns of logits)",
                f"starts {start}, ends {end} at row {row}",
                "use equal ends for an empty row",
                row=row,
            )


def query_ranges(ks: Tensor, ke: Tensor, num_keys: int, columns: int) -> None:
    """0 <= ks[i] <= ke[i] <= N, and no row is wider than the output."""
    for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        if not 0 <= start <= end <= num_keys:
            raise ContractError(
                "mqa_logits_fp8",
                "ks, ke",
                f"0 <= ks <= ke <= {num_keys} (rows of k)",
                f"ks {start}, ke {end} at row {row}",
                row=row,
            )
        if end - start > columns:
            raise ContractError(
                "mqa_logits_fp8",
                "max_seqlen_k",
                f"at least the widest row, {end - start} keys at row {row}",
                columns,
                "pass a larger max_seqlen_k",
                row=row,
            )


def paged_contexts(
    context_lens: Tensor, next_n: int, block_table: Tensor, block_size: int, num_pages: int, columns: int
) -> None:
    """Lengths fit the output and the block table; the pages that they reach are in the cache."""
    op = "paged_mqa_logits_fp8"
    if context_lens.numel() and int(context_lens.min()) < 0:
        row = int(context_lens.reshape(context_lens.shape[0], -1).amin(1).argmin())
        raise ContractError(
            op, "context_lens", "lengths of at least 0", int(context_lens.min()), "use 0 for none", row=row
        )
    lengths = token_lengths(context_lens, next_n).amax(1).tolist()
    tables = block_table.tolist()
    for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        if length > columns:
            raise ContractError(
                op,
                "context_lens",
                f"at most max_context_len, {columns}",
                f"{length} for request {row}",
                "pass a larger max_context_len",
                row=row,
            )
        pages = -(-length // block_size)
        if pages > len(table):
            raise ContractError(
                op,
                "block_table",
                f"{pages} pages for the {length} tokens of request {row}",
                f"{len(table)} columns",
                "widen block_table",
                row=row,
            )
        for at, page in enumerate(table[:pages]):
            if not 0 <= page < num_pages:
                raise ContractError(
                    op,
                    "block_table",
                    f"pages from 0 to {num_pages - 1}",
                    f"{page} at [{row}, {at}]",
                    "only entries past a context's last page may be anything",
                    row=row,
                )
