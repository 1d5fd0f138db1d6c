"""The addend `c` of the GEMMs: `out` gets a copy of it before the kernel adds the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_fp8.ops.gemm import checks
from moe_fp8.ops.modes import launches


def add_to(
    c: Tensor,
    out: Tensor,
    name: str,
    op: Callable[..., None],
    check: Callable[..., checks.Others],
    *operands: Any,
) -> None:
    """Call `op`, which adds to `out`, after `out` got `c`. `check` checks the `operands`."""
    if c is not out:
        checks.addend(name, c, out)
        # Wrong operands must leave `out` as it was. (A compiled call checks them when the op runs.)
        if not torch.compiler.is_compiling():
            operands = check(*operands) or operands
        if launches(out):
            out.copy_(c)
    op(*operands)
