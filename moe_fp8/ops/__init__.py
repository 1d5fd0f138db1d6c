"""The ops. Each checks its arguments, selects a kernel and launches it; on CPU the reference runs."""

from __future__ import annotations

from moe_fp8.ops.gemm.k_grouped import k_grouped_gemm_fp8
from moe_fp8.ops.gemm.linear import linear_fp8
from moe_fp8.ops.gemm.public import gemm_fp8, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked
from moe_fp8.ops.indexer.cache import indexer_quantize_and_cache
from moe_fp8.ops.indexer.logits import mqa_logits_fp8, paged_mqa_logits_fp8, paged_mqa_logits_metadata
from moe_fp8.ops.indexer.select import indexer_select, indexer_workspace_bytes, paged_indexer_select
from moe_fp8.ops.indexer.topk import indexer_topk
from moe_fp8.ops.modes import compile_only, get_num_sms, set_num_sms
from moe_fp8.ops.moe.gemm import grouped_gemm_silu_mul_fp8, interleave_gate_up
from moe_fp8.ops.moe.layer import fused_moe, moe_workspace_bytes
from moe_fp8.ops.moe.public import Permuted, moe_combine, moe_permute, route_topk
from moe_fp8.ops.quantize.public import quantize_fp8, quantize_fp8_blocks, silu_mul_quantize
from moe_fp8.ops.scales import to_mn_major

__all__ = [
    "Permuted",
    "compile_only",
    "fused_moe",
    "gemm_fp8",
    "get_num_sms",
    "grouped_gemm_fp8_contiguous",
    "grouped_gemm_fp8_masked",
    "grouped_gemm_silu_mul_fp8",
    "indexer_quantize_and_cache",
    "indexer_select",
    "indexer_topk",
    "indexer_workspace_bytes",
    "interleave_gate_up",
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
]
