"""The ops around the experts' GEMMs: a token's experts, its rows for them, and the sum of results."""

from moe_fp8.ops.moe.public import Permuted, moe_combine, moe_permute, route_topk

__all__ = ["Permuted", "moe_combine", "moe_permute", "route_topk"]
