"""The selector of kernels: problem -> KernelSpec. The ops and warmup call the same functions.

A `KernelSpec` holds everything the compiler needs and nothing else, so equal specs are the same kernel.
An op asks once for the spec, the grid and the tile (`Selection`). The launch then makes the parameters and
tensor maps, which depend on run-time addresses and strides. The planner asks for the spec alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from moe_fp8 import heuristics
from moe_fp8.limits import MAX_EXPERTS_PER_TOKEN, MAX_TOPK, SCALE_BLOCK
from moe_fp8.problems import (
    GemmProblem,
    GemmSiluMulProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    KGroupedGemmProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile.

    `name` is the entry file `kernels/<name>.cuh` and the `extern "C"` symbol in it. `defines` are
    the integer macros it is specialized with, sorted by name. `num_threads`, `smem_bytes` (dynamic)
    and `cluster_size` configure the launch; the kernel checks them in a static_assert.
    """

    name: str
    defines: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    cluster_size: int = 1

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> KernelSpec:
        """The spec of these fields as JSON values; `defines` is an object or a list of pairs."""
        return cls(**{**fields, "defines": tuple(dict(fields["defines"]).items())})

    def __str__(self) -> str:
        launched = {"num_threads": self.num_threads, "cluster_size": self.cluster_size}
        values = ",".join(f"{key.lower()}={value}" for key, value in (*self.defines, *launched.items()))
        return f"{self.name}[{values}]"


#: Values per thread of the quantizing kernels; threads per block of `quantize_fp8` and rows of its tile.
QUANTIZE_VALUES = 8
_QUANTIZE_THREADS = 256
QUANTIZE_ROWS = _QUANTIZE_THREADS * QUANTIZE_VALUES // SCALE_BLOCK

#: The same constants for the kernel `silu_mul_quantize`.
SILU_VALUES = 16
_SILU_THREADS = 128
SILU_ROWS = _SILU_THREADS * SILU_VALUES // SCALE_BLOCK

#: Layout of a GEMM problem -> LAYOUT macro of its kernel.
GEMM_LAYOUTS = {"dense": 0, "m_indices": 1, "psum": 2, "offsets": 3, "masked": 4}

#: The LAYOUT macro of the GEMM of ragged K.
K_OFFSETS = 5


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

#: Dtype that a kernel reads -> its IN_DTYPE macro.
IN_DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}


@cache
def _quantize_spec(in_dtype: str, power_of_two: bool) -> KernelSpec:
    return _spec(
        "quantize_fp8", _QUANTIZE_THREADS, 0, IN_DTYPE=IN_DTYPES[in_dtype], POWER_OF_TWO=int(power_of_two)
    )


@cache
def _silu_mul_quantize_spec(masked: bool, power_of_two: bool, rounded: bool) -> KernelSpec:
    return _spec(
        "silu_mul_quantize",
        _SILU_THREADS,
        0,
        MASKED=int(masked),
        POWER_OF_TWO=int(power_of_two),
        ROUNDED=int(rounded),
    )


@cache
def _indexer_cache_spec(head_dim: int, in_dtype: str, power_of_two: bool) -> KernelSpec:
    return _spec(
        "indexer_quantize_and_cache",
        128,
        0,
        HEAD_DIM=head_dim,
        IN_DTYPE=IN_DTYPES[in_dtype],
        POWER_OF_TWO=int(power_of_two),
    )


@cache
def _indexer_topk_spec(in_dtype: str, config: heuristics.TopkConfig) -> KernelSpec:
    return _spec(
        "indexer_topk",
        config.num_threads,
        heuristics.topk_smem_bytes(),
        config.cluster,
        IN_DTYPE=IN_DTYPES[in_dtype],
        CAPACITY=heuristics.TOPK_CAPACITY,
        MAX_K=MAX_TOPK,
    )


Config = TypeVar("Config", covariant=True)


@dataclass(frozen=True)
class Selection(Generic[Config]):
    """The result of a selection: the kernel, the blocks of its launch, and the tile that determines both."""

    spec: KernelSpec
    grid: int
    config: Config


def select_gemm(problem: GemmProblem) -> Selection[heuristics.GemmConfig]:
    """The kernel, grid and tile of a GEMM. Raises TileError if the GEMM may not use `problem.config`."""
    config = heuristics.gemm_config(problem)
    grid = heuristics.gemm_grid(config, problem.layout, problem.m, problem.n, problem.num_sms)
    return Selection(_gemm_spec(problem.layout, config, problem.out_dtype), grid, config)


@cache
def _gemm_silu_mul_spec(config: heuristics.GemmConfig, power_of_two: bool, rounded: bool) -> KernelSpec:
    return _spec(
        "gemm_silu_mul_fp8",
        config.threads,
        heuristics.silu_mul_smem_bytes(config),
        LAYOUT=GEMM_LAYOUTS["offsets"],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        POWER_OF_TWO=int(power_of_two),
        ROUNDED=int(rounded),
    )


def select_gemm_silu_mul(problem: GemmSiluMulProblem) -> Selection[heuristics.GemmConfig]:
    """The kernel, grid and tile; each SM has one block."""
    config = heuristics.silu_mul_config(problem.rows)
    spec = _gemm_silu_mul_spec(config, problem.power_of_two, problem.rounded)
    return Selection(spec, problem.num_sms, config)


@cache
def _k_grouped_gemm_spec(config: heuristics.GemmConfig, out_dtype: OutDtype) -> KernelSpec:
    return _spec(
        "k_grouped_gemm_fp8",
        config.threads,
        heuristics.k_grouped_smem_bytes(config, out_dtype),
        config.cluster,
        LAYOUT=K_OFFSETS,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        OUT_FP32=int(out_dtype == "float32"),
    )


def select_k_grouped_gemm(problem: KGroupedGemmProblem) -> Selection[heuristics.GemmConfig]:
    """The mean columns of an expert choose the tile; the number of SMs and of tiles gives the grid."""
    config = heuristics.k_grouped_config(problem)
    spec = _k_grouped_gemm_spec(config, problem.out_dtype)
    return Selection(spec, heuristics.k_grouped_grid(config, problem), config)


def select_mqa_logits(problem: MqaLogitsProblem) -> Selection[heuristics.MqaWork]:
    """The whole call determines the config; the chunk determines the division into work items."""
    config = heuristics.mqa_config(problem)
    spec = _mqa_spec(
        problem.num_heads, problem.head_dim, problem.compressed, problem.fill, problem.out_dtype, config
    )
    query_blocks = -(-problem.num_queries // config.block_q)
    division = heuristics.mqa_division(query_blocks, problem.num_keys, problem.num_sms)
    items = query_blocks * -(-problem.num_keys // division.chunk_kv)
    work = heuristics.MqaWork(config, division, query_blocks, items)
    return Selection(spec, problem.num_sms if division.even else items, work)


def select_paged_mqa_logits(problem: PagedMqaLogitsProblem) -> Selection[heuristics.MqaConfig]:
    """One block does the work of one worker of the schedule."""
    config = heuristics.paged_mqa_config(problem)
    spec = _paged_mqa_spec(problem.num_heads, problem.head_dim, problem.block_size, problem.out_dtype, config)
    return Selection(spec, problem.num_workers or problem.num_sms, config)


def select_paged_mqa_metadata(problem: PagedMqaMetadataProblem) -> Selection[None]:
    """One block makes the whole schedule."""
    return Selection(_METADATA, 1, None)


#: Blocks of the quantizer that share an SM.
_QUANTIZE_BLOCKS_PER_SM = 8


def select_quantize(problem: QuantizeProblem) -> Selection[None]:
    """The grid's blocks take turns with tiles of `QUANTIZE_ROWS` rows and one group of columns."""
    tiles = -(-problem.m // QUANTIZE_ROWS) * (problem.k // SCALE_BLOCK)
    spec = _quantize_spec(problem.in_dtype, problem.power_of_two)
    return Selection(spec, min(tiles, problem.num_sms * _QUANTIZE_BLOCKS_PER_SM), None)


#: Blocks of `silu_mul_quantize` that share an SM; registers set this limit.
_SILU_BLOCKS_PER_SM = 10


def select_silu_mul_quantize(problem: SiluMulQuantizeProblem) -> Selection[None]:
    """The grid's blocks take turns with tiles of `SILU_ROWS` rows and one group; they read `masked_m`."""
    experts = 1 if problem.num_experts is None else problem.num_experts
    tiles = experts * -(-problem.m // SILU_ROWS) * (problem.k // SCALE_BLOCK)
    spec = _silu_mul_quantize_spec(problem.num_experts is not None, problem.power_of_two, problem.rounded)
    return Selection(spec, min(tiles, problem.num_sms * _SILU_BLOCKS_PER_SM), None)


def select_indexer_cache(problem: IndexerCacheProblem) -> Selection[None]:
    """The grid has one thread for every `QUANTIZE_VALUES` values of all rows."""
    spec = _indexer_cache_spec(problem.head_dim, problem.in_dtype, problem.power_of_two)
    return Selection(
        spec, -(-problem.num_rows * problem.head_dim // (spec.num_threads * QUANTIZE_VALUES)), None
    )


def select_indexer_topk(problem: IndexerTopkProblem) -> Selection[heuristics.TopkConfig]:
    """One cluster of blocks selects from one row."""
    config = heuristics.topk_config(problem)
    return Selection(_indexer_topk_spec(problem.in_dtype, config), problem.num_rows * config.cluster, config)


#: The most places that a block of `moe_permute` has for rows of its tokens.
MOE_PLACES = MAX_EXPERTS_PER_TOKEN
#: A block takes one token for each `_MOE_BLOCKS` tokens of the call, at most `_MOE_TOKENS`. More blocks would
#: cost more, since each counts all ids.
_MOE_BLOCKS, _MOE_TOKENS = 256, 32

#: Blocks divide columns as long as each block has this many groups. Its threads load them at once.
_MOE_GROUPS = 16


@cache
def _moe_permute_spec(in_fp8: bool, power_of_two: bool, wide_ids: bool) -> KernelSpec:
    return _spec(
        "moe_permute", 256, 0, IN_FP8=int(in_fp8), POWER_OF_TWO=int(power_of_two), WIDE_IDS=int(wide_ids)
    )


def select_moe_permute(problem: MoePermuteProblem) -> Selection[tuple[int, int]]:
    """The config is the number of tokens of a block, and of blocks that divide these tokens' columns."""
    in_fp8 = problem.in_dtype is None
    spec = _moe_permute_spec(in_fp8, problem.power_of_two and not in_fp8, problem.wide_ids)
    tokens = min(_MOE_TOKENS, MOE_PLACES // problem.topk, max(1, problem.num_tokens // _MOE_BLOCKS))
    blocks = -(-problem.num_tokens // tokens)
    splits = max(1, min(problem.k // SCALE_BLOCK // _MOE_GROUPS, problem.num_sms // blocks))
    return Selection(spec, blocks * splits, (tokens, splits))


_MOE_COMBINE = _spec("moe_combine", 128, 0)


def select_moe_combine(problem: MoeCombineProblem) -> Selection[None]:
    """The grid's blocks take turns with `QUANTIZE_VALUES` columns of a token for each thread."""
    blocks = -(-problem.num_tokens * problem.n // (_MOE_COMBINE.num_threads * QUANTIZE_VALUES))
    return Selection(_MOE_COMBINE, min(blocks, problem.num_sms * 16), None)


#: Lanes of the warp that chooses a token's experts; the number of which a lane's experts are a multiple, so
#: that there are few kernels; blocks of `route_topk` that share an SM.
_ROUTE_LANES, _ROUTE_STEP, _ROUTE_BLOCKS_PER_SM = 32, 4, 8


@cache
def _route_topk_spec(values: int, in_dtype: str) -> KernelSpec:
    return _spec("route_topk", 128, 0, VALUES=values, IN_DTYPE=IN_DTYPES[in_dtype])


def select_route_topk(problem: RouteTopkProblem) -> Selection[None]:
    """The grid's blocks take turns with a token for each warp."""
    steps = -(-problem.num_experts // (_ROUTE_LANES * _ROUTE_STEP))
    spec = _route_topk_spec(steps * _ROUTE_STEP, problem.in_dtype)
    blocks = -(-problem.num_tokens * _ROUTE_LANES // spec.num_threads)
    return Selection(spec, min(blocks, problem.num_sms * _ROUTE_BLOCKS_PER_SM), None)


_SELECTORS: dict[type[Problem], Callable[[Any], Selection[object]]] = {
    GemmProblem: select_gemm,
    KGroupedGemmProblem: select_k_grouped_gemm,
    MqaLogitsProblem: select_mqa_logits,
    PagedMqaLogitsProblem: select_paged_mqa_logits,
    PagedMqaMetadataProblem: select_paged_mqa_metadata,
    QuantizeProblem: select_quantize,
    SiluMulQuantizeProblem: select_silu_mul_quantize,
    IndexerCacheProblem: select_indexer_cache,
    IndexerTopkProblem: select_indexer_topk,
    MoePermuteProblem: select_moe_permute,
    GemmSiluMulProblem: select_gemm_silu_mul,
    MoeCombineProblem: select_moe_combine,
    RouteTopkProblem: select_route_topk,
}


def kernel_spec(problem: Problem) -> KernelSpec:
    """The kernel that serves `problem`: a pure function of `problem.for_selection()`."""
    return _SELECTORS[type(problem)](problem).spec
