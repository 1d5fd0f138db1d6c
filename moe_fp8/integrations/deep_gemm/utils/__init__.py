"""`deep_gemm.utils`: what engines import from it on Hopper; other names come from the engine's own copy."""

from __future__ import annotations

from moe_fp8.integrations import vendored
from moe_fp8.integrations.deep_gemm.utils import layout, math
from moe_fp8.integrations.deep_gemm.utils.layout import *  # noqa: F403
from moe_fp8.integrations.deep_gemm.utils.math import align, ceil_div

__all__ = ["align", "ceil_div", "layout", "math", *layout.__all__]


__getattr__ = vendored.getter(__name__, "utils")
