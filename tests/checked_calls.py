"""Counts what checked mode adds to calls of the ops, for the CPU and GPU tests."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from moe_fp8.ops import examine, registry
from moe_fp8.ops.gemm import k_grouped
from moe_fp8.ops.gemm import public as gemm
from moe_fp8.ops.indexer import cache, logits, select, topk
from moe_fp8.ops.moe import public as moe
from moe_fp8.ops.quantize import public as quantize
from moe_fp8.settings import parse_settings

#: Cases of `graph_cases` whose op has no contents to check.
WITHOUT_CONTENTS = ("quantize_fp8", "moe_permute", "route_topk")

_FILES = {"contracts.py", "contents.py", "examine.py"}


class ChecksCounter(TorchDispatchMode):
    """Counts the calls of torch that checks of contents make. On a GPU each launches, copies or waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        files = {Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_stack(None)}
        self.count += bool(files & _FILES)
        return func(*args, **(kwargs or {}))


def past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public functions and layers call their ops directly, so that a dispatch mode sees what the ops call."""
    ops = {op.call: op.run for op in registry.OPS.values()}
    for name, op in registry.OPS.items():
        monkeypatch.setitem(registry.OPS, name, op._replace(call=op.run))
    for module in (gemm, k_grouped, moe, quantize, cache, logits, select, topk):
        for name, value in list(vars(module).items()):
            if name.endswith("_op"):
                monkeypatch.setattr(module, name, ops[value])


def turn_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked mode is off, whatever the environment says."""
    off = parse_settings({})
    for module in (registry, examine):
        monkeypatch.setattr(module, "settings", lambda: off)
