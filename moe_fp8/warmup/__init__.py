"""HF config -> model description -> plan -> build -> load: all kernels are warm before the first request.

No module here imports torch, allocates a tensor or launches a kernel. Planning and building need no GPU.
"""

from __future__ import annotations

from moe_fp8.warmup.bundle import build_bundle
from moe_fp8.warmup.models import ModelDescription, describe, load_model, read_config
from moe_fp8.warmup.options import PlanOptions
from moe_fp8.warmup.planner import Plan, plan
from moe_fp8.warmup.rows import PlanRow
from moe_fp8.warmup.run import build_plan, default_num_sms, load_plan, missing_kernels
from moe_fp8.warmup.shapes import GemmShape, Parallelism, Unplanned, gemm_shapes, parse_shape, unplanned

__all__ = [
    "GemmShape",
    "ModelDescription",
    "Parallelism",
    "Plan",
    "PlanOptions",
    "PlanRow",
    "Unplanned",
    "build_bundle",
    "build_plan",
    "default_num_sms",
    "describe",
    "gemm_shapes",
    "load_model",
    "load_plan",
    "missing_kernels",
    "parse_shape",
    "plan",
    "read_config",
    "unplanned",
]
