"""Descriptions of one call of an op: what is computed, on which shapes; nothing about how.

A problem is what the planner enumerates and what an op derives from its tensors; both hand it to
`moe_fp8.specs.kernel_spec`. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

GemmLayout = Literal["dense", "m_indices", "psum", "offsets", "masked"]
OutDtype = Literal["bfloat16", "float32"]
InDtype = Literal["bfloat16", "float16", "float32"]

#: Streaming multiprocessors of an H100 SXM and of an H200: what plans assume where no GPU is seen.
DEFAULT_NUM_SMS = 132

#: Rows between segment starts in the `m_indices` and `psum` layouts.
SEGMENT_ALIGNMENT = 128

#: Elements of K that share one activation scale, and edge of a weight's scale block.
SCALE_BLOCK = 128


@dataclass(frozen=True)
class GemmProblem:
    """D[M,N] = A[M,K] @ B[N,K]^T with 1x128 and 128x128 scales; grouped by expert unless dense.

    `m` is the number of rows of `a` (of one expert's buffer for "masked"). `expected_m` is the
    number of valid rows an expert is expected to have; it tunes and never changes results.
    """

    layout: GemmLayout
    m: int
    n: int
    k: int
    num_experts: int = 1
    expected_m: int | None = None
    out_dtype: OutDtype = "bfloat16"
    num_sms: int = DEFAULT_NUM_SMS


@dataclass(frozen=True)
class MqaLogitsProblem:
    """Prefill indexer logits of `num_queries` rows against `num_keys` keys."""

    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    compressed: bool = False
    fill: bool = False
    num_sms: int = DEFAULT_NUM_SMS


@dataclass(frozen=True)
class PagedMqaLogitsProblem:
    """Decode indexer logits of `batch` requests of `next_n` tokens against a paged cache."""

    batch: int
    next_n: int
    num_heads: int
    head_dim: int
    block_size: int
    num_sms: int = DEFAULT_NUM_SMS


@dataclass(frozen=True)
class PagedMqaMetadataProblem:
    """Division of a batch's KV among `num_sms` workers."""

    batch: int
    next_n: int
    num_sms: int = DEFAULT_NUM_SMS


@dataclass(frozen=True)
class QuantizeProblem:
    """1x128 quantisation of `[m, k]` to FP8 with MN-major scales."""

    m: int
    k: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS


Problem: TypeAlias = (
    GemmProblem | MqaLogitsProblem | PagedMqaLogitsProblem | PagedMqaMetadataProblem | QuantizeProblem
)
