"""problem -> tile config: pure functions, no torch, no GPU.

The same function serves the ops at launch and the planner before any launch, so whatever a config
depends on must be a field of the problem. Shared-memory sizes computed here are restated by
`static_assert` in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moe_fp8.problems import GemmLayout, GemmProblem, MqaLogitsProblem, PagedMqaLogitsProblem

#: Dynamic shared memory that one block may use on sm_90.
SMEM_CAPACITY = 232_448

#: One producer warpgroup and two math warpgroups.
WARPGROUP = 128
GEMM_THREADS = 3 * WARPGROUP

#: Experts that the in-kernel segment table holds.
MAX_EXPERTS = 512

#: Bytes before the pipeline stages: the stage bases must be 1024-byte aligned for the 128-byte swizzle.
BARRIER_BYTES = 1024

_SEGMENT_TABLE_BYTES = 12 * MAX_EXPERTS
_BLOCK_K = 128

#: Token tiles, smallest first. wgmma's N is a multiple of 8; a tile never crosses a 128-row segment start.
TOKEN_TILES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM kernel.

    Weights lie on the M side of wgmma and tokens on its N side, so that few tokens cost few columns:
    a tile is `block_n` weight rows by `block_m` tokens. `cluster` CTAs share (multicast) the token
    tile ("tokens") or the weight tile ("weights").
    """

    block_m: int
    block_n: int
    num_stages: int
    cluster: int = 1
    multicast: str = "tokens"


def gemm_stage_bytes(block_m: int, block_n: int) -> int:
    """Weights, tokens and token scales (padded to TMA's 128-byte destination alignment) of one stage."""
    scale_bytes = -(-block_m * 4 // 128) * 128
    return (block_n + block_m) * _BLOCK_K + scale_bytes


def gemm_epilogue_bytes(block_m: int) -> int:
    """Per math warpgroup: up to 64 tokens of 64 bf16, padded by 16 bytes against bank conflicts."""
    return 2 * min(block_m, 64) * 144


def gemm_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of the GEMM kernel, in bytes."""
    # Stage sizes are multiples of 128 only; weights and tokens are laid out as separate arrays so that
    # each tile starts at a multiple of 1024.
    return (
        BARRIER_BYTES
        + config.num_stages * gemm_stage_bytes(config.block_m, config.block_n)
        + gemm_epilogue_bytes(config.block_m)
        + _SEGMENT_TABLE_BYTES
        + 1024  # room to align the dynamic base
    )


def _deepest(block_m: int, block_n: int, cluster: int = 1, multicast: str = "tokens") -> GemmConfig:
    """The config with as many stages as fit, at most 12 (beyond that latency is long covered)."""
    stages = 12
    while gemm_smem_bytes(GemmConfig(block_m, block_n, stages)) > SMEM_CAPACITY:
        stages -= 1
    return GemmConfig(block_m, block_n, stages, cluster, multicast)


def _expected_rows(problem: GemmProblem) -> int:
    """Rows that one expert is expected to have: what the token tile should cover."""
    if problem.layout == "dense":
        return problem.m
    if problem.expected_m is not None:
        return min(max(problem.expected_m, 1), problem.m)
    if problem.layout == "masked":
        return problem.m
    return max(1, -(-problem.m // problem.num_experts))


@cache
def _gemm_config(layout: GemmLayout, rows: int, n: int, num_experts: int, num_sms: int) -> GemmConfig:
    # Grouped rows are averages: leave room for an expert with a quarter more, since a second token
    # tile reads the expert's weights again (from L2).
    wanted = rows if layout == "dense" else rows + rows // 4
    for block_m in TOKEN_TILES[:-1]:
        if wanted <= block_m:
            return _deepest(block_m, 128)
    tiles = num_experts * -(-rows // 128) * -(-n // 256)
    if tiles < num_sms:
        return _deepest(128, 128)
    # Sharing weights pairs two token tiles of one expert: worth it once an odd tile is a small loss.
    # `m_indices` cannot: neighbouring tiles may belong to different experts.
    if layout != "m_indices" and rows >= 1024:
        return _deepest(128, 256, 2, "weights")
    return _deepest(128, 256, 2, "tokens")


def gemm_config(problem: GemmProblem) -> GemmConfig:
    """Tile for a GEMM, dense or grouped."""
    return _gemm_config(
        problem.layout, _expected_rows(problem), problem.n, problem.num_experts, problem.num_sms
    )


#: Keys per chunk of the paged kernel's schedule; `paged_mqa_logits_metadata` counts in these.
PAGED_CHUNK = 256

#: Columns (query token x head) of one MQA-logits tile: wgmma's largest N, so that K is read least often.
MQA_COLUMNS = 256

#: Query tokens of one tile: each costs registers for its key range.
MQA_MAX_QUERIES = 8

#: Keys of one pipeline stage: 64 for each math warpgroup.
MQA_BLOCK_KV = 128


@dataclass(frozen=True)
class MqaConfig:
    """Tile of the MQA-logits kernels: `block_q` query tokens x heads against `MQA_BLOCK_KV` keys a stage."""

    block_q: int
    num_stages: int


def mqa_smem_bytes(config: MqaConfig, num_heads: int, head_dim: int) -> int:
    """Dynamic shared memory of the prefill and paged logits kernels, in bytes."""
    columns = config.block_q * num_heads
    queries = columns * head_dim + -(-columns * 4 // 128) * 128  # FP8 rows and their fp32 weights
    keys = MQA_BLOCK_KV * head_dim + MQA_BLOCK_KV * 4
    return BARRIER_BYTES + 2 * queries + config.num_stages * keys + 1024


def mqa_config(problem: MqaLogitsProblem) -> MqaConfig:
    """Tile of the prefill indexer."""
    return MqaConfig(block_q=min(MQA_COLUMNS // problem.num_heads, MQA_MAX_QUERIES), num_stages=6)


def paged_mqa_config(problem: PagedMqaLogitsProblem) -> MqaConfig:
    """Tile of the decode indexer: the least power of two of tokens that covers next_n, or several passes."""
    block_q = 1
    while block_q < min(problem.next_n, MQA_MAX_QUERIES) and 2 * block_q * problem.num_heads <= MQA_COLUMNS:
        block_q *= 2
    return MqaConfig(block_q=block_q, num_stages=8)
