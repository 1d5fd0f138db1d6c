"""Heuristics: problem -> tile config, as pure functions that need neither torch nor a GPU.

The ops at launch and the planner before any launch call the same function, so a config may depend only on
fields of the problem.
"""

from __future__ import annotations

from moe_fp8.heuristics.gemm import gemm_config
from moe_fp8.heuristics.gemm.k_grouped import (
    K_GROUPED_SUM_BOX,
    k_grouped_config,
    k_grouped_grid,
    k_grouped_smem_bytes,
    k_grouped_sums_staged,
)
from moe_fp8.heuristics.gemm.silu_mul import silu_mul_config, silu_mul_configs, silu_mul_smem_bytes
from moe_fp8.heuristics.gemm.tiles import (
    TOKEN_TILES,
    GemmConfig,
    every_gemm_config,
    gemm_configs,
    gemm_grid,
    gemm_smem_bytes,
    parse_gemm_config,
)
from moe_fp8.heuristics.mqa import (
    MQA_BLOCK_KV,
    MQA_COLUMNS,
    MQA_MATH_WARPGROUPS,
    MQA_THREADS,
    PAGED_CHUNK,
    MqaConfig,
    MqaWork,
    key_box_rows,
    mqa_config,
    mqa_division,
    mqa_most_queries,
    mqa_smem_bytes,
    paged_mqa_config,
    query_box_rows,
)
from moe_fp8.heuristics.sm90 import SMEM_CAPACITY, WARPGROUP
from moe_fp8.heuristics.topk import (
    TOPK_BINS,
    TOPK_CAPACITY,
    TopkConfig,
    topk_config,
    topk_smem_bytes,
)

__all__ = [
    "K_GROUPED_SUM_BOX",
    "MQA_BLOCK_KV",
    "MQA_COLUMNS",
    "MQA_MATH_WARPGROUPS",
    "MQA_THREADS",
    "PAGED_CHUNK",
    "SMEM_CAPACITY",
    "TOKEN_TILES",
    "TOPK_BINS",
    "TOPK_CAPACITY",
    "WARPGROUP",
    "GemmConfig",
    "MqaConfig",
    "MqaWork",
    "TopkConfig",
    "every_gemm_config",
    "gemm_config",
    "gemm_configs",
    "gemm_grid",
    "gemm_smem_bytes",
    "k_grouped_config",
    "k_grouped_grid",
    "k_grouped_smem_bytes",
    "k_grouped_sums_staged",
    "key_box_rows",
    "mqa_config",
    "mqa_division",
    "mqa_most_queries",
    "mqa_smem_bytes",
    "paged_mqa_config",
    "parse_gemm_config",
    "query_box_rows",
    "silu_mul_config",
    "silu_mul_configs",
    "silu_mul_smem_bytes",
    "topk_config",
    "topk_smem_bytes",
]
