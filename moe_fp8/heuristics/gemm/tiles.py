"""The GEMM kernel's tiles: the legal tiles, their resources, their text. Pure; standard library only.

The kernel checks the shared-memory sizes of this module in a `static_assert`, and `params.py` the boxes of
tensor maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, get_args

from moe_fp8.errors import TileError
from moe_fp8.heuristics.sm90 import BARRIER_BYTES, SMEM_CAPACITY, WARPGROUP
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.problems import DEFAULT_NUM_SMS, GemmLayout, GemmProblem

#: The way in which the CTAs of a cluster cooperate: two tiles with a common operand, or one tile divided
#: along K.
Shares = Literal["operands", "k"]

#: Token tiles, smallest first. wgmma's N is a multiple of 8.
TOKEN_TILES = (8, 16, 32, 64, 128, 192)


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM kernel: `block_m` tokens by `block_n` weight rows.

    In tiles of up to 32 tokens, weights lie on the M side of wgmma and tokens on its N side, so that few
    tokens cost few columns. `shares` "operands": a `cluster` of two CTAs takes a pair of tiles that have
    weights or tokens in common. `shares` "k": a cluster of two to four CTAs divides a tile along K. Tiles of
    64 weight rows and up to 32 tokens divide K between the two math warpgroups of a CTA.

    As text: `"128x64"`, `"128x256/2p"`, `"64x64/3k"`: tokens x weight rows / cluster, then p (pair) or k.
    """

    block_m: int
    block_n: int
    num_stages: int
    cluster: int = 1
    shares: Shares = "operands"

    def __str__(self) -> str:
        shared = f"/{self.cluster}{'k' if self.shares == 'k' else 'p'}" if self.cluster > 1 else ""
        return f"{self.block_m}x{self.block_n}{shared}"

    # The properties that the cost model reads are cached, because a plan makes many predictions.
    @cached_property
    def pair(self) -> int:
        """Tiles that a cluster takes at once."""
        return self.cluster if self.shares == "operands" else 1

    @cached_property
    def split(self) -> int:
        """CTAs that divide one tile along K."""
        return self.cluster if self.shares == "k" else 1

    @cached_property
    def launch_cluster(self) -> int:
        """CTAs that `gemm_fp8` launches together (kLaunchClusterOf).

        CTAs with tiles of 64 tokens and more come in twos even if each takes tiles of its own. Both run on
        the same TPC, and its SMs take a line of L2 once if both ask for it.
        """
        return 2 if self.cluster == 1 and self.block_m >= 64 else self.cluster

    @property
    def alternate(self) -> bool:
        """Whether the math warpgroups take alternate blocks of K (kAlternate)."""
        return self.block_n == 64 and self.block_m <= 32

    @property
    def columns(self) -> int:
        """Columns on wgmma's N side that a math warpgroup computes (kColumns)."""
        if self.block_m < 64:
            return self.block_m
        if self.block_m == 64:
            return 64 if self.block_n % 64 == 0 else self.block_n
        return self.block_n if self.block_n <= 192 else 128

    @cached_property
    def parts(self) -> int:
        """The number of partial sums along K, each of which is rounded separately."""
        return self.split * (2 if self.alternate else 1)

    @property
    def math_warpgroups(self) -> int:
        """Warpgroups that multiply (kMathWarpgroups)."""
        if self.block_m > 64:
            return self.block_m // 64
        return self.block_n // self.columns if self.block_m == 64 else 2

    @property
    def threads(self) -> int:
        """Threads of a CTA: its math warpgroups and one warpgroup of producers."""
        return (1 + self.math_warpgroups) * WARPGROUP

    @cached_property
    def divided(self) -> bool:
        """Whether CTAs take a last round of few tiles in halves or quarters (kPieces)."""
        return self.block_n == 256

    @property
    def weight_box(self) -> int:
        """Weight rows that TMA copies at once (kWeightBox)."""
        return 128 if self.divided else self.block_n

    @property
    def token_box(self) -> int:
        """Tokens that TMA copies at once (kTokenBox)."""
        return min(self.block_m, 64)

    @property
    def out_box(self) -> tuple[int, int] | None:
        """Weight rows and tokens of bf16 that TMA stores at once (kBoxRows, kStoredTokens).

        None for tiles of fewer than 64 tokens, which are stored from registers (kStaged is false).
        """
        return (64 if self.block_n % 64 == 0 else 32, 16) if self.block_m >= 64 else None


def gemm_stage_bytes(block_m: int, block_n: int) -> int:
    """Bytes of one stage: weights, tokens, and token scales padded to TMA's 128-byte alignment."""
    scale_bytes = -(-block_m * 4 // 128) * 128
    return (block_n + block_m) * SCALE_BLOCK + scale_bytes


def gemm_staging_bytes(config: GemmConfig) -> int:
    """Bytes for one bf16 fragment of 64 rows of each math warpgroup."""
    if config.out_box is None:
        return 0
    return config.math_warpgroups * 64 * config.columns * 2


def gemm_parts_bytes(config: GemmConfig) -> int:
    """Bytes that the parts of a tile exchange: per warpgroup, a float4 of each thread for 8 columns."""
    return config.math_warpgroups * (config.parts - 1) * -(-config.columns // 8 // config.parts) * 2048


def gemm_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of the GEMM kernel, in bytes."""
    return (
        BARRIER_BYTES
        + config.num_stages * gemm_stage_bytes(config.block_m, config.block_n)
        + gemm_staging_bytes(config)
        + gemm_parts_bytes(config)
    )


def gemm_grid(config: GemmConfig, layout: GemmLayout, m: int, n: int, num_sms: int) -> int:
    """CTAs of a launch: whole clusters on all SMs; for a dense GEMM no more than there are units of work."""
    clusters = num_sms // config.launch_cluster
    if layout == "dense":
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        units = -(-tiles // (config.launch_cluster // config.split))
        if config.divided:
            units *= 4 if 4 * units <= clusters else 2
        clusters = min(clusters, units)
    return clusters * config.launch_cluster


def fit_stages(config: GemmConfig, smem_bytes: Callable[[GemmConfig], int]) -> GemmConfig:
    """`config` with as many of its stages as fit in shared memory; `smem_bytes` gives the bytes of a config.

    If warpgroups alternate, the number is even, so that each warpgroup always uses the same stages.
    """
    while smem_bytes(config) > SMEM_CAPACITY or (config.alternate and config.num_stages % 2):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


@cache
def _deepest(block_m: int, block_n: int, cluster: int = 1, shares: Shares = "operands") -> GemmConfig:
    """The tile with at most 24 * 64 / block_n stages; more stages would not hide more latency."""
    return fit_stages(GemmConfig(block_m, block_n, 24 * 64 // block_n, cluster, shares), gemm_smem_bytes)


@cache
def gemm_configs(
    layout: GemmLayout, k: int, batch_invariant: bool = False, num_sms: int = DEFAULT_NUM_SMS
) -> tuple[GemmConfig, ...]:
    """Every config that a GEMM of this layout may use on `num_sms` SMs.

    A config that divides K changes the order of a sum, and so its last bits. Grouped GEMMs may not use it,
    because their results must not depend on `expected_m`. Batch-invariant GEMMs may not use it, because their
    results must not depend on the number of rows. Each part of K has at least 512 elements; with shorter
    parts, adding the parts takes longer than dividing K saves. Pairs of 128x192 are faster than single tiles
    in grouped GEMMs and slower in dense GEMMs.
    """
    configs = [_deepest(block_m, 128) for block_m in (8, 16, 32, 128, 192)]
    configs += [_deepest(64, 64), _deepest(64, 96), _deepest(128, 64), _deepest(128, 96), _deepest(192, 96)]
    configs += [_deepest(128, 192) if layout == "dense" else _deepest(128, 192, 2), _deepest(128, 256, 2)]
    if layout == "dense" and not batch_invariant:
        divided = [_deepest(block_m, 64) for block_m in (8, 16, 32)] + [_deepest(128, 96, 2, "k")]
        for split in (2, 3, 4):
            for block_n in (64, 128):
                divided += [_deepest(block_m, block_n, split, "k") for block_m in TOKEN_TILES[:-1]]
        configs += [config for config in divided if k >= 512 * config.parts]
    return tuple(config for config in configs if config.launch_cluster <= num_sms)


@cache
def every_gemm_config() -> tuple[GemmConfig, ...]:
    """The configs of all layouts, for a K that is long enough for each."""
    layouts: tuple[GemmLayout, ...] = get_args(GemmLayout)
    return tuple(dict.fromkeys(config for layout in layouts for config in gemm_configs(layout, k=1 << 20)))


@cache
def _by_text(layout: GemmLayout, k: int, batch_invariant: bool, num_sms: int) -> dict[str, GemmConfig]:
    return {str(config): config for config in gemm_configs(layout, k, batch_invariant, num_sms)}


def parse_gemm_config(text: str, problem: GemmProblem) -> GemmConfig:
    """The config that `text` names (see GemmConfig); raises TileError if `problem` may not use it."""
    legal = _by_text(problem.layout, problem.k, problem.batch_invariant, problem.num_sms)
    if text in legal:
        return legal[text]
    sms = "1 SM" if problem.num_sms == 1 else f"{problem.num_sms} SMs"
    raise TileError(
        "config",
        f"one of {', '.join(legal)} for layout {problem.layout}, K = {problem.k}, {sms}"
        + (" and batch-invariant results" if problem.batch_invariant else ""),
        text,
        "choose one of these configs, or None to leave the choice to the selector",
    )
