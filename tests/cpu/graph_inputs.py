"""Inputs of a step for tests of graphs."""

from __future__ import annotations

import torch

from moe_fp8.graph import BufferSpec

SPECS = {
    "tokens": BufferSpec((), torch.int64, pad=-1),
    "table": BufferSpec((3,), torch.int32),
}


def inputs(rows: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(1, rows + 1),
        "table": torch.arange(1, 3 * rows + 1, dtype=torch.int32).view(rows, 3),
    }
