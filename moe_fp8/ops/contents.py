"""Checks of the contents of tensors that ops share; checked mode (MOE_FP8_CHECKED=1) alone calls them.

They are plain torch on the tensors' device, and each waits for the device once. Each error names the first
wrong entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ContractError


def first(wrong: Tensor) -> tuple[int, ...] | None:
    """The index of the first true element, or None. Waits for the device."""
    flat = wrong.reshape(-1)
    if flat.numel() == 0 or not bool(flat.any()):
        return None
    at = torch.unravel_index(flat.to(torch.uint8).argmax(), wrong.shape)
    return tuple(int(part) for part in at)


def counts(op: str, name: str, given: Tensor, most: int, of: str) -> None:
    """Each expert's valid rows [E] are from 0 to `most`, the rows of the argument `of`."""
    at = first((given < 0) | (given > most))
    if at is not None:
        raise ContractError(
            op,
            name,
            f"0 to {most} (rows of {of}) valid rows",
            f"{int(given[at])} for expert {at[0]}",
            f"enlarge the buffer of {of}, or drop tokens before the op",
            expert=at[0],
        )


def finite(
    op: str,
    name: str,
    scale: Tensor,
    counting: Tensor | None = None,
    *,
    unit: str = "row",
    block: int = 1,
) -> None:
    """No scale [rows, ...] of a row that counts is NaN or infinite.

    `counting`: bool [rows]; None: all. Each scale is that of `block` rows, and `unit` says what a row is.
    """
    at = first(_wrong(scale, counting))
    if at is not None:
        row = at[0] * block
        raise ContractError(op, name, _FINITE, _got(scale, at, f"{unit} {row}"), _REMEDY, row=row)


def finite_rows(op: str, name: str, scale: Tensor, owner: Tensor) -> None:
    """The same for rows [M, G] with the expert of each row in `owner` [M], -1 for rows of no expert."""
    at = first(_wrong(scale, owner >= 0))
    if at is not None:
        expert = int(owner[at[0]])
        got = _got(scale, at, f"row {at[0]} of expert {expert}")
        raise ContractError(op, name, _FINITE, got, _REMEDY, expert=expert, row=at[0])


def finite_of_experts(
    op: str, name: str, scale: Tensor, counting: Tensor | None = None, block: int = 1
) -> None:
    """The same for scales [E, rows, G]; `counting` is [E, rows]. Each scale is that of `block` rows."""
    at = first(_wrong(scale, counting))
    if at is not None:
        expert, row = at[0], at[1] * block
        got = _got(scale, at, f"row {row} of expert {expert}")
        raise ContractError(op, name, _FINITE, got, _REMEDY, expert=expert, row=row)


_FINITE = "finite scales in rows that count"
_REMEDY = "find the op that wrote it: the scale of a NaN or infinite value is NaN or infinite, too"


def _wrong(scale: Tensor, counting: Tensor | None) -> Tensor:
    wrong = scale.isfinite().logical_not_()
    if counting is None:
        return wrong
    return wrong & counting.reshape(*counting.shape, *[1] * (scale.dim() - counting.dim()))


def _got(scale: Tensor, at: tuple[int, ...], place: str) -> str:
    return f"{float(scale[at])} at {list(at)}, {place}"
