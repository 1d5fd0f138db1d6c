"""Times GEMM configs on this GPU, and makes the cost model and the tables of `moe_fp8.heuristics`."""

from __future__ import annotations

from moe_fp8.tune.run import refit, retable, tune
from moe_fp8.tune.sample import sample
from moe_fp8.tune.table import table_rows
from moe_fp8.tune.targets import Target, model_targets, parse_target
from moe_fp8.tune.timings import Timing, read_timings

__all__ = [
    "Target",
    "Timing",
    "model_targets",
    "parse_target",
    "read_timings",
    "refit",
    "retable",
    "sample",
    "table_rows",
    "tune",
]
