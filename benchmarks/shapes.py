"""The shapes to time: one list for each class, in the terms of the field.

This module needs only the standard library.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Skew = Literal["equal", "spread", "zipf", "routed", "sparse"]

#: In `m_indices` and `psum`, segments start at multiples of this number of rows.
ALIGNMENT = 128


@dataclass(frozen=True)
class DenseShape:
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class GroupedShape:
    """`rows_per_expert` is the mean; `skew` says how the experts share all rows."""

    layout: Literal["m_indices", "psum", "offsets", "masked"]
    num_experts: int
    rows_per_expert: int
    n: int
    k: int
    skew: Skew = "equal"

    def counts(self) -> list[int]:
        """The number of valid rows of every expert; it is the same on every machine."""
        return expert_counts(self.num_experts, self.rows_per_expert, self.skew)


@dataclass(frozen=True)
class KGroupedShape:
    """Weight gradients `[num_experts, m, n]`, of which `empty` experts have no tokens.

    `tokens_per_expert` is the mean over the other experts, padding included; `skew` says how they share all
    tokens.
    """

    num_experts: int
    tokens_per_expert: int
    m: int
    n: int
    skew: Skew = "spread"
    empty: int = 0

    def counts(self) -> list[int]:
        """The columns of every expert, multiples of 128; they are the same on every machine."""
        busy = self.num_experts - self.empty
        counts = [128 * blocks for blocks in expert_counts(busy, self.tokens_per_expert // 128, self.skew)]
        for expert in range(self.empty):  # evenly among the others
            counts.insert((expert + 1) * self.num_experts // self.empty - 1, 0)
        return counts


@dataclass(frozen=True)
class MqaShape:
    """Causal prefill: query i sees keys up to `context - num_queries + i`, inclusive."""

    num_queries: int
    context: int
    heads: int = 64
    head_dim: int = 128


@dataclass(frozen=True)
class PagedShape:
    """`context` is the mean length; lengths are spread evenly from 0.7 to 1.3 of the mean."""

    batch: int
    context: int
    next_n: int = 1
    heads: int = 64
    head_dim: int = 128
    block_size: int = 64

    def lengths(self) -> list[int]:
        return expert_counts(self.batch, self.context, "spread")


@dataclass(frozen=True)
class TopkShape:
    """The `k` greatest logits of each row.

    full: each row considers all columns. causal: row i of M considers (i + 1) / M of the columns.
    """

    rows: int
    columns: int
    k: int
    skew: Literal["full", "causal"] = "full"

    def ends(self) -> list[int]:
        """The number of columns that each row considers."""
        if self.skew == "full":
            return [self.columns] * self.rows
        return [(row + 1) * self.columns // self.rows for row in range(self.rows)]


@dataclass(frozen=True)
class MoeLayerShape:
    """The routed experts of a model on one rank: the first `local_experts` of `num_experts`."""

    model: str
    tokens: int
    routing: Literal["uniform", "zipf"]
    hidden: int
    intermediate: int
    num_experts: int
    local_experts: int
    topk: int = 8


@dataclass(frozen=True)
class SiluMulShape:
    """`m` rows of gate and up projection, `[m, 2 * intermediate]`.

    With `num_experts` (masked), an expert's buffer has `buffer_rows` rows, and `m` is the mean of its valid
    rows.
    """

    m: int
    intermediate: int
    num_experts: int | None = None
    buffer_rows: int | None = None

    def counts(self) -> list[int]:
        """The number of valid rows: of the one input, or of every expert."""
        return [self.m] if self.num_experts is None else expert_counts(self.num_experts, self.m, "spread")


def expert_counts(num_experts: int, mean: int, skew: Skew) -> list[int]:
    """`num_experts` counts with exactly this mean.

    equal: all counts are equal. spread: they go evenly from 0.7 to 1.3 of the mean. zipf: the r-th busiest
    expert has a share proportional to 1/r. routed: every row picks its expert at random, so with few rows
    some experts are empty. sparse: a quarter of the experts are empty, and the others are as in spread.
    """
    rng = random.Random(20_261)
    total = num_experts * mean
    if skew == "equal" or num_experts == 1:
        return [mean] * num_experts
    if skew == "routed":
        counts = [0] * num_experts
        for _ in range(total):
            counts[rng.randrange(num_experts)] += 1
        return counts
    if skew == "spread":
        shares = [0.7 + 0.6 * i / (num_experts - 1) for i in range(num_experts)]
    elif skew == "sparse":
        busy = num_experts - max(1, num_experts // 4)
        shares = [0.7 + 0.6 * i / max(1, busy - 1) if i < busy else 0.0 for i in range(num_experts)]
    else:
        shares = [1 / (rank + 1) for rank in range(num_experts)]
    scale = total / math.fsum(shares)  # (From Python 3.12 on, `sum` rounds in another way.)
    counts = [int(share * scale) for share in shares]
    takers = [i for i, share in enumerate(shares) if share]
    for i in range(total - sum(counts)):
        counts[takers[i % len(takers)]] += 1
    rng.shuffle(counts)
    return counts


def aligned_starts(counts: list[int]) -> list[int]:
    """The first row of every expert, then the number of all rows.

    Segments start at multiples of `ALIGNMENT`.
    """
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // ALIGNMENT) * ALIGNMENT)
    return starts


#: The projections of DeepSeek-V3 and Qwen3-235B, at TP1 and TP8.
DENSE = [
    DenseShape(1, 4096, 7168),
    DenseShape(1, 2112, 7168),
    DenseShape(1, 9216, 4096),
    DenseShape(8, 4096, 7168),
    DenseShape(8, 7168, 2048),
    DenseShape(8, 1280, 4096),
    DenseShape(16, 7168, 2048),
    DenseShape(16, 2112, 7168),
    DenseShape(16, 4096, 8192),
    DenseShape(32, 4608, 7168),
    DenseShape(32, 3072, 1536),
    DenseShape(32, 9216, 4096),
    DenseShape(64, 4096, 7168),
    DenseShape(64, 7168, 2048),
    DenseShape(64, 2112, 7168),
    DenseShape(64, 4096, 1024),
    DenseShape(128, 4096, 7168),
    DenseShape(128, 7168, 2048),
    DenseShape(128, 2112, 7168),
    DenseShape(128, 9216, 4096),
    DenseShape(128, 7168, 16384),
    DenseShape(1024, 4096, 7168),
    DenseShape(2048, 9216, 4096),
    DenseShape(4096, 4096, 7168),
    DenseShape(4096, 24576, 1536),
    DenseShape(4096, 7168, 16384),
    DenseShape(8192, 2112, 7168),
    DenseShape(16384, 7168, 2304),
]

#: EP8's experts of DeepSeek-V3 (4096 x 7168, 7168 x 2048) and Qwen3-235B (3072 x 4096, 4096 x 1536).
CONTIGUOUS = [
    GroupedShape("m_indices", 4, 8192, 4096, 7168),
    GroupedShape("m_indices", 8, 4096, 7168, 2048),
    GroupedShape("m_indices", 32, 1024, 4096, 7168),
    GroupedShape("offsets", 8, 4096, 7168, 2048, "spread"),
    GroupedShape("psum", 16, 1024, 3072, 4096, "zipf"),
    GroupedShape("offsets", 16, 1024, 4096, 1536, "spread"),
    GroupedShape("m_indices", 64, 256, 4096, 7168),
    GroupedShape("m_indices", 64, 256, 7168, 2048),
    GroupedShape("m_indices", 32, 128, 4096, 7168, "zipf"),
    GroupedShape("psum", 32, 128, 4096, 7168, "zipf"),
    GroupedShape("offsets", 32, 128, 4096, 7168, "zipf"),
    GroupedShape("psum", 32, 256, 7168, 2048, "zipf"),
    GroupedShape("offsets", 16, 256, 3072, 4096, "zipf"),
    GroupedShape("psum", 16, 128, 4096, 1536, "spread"),
    GroupedShape("psum", 32, 1, 4096, 7168, "routed"),
    GroupedShape("psum", 32, 4, 4096, 7168, "routed"),
    GroupedShape("psum", 32, 16, 4096, 7168, "routed"),
    GroupedShape("psum", 32, 64, 4096, 7168, "routed"),
    GroupedShape("offsets", 32, 1, 7168, 2048, "routed"),
    GroupedShape("offsets", 32, 4, 4096, 7168, "routed"),
    GroupedShape("offsets", 32, 64, 4096, 7168, "routed"),
    GroupedShape("psum", 32, 4, 7168, 2048, "routed"),
    GroupedShape("psum", 32, 16, 7168, 2048, "routed"),
    GroupedShape("offsets", 32, 32, 7168, 2048, "sparse"),
    GroupedShape("psum", 16, 8, 3072, 4096, "sparse"),
    GroupedShape("offsets", 16, 32, 4096, 1536, "sparse"),
    GroupedShape("psum", 16, 64, 3072, 4096, "zipf"),
]

MASKED = [
    GroupedShape("masked", 32, 4, 4096, 7168, "spread"),
    GroupedShape("masked", 32, 20, 4096, 7168, "spread"),
    GroupedShape("masked", 32, 20, 7168, 2048, "spread"),
    GroupedShape("masked", 32, 64, 4096, 7168, "spread"),
    GroupedShape("masked", 6, 20, 4096, 7168, "spread"),
    GroupedShape("masked", 32, 48, 7168, 2048, "zipf"),
    GroupedShape("masked", 32, 4, 7168, 2048, "sparse"),
    GroupedShape("masked", 16, 8, 3072, 4096, "spread"),
    GroupedShape("masked", 8, 128, 7168, 2048, "spread"),
    GroupedShape("masked", 32, 128, 4096, 7168, "zipf"),
    GroupedShape("masked", 32, 192, 4096, 7168, "spread"),
    GroupedShape("masked", 4, 256, 7168, 2048, "spread"),
    GroupedShape("masked", 16, 256, 3072, 4096, "sparse"),
    GroupedShape("masked", 8, 512, 4096, 7168, "spread"),
    GroupedShape("masked", 1, 1024, 7168, 2048, "spread"),
    GroupedShape("masked", 6, 1024, 4096, 7168, "spread"),
]

#: The experts of DeepSeek-V3 (4096 x 7168, 7168 x 2048) and Qwen3-235B (3072 x 4096, 4096 x 1536).
K_GROUPED = [
    KGroupedShape(4, 8192, 4096, 7168),
    KGroupedShape(4, 8192, 7168, 2048, "zipf", empty=1),
    KGroupedShape(8, 2048, 4096, 7168),
    KGroupedShape(8, 4096, 7168, 2048, "zipf", empty=1),
    KGroupedShape(16, 1024, 4096, 7168, "zipf", empty=2),
    KGroupedShape(16, 2048, 7168, 2048),
    KGroupedShape(32, 1024, 4096, 7168),
    KGroupedShape(32, 1024, 7168, 2048, "zipf", empty=4),
    KGroupedShape(64, 512, 7168, 2048),
    KGroupedShape(4, 8192, 3072, 4096, "zipf", empty=1),
    KGroupedShape(8, 4096, 4096, 1536),
    KGroupedShape(16, 2048, 3072, 4096),
    KGroupedShape(16, 1024, 4096, 1536, "zipf", empty=2),
    KGroupedShape(32, 1024, 3072, 4096, "zipf", empty=4),
    KGroupedShape(64, 512, 4096, 1536),
    KGroupedShape(64, 512, 3072, 4096, "zipf", empty=8),
]

#: The experts of DeepSeek-V3 (2048) and Qwen3-30B (768).
SILU_MUL_QUANTIZE = [
    *(SiluMulShape(m, k) for k in (2048, 768) for m in (64, 256, 1024, 4096, 8192)),
    *(SiluMulShape(64, k, num_experts=32, buffer_rows=128) for k in (2048, 768)),
]

MQA_LOGITS = [MqaShape(2048, 8192), MqaShape(4096, 16384), MqaShape(2048, 65536)]

PAGED_MQA_LOGITS = [
    PagedShape(1, 131072),
    PagedShape(8, 65536),
    PagedShape(64, 4096),
    PagedShape(64, 32768),
    PagedShape(64, 8192, next_n=2),
    PagedShape(8, 32768, next_n=4),
    PagedShape(64, 8192, next_n=4),
    PagedShape(256, 4096),
]

PAGED_METADATA = [PagedShape(1, 4096), PagedShape(64, 4096), PagedShape(256, 4096)]

#: Bytes of one input set of class topk.
MOST_LOGITS = 8 << 30

#: DeepSeek-V3.2 chooses 2048 keys from up to 128K tokens.
TOPK = [
    TopkShape(rows, columns, 2048, skew)
    for rows in (1, 64, 512, 4096)
    for columns in (4096, 32768, 131072, 1048576)
    for skew in ("full", "causal")
    if 4 * rows * columns <= MOST_LOGITS and (skew == "full" or rows > 1)
] + [
    TopkShape(1, 32768, 512),
    TopkShape(64, 131072, 512),
    TopkShape(512, 32768, 512),
    TopkShape(4096, 4096, 512),
    TopkShape(64, 32768, 4096),
    TopkShape(512, 131072, 1024, "causal"),
]

_MOE_TOKENS: tuple[tuple[Literal["uniform", "zipf"], tuple[int, ...]], ...] = (
    ("uniform", (1, 8, 32, 64, 128, 256, 4096, 16384)),
    ("zipf", (8, 64, 256)),
)

_MOE_MODELS = (
    ("deepseek_v3", 7168, 2048, 256, 32),
    ("kimi_k2", 7168, 2048, 384, 48),
    ("qwen3_235b", 4096, 1536, 128, 16),
    ("minimax_m2", 3072, 1536, 256, 256),
    ("qwen3_30b", 2048, 768, 128, 128),
)

MOE_LAYER = [
    MoeLayerShape(model, tokens, routing, *sizes)
    for model, *sizes in _MOE_MODELS
    for routing, all_tokens in _MOE_TOKENS
    for tokens in all_tokens
]
