"""Block-scaled FP8 GEMMs: dense, grouped by expert (contiguous, masked), and with ragged K by expert."""

from moe_fp8.ops.gemm.k_grouped import k_grouped_gemm_fp8
from moe_fp8.ops.gemm.linear import linear_fp8
from moe_fp8.ops.gemm.public import gemm_fp8, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked

__all__ = [
    "gemm_fp8",
    "grouped_gemm_fp8_contiguous",
    "grouped_gemm_fp8_masked",
    "k_grouped_gemm_fp8",
    "linear_fp8",
]
