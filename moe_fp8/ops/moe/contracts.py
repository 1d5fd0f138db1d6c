"""Checked mode (MOE_FP8_CHECKED=1): checks of the contents of ids, rows and scales."""

from __future__ import annotations

from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.ops import contents
from moe_fp8.ops.moe import reference


def permute(x_scale: Tensor | None, topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> None:
    """Scales of tokens that have an expert here are finite. (Any id is valid: it may be no expert here.)"""
    if x_scale is None:
        return
    local = (reference.experts_of(topk_ids, expert_map, num_experts) >= 0).any(1)
    contents.finite("moe_permute", "x_scale", x_scale, local, unit="token")


def combine(y: Tensor, rows: Tensor) -> None:
    """rows[t, j] < R. (A negative row is none.)"""
    at = contents.first(rows >= y.shape[0])
    if at is not None:
        raise ContractError(
            "moe_combine",
            "rows",
            f"rows below {y.shape[0]} (rows of y)",
            f"{int(rows[at])} at {list(at)}",
            "pass the rows of the moe_permute call whose rows y has; -1 is none",
            row=at[0],
        )
