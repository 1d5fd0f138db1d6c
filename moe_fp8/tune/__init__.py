"""Timing of GEMM configs on this GPU, for the device's table that `moe_fp8.heuristics` consults."""

from __future__ import annotations

from moe_fp8.tune.run import tune
from moe_fp8.tune.table import Timing
from moe_fp8.tune.targets import Target, model_targets, parse_target

__all__ = ["Target", "Timing", "model_targets", "parse_target", "tune"]
