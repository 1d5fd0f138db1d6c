"""The addend `c` of the GEMMs: `out` gets a copy of it before the kernel adds the product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_fp8.ops import arguments
from moe_fp8.ops.gemm import checks
from moe_fp8.ops.modes import launches
from moe_fp8.ops.registry import OPS


def add_to(c: Tensor, out: Tensor, name: str, *operands: Any) -> None:
    """Call the op `name` with `operands`, so that it adds to `out`, after `out` got `c`."""
    op = OPS[name]
    if c is not out:
        arguments.demand_tensors(name, {"c": c})
        # Wrong operands must leave `out` as it was. (Operands of a traced call are checked when the op runs.)
        traced = arguments.traced()
        if not traced:
            given, operands = operands, op.check(*operands) or operands
            op.apart(operands)
        checks.addend(name, c, out)
        in_place = not traced and checks.addend_memory(name, c, out)
        if not traced:
            op.examine(given, operands)
        if launches(out) and not in_place:
            out.detach().copy_(c.detach())
    op.call(*operands)
