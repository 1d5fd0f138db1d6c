"""Helpers of `deep_gemm.utils.math` that engines use on Hopper."""

from __future__ import annotations

from moe_fp8.integrations import vendored


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """x, rounded up to a multiple of y."""
    return ceil_div(x, y) * y


__getattr__ = vendored.getter(__name__, "utils.math")
