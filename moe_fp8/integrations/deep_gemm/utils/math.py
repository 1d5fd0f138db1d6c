"""Helpers of `deep_gemm.utils.math` that engines use on Hopper."""

from __future__ import annotations

from typing import Any

from moe_fp8.integrations import vendored


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """x, rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def __getattr__(name: str) -> Any:
    found = None if name.startswith("__") else vendored.lookup(name, "utils.math")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
