"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of ranges, lengths, slots and pages."""

from __future__ import annotations

from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.heuristics import PAGED_CHUNK
from moe_fp8.ops.arguments import MAX_EXTENT
from moe_fp8.ops.indexer.reference import token_lengths


def cache_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """No slot lies past the cache. (A negative slot skips its row.)"""
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


def column_ranges(ks: Tensor | None, ke: Tensor | None, rows: int, columns: int) -> None:
    """0 <= ks[i] <= ke[i] <= N."""
    firsts = [0] * rows if ks is None else ks.tolist()
    lasts = [columns] * rows if ke is None else ke.tolist()
    for row, (start, end) in enumerate(zip(firsts, lasts, strict=True)):
        if not 0 <= start <= end <= columns:
            raise ContractError(
                "indexer_topk",
                "ks, ke",
                f"0 <= ks <= ke <= {columns} (columns of logits)",
                f"ks {start}, ke {end} at row {row}",
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


def schedule(context_lens: Tensor, next_n: int) -> None:
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


def paged_contexts(
    context_lens: Tensor, next_n: int, block_table: Tensor, block_size: int, num_pages: int, columns: int
) -> None:
    """Lengths fit the output and the block table, and the cache has every page that they reach."""
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
