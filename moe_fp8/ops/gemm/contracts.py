"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of the GEMMs' index tensors.

Each error names the first wrong entry.
"""

from __future__ import annotations

from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.problems import SEGMENT_ALIGNMENT


def contiguous_layout(layout: str, index: Tensor, m: int, num_experts: int) -> None:
    """Check that the segments of `index` lie in order within the `m` rows of `a`, and aligned if required."""
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
    # An aligned block of rows may hold one expert and padding. The kernel would multiply two experts in one
    # block with the weights of a single expert.
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
    """Check that 0 <= masked_m[e] <= Mmax."""
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
