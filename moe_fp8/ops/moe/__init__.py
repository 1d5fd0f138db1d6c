"""The routed experts: the choice of experts, the whole layer, rows for experts, the sum of their results."""

from moe_fp8.ops.moe.gemm import grouped_gemm_silu_mul_fp8, interleave_gate_up
from moe_fp8.ops.moe.layer import fused_moe, moe_workspace_bytes
from moe_fp8.ops.moe.public import Permuted, moe_combine, moe_permute, route_topk

__all__ = [
    "Permuted",
    "fused_moe",
    "grouped_gemm_silu_mul_fp8",
    "interleave_gate_up",
    "moe_combine",
    "moe_permute",
    "moe_workspace_bytes",
    "route_topk",
]
