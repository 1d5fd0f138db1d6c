"""The ops around the experts' GEMMs: a token's rows for its experts, and the sum of what they return."""

from moe_fp8.ops.moe.public import Permuted, moe_combine, moe_permute

__all__ = ["Permuted", "moe_combine", "moe_permute"]
