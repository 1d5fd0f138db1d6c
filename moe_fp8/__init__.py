"""FP8 MoE operators for NVIDIA Hopper: JIT-compiled kernels behind CUDA-graph-safe PyTorch ops.

The top level holds the ops and the errors; `moe_fp8.jit` holds `freeze` and the counters, `moe_fp8.graph` the
helpers of CUDA graphs, and `moe_fp8.warmup` the planner. Names load on first use, so that planning and
compiling (`moe_fp8.warmup`, `moe-fp8`) need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_fp8 import errors, graph, jit, warmup
    from moe_fp8.errors import (
        ArgumentError,
        BundleError,
        CaptureError,
        CompileError,
        ConfigError,
        ContractError,
        DriverError,
        JitError,
        JitMissError,
        ModelError,
        MoeFp8Error,
        SettingError,
        TileError,
        ToolchainError,
        UnsupportedError,
    )
    from moe_fp8.ops import (
        Permuted,
        compile_only,
        fused_moe,
        gemm_fp8,
        get_num_sms,
        grouped_gemm_fp8_contiguous,
        grouped_gemm_fp8_masked,
        grouped_gemm_silu_mul_fp8,
        indexer_quantize_and_cache,
        indexer_select,
        indexer_topk,
        indexer_workspace_bytes,
        interleave_gate_up,
        k_grouped_gemm_fp8,
        linear_fp8,
        moe_combine,
        moe_permute,
        moe_workspace_bytes,
        mqa_logits_fp8,
        paged_indexer_select,
        paged_mqa_logits_fp8,
        paged_mqa_logits_metadata,
        quantize_fp8,
        quantize_fp8_blocks,
        route_topk,
        set_num_sms,
        silu_mul_quantize,
        to_mn_major,
    )

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BundleError",
    "CaptureError",
    "CompileError",
    "ConfigError",
    "ContractError",
    "DriverError",
    "JitError",
    "JitMissError",
    "ModelError",
    "MoeFp8Error",
    "Permuted",
    "SettingError",
    "TileError",
    "ToolchainError",
    "UnsupportedError",
    "compile_only",
    "errors",
    "fused_moe",
    "gemm_fp8",
    "get_num_sms",
    "graph",
    "grouped_gemm_fp8_contiguous",
    "grouped_gemm_fp8_masked",
    "grouped_gemm_silu_mul_fp8",
    "indexer_quantize_and_cache",
    "indexer_select",
    "indexer_topk",
    "indexer_workspace_bytes",
    "interleave_gate_up",
    "jit",
    "k_grouped_gemm_fp8",
    "linear_fp8",
    "moe_combine",
    "moe_permute",
    "moe_workspace_bytes",
    "mqa_logits_fp8",
    "paged_indexer_select",
    "paged_mqa_logits_fp8",
    "paged_mqa_logits_metadata",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "route_topk",
    "set_num_sms",
    "silu_mul_quantize",
    "to_mn_major",
    "warmup",
]

_MODULES = ("errors", "graph", "jit", "warmup")

if not TYPE_CHECKING:  # a checker would take any name to exist

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with importlib.import_module("moe_fp8.errors").requirements_needed():
            if name in _MODULES:
                return importlib.import_module(f"moe_fp8.{name}")
            home = "moe_fp8.errors" if name.endswith("Error") else "moe_fp8.ops"
            value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
