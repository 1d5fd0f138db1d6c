"""problem -> KernelSpec: the one selector, called by the ops and by warmup alike.

A `KernelSpec` is everything the compiler needs and nothing else: equal specs are one kernel.
Whatever depends only on run-time shapes (grid, strides, tensor maps) is decided at launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moe_fp8 import heuristics
from moe_fp8.problems import (
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile.

    `name` is the entry file `kernels/<name>.cuh` and the `extern "C"` symbol in it. `defines` are
    the integer macros it is specialised with, sorted by name. `num_threads`, `smem_bytes` (dynamic)
    and `cluster_size` are the launch facts that the kernel itself restates in a static_assert.
    """

    name: str
    defines: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    cluster_size: int = 1

    def __str__(self) -> str:
        launched = {"num_threads": self.num_threads, "cluster_size": self.cluster_size}
        values = ",".join(f"{key.lower()}={value}" for key, value in (*self.defines, *launched.items()))
        return f"{self.name}[{values}]"


#: LAYOUT of a GEMM kernel by the problem's layout.
GEMM_LAYOUTS = {"dense": 0, "m_indices": 1, "psum": 2, "offsets": 3, "masked": 4}


def _spec(name: str, num_threads: int, smem_bytes: int, cluster_size: int = 1, **defines: int) -> KernelSpec:
    return KernelSpec(name, tuple(sorted(defines.items())), num_threads, smem_bytes, cluster_size)


@cache
def _gemm_spec(layout: str, config: heuristics.GemmConfig, out_dtype: str) -> KernelSpec:
    return _spec(
        "gemm_fp8",
        config.threads,
        heuristics.gemm_smem_bytes(config),
        config.cluster,
        LAYOUT=GEMM_LAYOUTS[layout],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        SPLIT_K=int(config.shares == "k"),
        OUT_FP32=int(out_dtype == "float32"),
    )


@cache
def _mqa_spec(
    heads: int, head_dim: int, compressed: bool, fill: bool, out_dtype: str, config: heuristics.MqaConfig
) -> KernelSpec:
    return _spec(
        "mqa_logits_fp8",
        heuristics.MQA_THREADS,
        heuristics.mqa_smem_bytes(config, heads, head_dim),
        NUM_HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_Q=config.block_q,
        NUM_STAGES=config.num_stages,
        TERMS=int(config.terms),
        COMPRESSED=int(compressed),
        FILL=int(fill),
        OUT_BF16=int(out_dtype == "bfloat16"),
    )


@cache
def _paged_mqa_spec(
    heads: int, head_dim: int, block_size: int, out_dtype: str, config: heuristics.MqaConfig
) -> KernelSpec:
    return _spec(
        "paged_mqa_logits_fp8",
        heuristics.MQA_THREADS,
        heuristics.mqa_smem_bytes(config, heads, head_dim),
        NUM_HEADS=heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=block_size,
        BLOCK_Q=config.block_q,
        NUM_STAGES=config.num_stages,
        CHUNK_KV=heuristics.PAGED_CHUNK,
        OUT_BF16=int(out_dtype == "bfloat16"),
    )


_METADATA = _spec("paged_mqa_logits_metadata", 256, 0, CHUNK_KV=heuristics.PAGED_CHUNK)

_IN_DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}


@cache
def _quantize_spec(in_dtype: str, power_of_two: bool) -> KernelSpec:
    return _spec("quantize_fp8", 256, 0, IN_DTYPE=_IN_DTYPES[in_dtype], POWER_OF_TWO=int(power_of_two))


@cache
def _indexer_cache_spec(head_dim: int, in_dtype: str, power_of_two: bool) -> KernelSpec:
    return _spec(
        "indexer_quantize_and_cache",
        128,
        0,
        HEAD_DIM=head_dim,
        IN_DTYPE=_IN_DTYPES[in_dtype],
        POWER_OF_TWO=int(power_of_two),
    )


@cache
def _indexer_topk_spec(in_dtype: str, config: heuristics.TopkConfig) -> KernelSpec:
    return _spec(
        "indexer_topk",
        config.num_threads,
        heuristics.topk_smem_bytes(),
        config.cluster,
        IN_DTYPE=_IN_DTYPES[in_dtype],
        CAPACITY=heuristics.TOPK_CAPACITY,
        MAX_K=heuristics.TOPK_MAX_K,
    )


def kernel_spec(problem: Problem) -> KernelSpec:
    """The kernel that serves `problem`: a pure function of it."""
    if isinstance(problem, GemmProblem):
        return _gemm_spec(problem.layout, heuristics.gemm_config(problem), problem.out_dtype)
    if isinstance(problem, MqaLogitsProblem):
        return _mqa_spec(
            problem.num_heads,
            problem.head_dim,
            problem.compressed,
            problem.fill,
            problem.out_dtype,
            heuristics.mqa_config(problem),
        )
    if isinstance(problem, PagedMqaLogitsProblem):
        return _paged_mqa_spec(
            problem.num_heads,
            problem.head_dim,
            problem.block_size,
            problem.out_dtype,
            heuristics.paged_mqa_config(problem),
        )
    if isinstance(problem, PagedMqaMetadataProblem):
        return _METADATA
    if isinstance(problem, QuantizeProblem):
        return _quantize_spec(problem.in_dtype, problem.power_of_two)
    if isinstance(problem, IndexerCacheProblem):
        return _indexer_cache_spec(problem.head_dim, problem.in_dtype, problem.power_of_two)
    if isinstance(problem, IndexerTopkProblem):
        return _indexer_topk_spec(problem.in_dtype, heuristics.topk_config(problem))
    raise TypeError(f"no kernel for {type(problem).__name__}")
