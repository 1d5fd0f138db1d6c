"""`deep_gemm.utils`: what engines import from it on Hopper; other names come from the engine's own copy."""

from __future__ import annotations

from typing import Any

from moe_fp8.integrations import vendored
from moe_fp8.integrations.deep_gemm.utils import layout, math
from moe_fp8.integrations.deep_gemm.utils.layout import *  # noqa: F403
from moe_fp8.integrations.deep_gemm.utils.math import align, ceil_div

__all__ = ["align", "ceil_div", "layout", "math", *layout.__all__]


def __getattr__(name: str) -> Any:
    found = None if name.startswith("__") else vendored.lookup(name, "utils")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
