"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of the GEMMs' index tensors and scales.

Each error names the first wrong entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.ops import contents, scales
from moe_fp8.problems import SEGMENT_ALIGNMENT


def dense(b: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    """All scales are finite; a_scale [M,G], b_scale [N/128,G] or [N,G] for b [N,K]."""
    contents.finite("gemm_fp8", "a_scale", a_scale)
    contents.finite("gemm_fp8", "b_scale", b_scale, block=1 if scales.row_scaled(b, b_scale) else SCALE_BLOCK)


def contiguous(
    op: str, layout: str, index: Tensor, a_scale: Tensor, b_scale: Tensor, b_name: str = "b_scale"
) -> None:
    """The segments of `index` lie in order within the rows of a_scale [M,G], and are aligned if required.

    The scales of every expert's rows, and of all weights, are finite. `op` is the op that was called, and
    `b_name` its name of `b_scale`.
    """
    m, num_experts = a_scale.shape[0], b_scale.shape[0]
    check = {"m_indices": _m_indices, "psum": _psum, "offsets": _offsets}[layout]
    owner = check(op, index.long(), m, num_experts)
    contents.finite_rows(op, "a_scale", a_scale, owner)
    contents.finite_of_experts(op, b_name, b_scale, block=SCALE_BLOCK)


def masked(masked_m: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    """0 <= masked_m[e] <= Mmax, and the scales of the valid rows, and of all weights, are finite."""
    op, m_max = "grouped_gemm_fp8_masked", a_scale.shape[1]
    contents.counts(op, "masked_m", masked_m, m_max, "a")
    valid = torch.arange(m_max, device=masked_m.device) < masked_m[:, None]
    contents.finite_of_experts(op, "a_scale", a_scale, valid)
    contents.finite_of_experts(op, "b_scale", b_scale, block=SCALE_BLOCK)


def k_grouped(offsets: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    """The offsets of K lie in order within the columns, in multiples of 128; scales that count are finite."""
    op, k = "k_grouped_gemm_fp8", a_scale.shape[1] * SCALE_BLOCK
    starts, ends = offsets[:-1], offsets[1:]
    unaligned = (starts % SCALE_BLOCK != 0) | (ends % SCALE_BLOCK != 0)
    at = contents.first((ends < starts) | (starts < 0) | (ends > k) | unaligned)
    if at is not None:
        expected = f"multiples of {SCALE_BLOCK} that do not fall, from 0 to {k} (columns of a)"
        got = f"{int(starts[at])} to {int(ends[at])} for expert {at[0]}"
        raise ContractError(op, "offsets", expected, got, "pad each expert with zeros", expert=at[0])
    blocks = torch.arange(0, k, SCALE_BLOCK, device=offsets.device)
    unused = (blocks < offsets[0]) | (blocks >= offsets[-1])
    contents.finite(op, "a_scale", a_scale.masked_fill(unused, 0))
    contents.finite(op, "b_scale", b_scale.masked_fill(unused, 0))


def _m_indices(op: str, index: Tensor, m: int, num_experts: int) -> Tensor:
    """Check the expert of each row; returns it."""
    at = contents.first((index < -1) | (index >= num_experts))
    if at is not None:
        expert, row = int(index[at]), at[0]
        expected = f"experts from 0 to {num_experts - 1}, or -1 for padding"
        raise ContractError(op, "m_indices", expected, f"{expert} at row {row}", expert=expert, row=row)
    # An aligned block of rows may hold one expert and padding. The kernel would multiply two experts in one
    # block with the weights of a single expert.
    blocks = torch.nn.functional.pad(index, (0, -m % SEGMENT_ALIGNMENT), value=-1).view(-1, SEGMENT_ALIGNMENT)
    leader = blocks.gather(1, (blocks >= 0).to(torch.uint8).argmax(1, keepdim=True))
    at = contents.first((blocks >= 0) & (blocks != leader))
    if at is not None:
        start, expert, owner = at[0] * SEGMENT_ALIGNMENT, int(blocks[at]), int(leader[at[0]])
        row = start + at[1]
        raise ContractError(
            op,
            "m_indices",
            f"segments that start at multiples of {SEGMENT_ALIGNMENT} rows",
            f"expert {expert} starting at row {row}, where rows from {start} are expert {owner}'s",
            "pad each expert's rows with -1, or use offsets, which need no alignment",
            expert=expert,
            row=row,
        )
    return index


def psum_starts(op: str, argument: str, ends: Tensor, m: int, alignment: int) -> Tensor:
    """Check the end of each expert's rows; returns where they start, aligned behind the expert before.

    An expert without rows may start, and end, behind the last row: the rows need not fill the last block.
    """
    before = torch.nn.functional.pad(ends[:-1], (1, 0))[: ends.shape[0]]
    starts = (before + alignment - 1) // alignment * alignment
    at = contents.first((ends < starts) | ((ends > m) & (ends > starts)))
    if at is not None:
        expert, end = at[0], int(ends[at])
        raise ContractError(
            op,
            argument,
            f"an end from {int(starts[at])} (where the expert's rows start) to {m} (rows of a)",
            f"{end} for expert {expert}",
            f"{argument}[e] = align({argument}[e-1], {alignment}) + rows of e",
            expert=expert,
            row=end,
        )
    return starts


def _psum(op: str, ends: Tensor, m: int, num_experts: int) -> Tensor:
    """Check the end of each expert's rows; returns the expert of each row."""
    starts = psum_starts(op, "psum", ends, m, SEGMENT_ALIGNMENT)
    rows = torch.arange(m, device=ends.device)
    owner = torch.searchsorted(ends, rows, right=True)
    # A row behind the last end belongs to no expert; the padding gives it an expert that starts behind it.
    return torch.where(rows >= torch.nn.functional.pad(starts, (0, 1), value=m)[owner], owner, -1)


def _offsets(op: str, offsets: Tensor, m: int, num_experts: int) -> Tensor:
    """Check the start of each expert's rows; returns the expert of each row."""
    if int(offsets[0]) < 0:
        first = int(offsets[0])
        raise ContractError(op, "offsets", "a first row of at least 0", first, expert=0, row=first)
    starts, ends = offsets[:-1], offsets[1:]
    at = contents.first((ends < starts) | (ends > m))
    if at is not None:
        expert, end = at[0], int(ends[at])
        raise ContractError(
            op,
            "offsets",
            f"non-decreasing rows of at most {m} (rows of a)",
            f"{int(starts[at])} to {end} for expert {expert}",
            "offsets are a prefix sum of the rows of each expert",
            expert=expert,
            row=end,
        )
    owner = torch.searchsorted(offsets, torch.arange(m, device=offsets.device), right=True) - 1
    return torch.where(owner < num_experts, owner, -1)
