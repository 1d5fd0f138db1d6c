"""Seeded draws from the widths of real models, and the `development` set.

`DENSE`, `CONTIGUOUS` and `MASKED` have 30 shapes each and `TOPK` has 20. They are the same on every machine.
They catch a selector that was fitted to the listed shapes. Decisions have been made on them
(benchmarks/notes/ names some of these decisions), so they prove nothing about shapes that nobody looked at:
`unseen_shapes` draws such shapes. This module needs only the standard library.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from .shapes import MOST_LOGITS, DenseShape, GroupedShape, Skew, TopkShape, aligned_starts

Layout: TypeAlias = Literal["m_indices", "psum", "offsets", "masked"]

CONTIGUOUS_LAYOUTS: tuple[Layout, ...] = ("m_indices", "psum", "offsets")

_SHAPES_A_CLASS = 30
_SEED = 20_261

MOST_ROWS = 16_384
#: Most rows of one expert if each expert has its own buffer. A larger batch is prefill, which is not masked.
MOST_MASKED_ROWS = 1024
#: Most rows of all experts together. With `_MOST_WEIGHTS` and `_MOST_BUFFER`, this bound keeps a shape below
#: 30 GB and a class with 10 replays a shape below three minutes.
_MOST_ROUTED_ROWS = 65_536
#: Bytes of one input set: the weights of all experts; the activations and output of one contestant.
_MOST_WEIGHTS = 2 << 30
_MOST_BUFFER = 4 << 30

#: (TP, EP) of the experts' layers.
EXPERT_PARALLEL = ((1, 8), (1, 32))
_TENSOR_PARALLEL = ((1, 1), (8, 1))

#: Half of the skews are uniform (0.7 to 1.3 of the mean) and half Zipf. Every other uniform skew has empty
#: experts.
SKEWS: tuple[Skew, ...] = ("spread", "zipf", "sparse", "zipf")


@dataclass(frozen=True)
class Mla:
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    index_heads: int = 0
    index_dim: int = 128

    def widths(self, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
        heads = self.heads // tp
        yield self.q_lora + self.kv_lora + self.rope, hidden
        yield heads * (self.nope + self.rope), self.q_lora
        yield heads * (self.nope + self.v), self.kv_lora
        yield hidden, heads * self.v
        if self.index_heads:
            yield self.index_heads * self.index_dim, self.q_lora


@dataclass(frozen=True)
class Gqa:
    heads: int
    kv_heads: int
    head_dim: int = 128

    def widths(self, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
        kv_heads = max(1, self.kv_heads // tp)
        yield (self.heads // tp + 2 * kv_heads) * self.head_dim, hidden
        yield hidden, self.heads // tp * self.head_dim


@dataclass(frozen=True)
class CompressedMla:
    """DeepSeek-V4's attention: one latent head of keys and values, and an output projection of two factors.

    The first factor of the output projection is grouped by heads and is no GEMM of this package.
    """

    heads: int
    q_lora: int
    head_dim: int
    o_lora: int
    o_groups: int
    index_heads: int
    index_dim: int = 128

    def widths(self, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
        yield self.q_lora + self.head_dim, hidden
        yield self.heads * self.head_dim // tp, self.q_lora
        yield hidden, self.o_groups * self.o_lora // tp
        yield self.index_heads * self.index_dim, self.q_lora


@dataclass(frozen=True)
class Model:
    """`shared` and `dense` are intermediate sizes of the shared expert and of dense layers; 0 means none."""

    hidden: int
    moe: int
    num_experts: int
    attention: Mla | Gqa | CompressedMla
    shared: int = 0
    dense: int = 0

    def dense_widths(self, tp: int) -> Iterator[tuple[int, int]]:
        yield from self.attention.widths(self.hidden, tp)
        for size in filter(None, (self.shared, self.dense)):
            yield from _feed_forward(self.hidden, size // tp)

    def expert_widths(self, tp: int, ep: int) -> Iterator[tuple[int, int, int]]:
        for n, k in _feed_forward(self.hidden, self.moe // tp):
            yield self.num_experts // ep, n, k


def _feed_forward(hidden: int, size: int) -> Iterator[tuple[int, int]]:
    yield 2 * size, hidden
    yield hidden, size


#: The models whose widths the cost model was fitted to.
MODELS = {
    "DeepSeek-V3": Model(7168, 2048, 256, Mla(128, 1536, 512, 128, 64, 128), 2048, 18432),
    "DeepSeek-V3.2": Model(7168, 2048, 256, Mla(128, 1536, 512, 128, 64, 128, 64), 2048, 18432),
    "Kimi-K2": Model(7168, 2048, 384, Mla(64, 1536, 512, 128, 64, 128), 2048, 18432),
    "GLM-5": Model(6144, 2048, 256, Mla(64, 2048, 512, 192, 64, 256, 32), 2048, 12288),
    "GLM-4.5": Model(5120, 1536, 160, Gqa(96, 8), 1536, 12288),
    "Qwen3-235B": Model(4096, 1536, 128, Gqa(64, 4)),
    "Qwen3-30B": Model(2048, 768, 128, Gqa(32, 4)),
}

#: Models that no table and no constant was ever fitted to. Never fit or tune anything on them.
UNFITTED = {
    "MiniMax-M2": Model(3072, 1536, 256, Gqa(48, 8)),
    "DeepSeek-V4-Flash": Model(4096, 2048, 256, CompressedMla(64, 1024, 512, 1024, 8, 64), 2048),
}


def _served(n: int, k: int) -> bool:
    """Whether block scales fit these widths; Qwen3's expert of 192 columns at TP8 has to be padded."""
    return n % 64 == 0 and k % 128 == 0


def dense_widths(models: Iterable[Model] = MODELS.values()) -> list[tuple[int, int]]:
    """(N, K) of the models' dense projections at TP1 and TP8."""
    found = {width for model in models for tp in (1, 8) for width in model.dense_widths(tp)}
    return sorted(width for width in found if _served(*width))


def expert_widths(
    ranks: Sequence[tuple[int, int]] = (*EXPERT_PARALLEL, *_TENSOR_PARALLEL),
    models: Iterable[Model] = MODELS.values(),
) -> list[tuple[int, int, int]]:
    """(experts of one rank, N, K) of the models at these (TP, EP), if the weights fit."""
    found = {width for model in models for tp, ep in ranks for width in model.expert_widths(tp, ep)}
    return sorted((e, n, k) for e, n, k in found if _served(n, k) and e * n * k <= _MOST_WEIGHTS)


def log_uniform(rng: random.Random, most: int, count: int = _SHAPES_A_CLASS) -> list[int]:
    """`count` numbers from 1 to `most`: one draw from each of `count` equal parts of the logarithm."""
    width = math.log(most) / count
    return [round(math.exp((part + rng.random()) * width)) for part in range(count)]


def _dense() -> list[DenseShape]:
    rng = random.Random(_SEED)
    widths = rng.sample(dense_widths(), _SHAPES_A_CLASS)
    return [DenseShape(m, n, k) for m, (n, k) in zip(log_uniform(rng, MOST_ROWS), widths, strict=True)]


def fits(shape: GroupedShape) -> bool:
    """Whether the rows of all experts stay within the bounds of a class."""
    counts = shape.counts()
    if shape.layout == "masked":
        rows = shape.num_experts * max(MOST_MASKED_ROWS, *counts, 0)
        return rows * (shape.k + 2 * shape.n) <= _MOST_BUFFER
    return aligned_starts(counts)[-1] <= _MOST_ROUTED_ROWS


def _contiguous() -> list[GroupedShape]:
    return list(_grouped(random.Random(_SEED + 1), expert_widths(), CONTIGUOUS_LAYOUTS, MOST_ROWS))


def _masked() -> list[GroupedShape]:
    # Masked buffers come from a low-latency dispatch between expert-parallel ranks.
    pool = expert_widths(EXPERT_PARALLEL)
    return list(_grouped(random.Random(_SEED + 2), pool, ("masked",), MOST_MASKED_ROWS))


def _grouped(
    rng: random.Random, pool: Sequence[tuple[int, int, int]], layouts: Sequence[Layout], most_rows: int
) -> Iterator[GroupedShape]:
    for i, rows in enumerate(log_uniform(rng, most_rows)):
        layout, skew = layouts[i % len(layouts)], SKEWS[i % len(SKEWS)]
        shapes = [GroupedShape(layout, e, rows, n, k, skew) for e, n, k in pool]
        yield rng.choice([shape for shape in shapes if fits(shape)])


def topk_shapes(rng: random.Random) -> list[TopkShape]:
    """20 shapes with 1 to 4096 rows and 4K to 1M columns, both log-uniform, and k from 512 to 4096."""
    return list(islice(_topk(rng), 20))


def _topk(rng: random.Random) -> Iterator[TopkShape]:
    while True:
        rows, columns = round(2 ** rng.uniform(0, 12)), round(2 ** rng.uniform(12, 20))
        k, skew = rng.choice((512, 1024, 2048, 4096)), rng.choice(("full", "causal"))
        if k <= columns and 4 * rows * columns <= MOST_LOGITS // 4:
            yield TopkShape(rows, columns, k, "causal" if skew == "causal" else "full")


DENSE = _dense()
CONTIGUOUS = _contiguous()
MASKED = _masked()
TOPK = topk_shapes(random.Random(_SEED + 3))
