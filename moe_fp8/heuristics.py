"""problem -> tile config: pure functions, no torch, no GPU.

The same function serves the ops at launch and the planner before any launch, so whatever a config
depends on must be a field of the problem. Shared-memory sizes computed here are restated by
`static_assert` in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from moe_fp8.problems import GemmLayout, GemmProblem, MqaLogitsProblem, PagedMqaLogitsProblem

#: Dynamic shared memory that one block may use on sm_90.
SMEM_CAPACITY = 232_448

#: One producer warpgroup and two math warpgroups.
WARPGROUP = 128
GEMM_THREADS = 3 * WARPGROUP

#: Room for the barriers and what else a kernel keeps beside its stages.
BARRIER_BYTES = 1024

_BLOCK_K = 128

#: What the CTAs of a cluster share.
Shares = Literal["tokens", "weights", "k"]

#: Token tiles, smallest first. wgmma's N is a multiple of 8; a tile never crosses a 128-row segment start.
TOKEN_TILES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM kernel.

    Up to 64 tokens weights lie on the M side of wgmma and tokens on its N side, so that few tokens cost
    few columns. A tile is `block_n` weight rows by `block_m` tokens. `cluster` CTAs share by multicast the
    token tile ("tokens") or the weight tile ("weights"), or divide one tile along K ("k").
    """

    block_m: int
    block_n: int
    num_stages: int
    cluster: int = 1
    shares: Shares = "tokens"


def gemm_stage_bytes(block_m: int, block_n: int) -> int:
    """Weights, tokens and token scales (padded to TMA's 128-byte destination alignment) of one stage."""
    scale_bytes = -(-block_m * 4 // 128) * 128
    return (block_n + block_m) * _BLOCK_K + scale_bytes


def gemm_staging_bytes(block_m: int) -> int:
    """Both math warpgroups' fragments as bf16: 64 weight rows of every token, or 64 tokens of 128 weight rows."""
    return 2 * (block_m * 128 if block_m <= 64 else 64 * 256)


def gemm_parts_bytes(config: GemmConfig) -> int:
    """What a tile's parts send one another, two warpgroups' shares of 8 columns x 128 threads in fp32."""
    parts = (config.cluster if config.shares == "k" else 1) * (2 if config.block_n == 64 else 1)
    return 2 * (parts - 1) * -(-config.block_m // 8 // parts) * 2048


def gemm_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of the GEMM kernel, in bytes."""
    return (
        BARRIER_BYTES
        + config.num_stages * gemm_stage_bytes(config.block_m, config.block_n)
        + gemm_staging_bytes(config.block_m)
        + gemm_parts_bytes(config)
    )


@cache
def _deepest(block_m: int, block_n: int, cluster: int = 1, shares: Shares = "tokens") -> GemmConfig:
    """The config with as many stages as fit, at most 24 (beyond that latency is long covered)."""
    config = GemmConfig(block_m, block_n, 24 * 64 // block_n, cluster, shares)
    while gemm_smem_bytes(config) > SMEM_CAPACITY:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


#: What a tile costs on an H200, in microseconds: each 128 of K, and once (prologue, epilogue, first loads).
#: The widest tile does the work of two in more than twice the time but leaves the GPU at a higher clock.
_TILE_COSTS = {
    (8, 128): (0.20, 1.0),
    (16, 128): (0.21, 1.0),
    (32, 128): (0.25, 1.0),
    (64, 128): (0.36, 1.1),
    (128, 128): (0.39, 1.2),
    (128, 256): (0.75, 1.8),
}

#: Of which a cluster that splits K adds its parts, and clusters of that size that 132 SMs hold at once:
#: a GPC has 16 or 18 SMs.
_SPLIT_COSTS = {1: 0.0, 2: 2.0, 3: 2.5, 4: 3.0}
_CLUSTERS_OF_132 = {1: 132, 2: 66, 3: 42, 4: 28}

#: Bytes of weights that all SMs together read in a microsecond, and what reading them again (from L2) for
#: another token tile costs beside that.
_READ_RATE = 4.3e6
_REREAD = 0.4


def _cost(config: GemmConfig, layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> float:
    """Predicted microseconds; only good for comparing configs."""
    if layout == "dense":
        tiles_m = float(-(-rows // config.block_m))
    else:
        # Rows are averages: most experts fit a tile that leaves room for a quarter more, and a cut
        # through uneven experts wastes half a tile each.
        tiles_m = 1.0 if rows + rows // 4 <= config.block_m else rows / config.block_m + 0.5
    tiles = experts * tiles_m * -(-n // config.block_n)
    split = config.cluster if config.shares == "k" else 1
    at_once = max(1, _CLUSTERS_OF_132[split] * sms // 132)
    rounds = max(1.0, -(-tiles // at_once) if layout == "dense" else tiles / at_once + 0.4)
    per_block, once = _TILE_COSTS[config.block_m, config.block_n]
    busy = rounds * (-(-k // (_BLOCK_K * split)) * per_block + once + _SPLIT_COSTS[split])
    read = experts * n * k * (1 + _REREAD * (tiles_m - 1)) / _READ_RATE
    return max(busy, read) + 0.1 * min(busy, read)


@cache
def _candidates(layout: GemmLayout, rows: int, k: int) -> tuple[GemmConfig, ...]:
    configs = [_deepest(block_m, 128) for block_m in TOKEN_TILES]
    # Splitting K changes the order of a sum, so only what results may depend on may choose it: grouped
    # results are the same for any `expected_m`. A part of K under 1024 does not pay for the reduction.
    if layout == "dense":
        for split in (2, 3, 4):
            if k // split >= 8 * _BLOCK_K:
                configs += [_deepest(block_m, 128, split, "k") for block_m in TOKEN_TILES[:-1]]
    # Sharing weights pairs two token tiles of one expert: worth it once an odd tile is a small loss.
    # `m_indices` cannot: neighbouring tiles may belong to different experts.
    shares: Shares = "weights" if layout != "m_indices" and rows >= 1024 else "tokens"
    return (*configs, _deepest(128, 256, 2, shares))


@cache
def _gemm_config(layout: GemmLayout, rows: int, n: int, k: int, experts: int, sms: int) -> GemmConfig:
    return min(
        (config for config in _candidates(layout, rows, k) if config.cluster <= sms),
        key=lambda config: (_cost(config, layout, rows, n, k, experts, sms), config.block_m, config.cluster),
    )


def gemm_config(problem: GemmProblem) -> GemmConfig:
    """Tile for a GEMM, dense or grouped: the cheapest candidate."""
    rows = problem.expected_m or problem.m  # GemmProblem sets it
    # Coarser where a row more cannot matter; beyond 4096 the order of the candidates no longer changes.
    rows = rows if rows < 64 else min(-(-rows // 8) * 8, 4096)
    return _gemm_config(problem.layout, rows, problem.n, problem.k, problem.num_experts, problem.num_sms)


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
