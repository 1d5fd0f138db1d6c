"""The routed experts: the whole layer, a token's rows for its experts, and the sum of what they return."""

from moe_fp8.ops.moe.layer import fused_moe, moe_workspace_bytes
from moe_fp8.ops.moe.public import Permuted, moe_combine, moe_permute

__all__ = ["Permuted", "fused_moe", "moe_combine", "moe_permute", "moe_workspace_bytes"]
