"""Descriptions of one call of an op: what is computed, on which shapes; nothing about how.

A problem is what the planner enumerates and what an op derives from its tensors; both hand it to
`moe_fp8.specs.kernel_spec`. Sizes that only tune are reduced here, when a problem is made, so that the
planner can try each problem that any call of a model may be, whatever the selector does with its fields.
Standard library only.
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

#: Up to here every number of rows may have a kernel of its own.
_EXACT_ROWS = 1024


def selection_rows(rows: int) -> int:
    """Rows as the choice of a GEMM kernel sees them: exact up to 1024, then rounded up to multiples of 64."""
    return rows if rows <= _EXACT_ROWS else -(-rows // 64) * 64


def selection_extent(size: int) -> int:
    """Other numbers as the choice of a kernel sees them: rounded up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class GemmProblem:
    """D[M,N] = A[M,K] @ B[N,K]^T with 1x128 and 128x128 scales; grouped by expert unless dense.

    Made with `m`, the rows of `a` (of one expert's buffer for "masked"), and `expected_m`, the valid rows
    that an expert is expected to have or None. Both only tune, and are kept as one number: `expected_m`
    is `selection_rows` of the rows that a token tile should cover (1 to m; without a hint the average of
    the experts, for "dense" and "masked" all), and `m` what the call would have if all experts had as many.

    `device` names whose measured table corrects the choice ("" for none). `batch_invariant`: a row's bits
    may depend on neither `m` nor the layout. `config`: the tile that the caller asks for, as text.
    """

    layout: GemmLayout
    m: int
    n: int
    k: int
    num_experts: int = 1
    expected_m: int | None = None
    out_dtype: OutDtype = "bfloat16"
    num_sms: int = DEFAULT_NUM_SMS
    device: str = ""
    batch_invariant: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        # The rows of a contiguous layout are shared out among the experts.
        shares = 1 if self.layout in ("dense", "masked") else max(1, self.num_experts)
        rows = -(-self.m // shares)
        if self.expected_m is not None and self.layout != "dense":
            rows = min(self.expected_m, self.m)
        rows = selection_rows(max(1, rows))
        object.__setattr__(self, "m", rows * shares)
        object.__setattr__(self, "expected_m", rows)


@dataclass(frozen=True)
class MqaLogitsProblem:
    """Prefill indexer logits of `num_queries` rows against `num_keys` keys, each as `selection_extent`.

    `batch_invariant`: a row's bits do not depend on either.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    compressed: bool = False
    fill: bool = False
    num_sms: int = DEFAULT_NUM_SMS
    out_dtype: OutDtype = "float32"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_queries", selection_extent(self.num_queries))
        object.__setattr__(self, "num_keys", selection_extent(self.num_keys))


@dataclass(frozen=True)
class PagedMqaLogitsProblem:
    """Decode indexer logits of `batch` requests of `next_n` tokens against a paged cache."""

    batch: int
    next_n: int
    num_heads: int
    head_dim: int
    block_size: int
    num_sms: int = DEFAULT_NUM_SMS
    out_dtype: OutDtype = "float32"


@dataclass(frozen=True)
class PagedMqaMetadataProblem:
    """Division of a batch's KV among `num_sms` workers."""

    batch: int
    next_n: int
    num_sms: int = DEFAULT_NUM_SMS


@dataclass(frozen=True)
class QuantizeProblem:
    """1x128 quantisation of `[m, k]` to FP8 with MN-major scales; `m` as `selection_extent`."""

    m: int
    k: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "m", selection_extent(self.m))


@dataclass(frozen=True)
class IndexerCacheProblem:
    """Quantisation of index keys into a paged cache, one scale a key; `num_rows` as `selection_extent`."""

    num_rows: int
    head_dim: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", selection_extent(self.num_rows))


@dataclass(frozen=True)
class IndexerTopkProblem:
    """The greatest logits of `num_rows` rows of `num_columns`, each as `selection_extent`."""

    num_rows: int
    num_columns: int
    in_dtype: OutDtype = "float32"
    num_sms: int = DEFAULT_NUM_SMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", selection_extent(self.num_rows))
        object.__setattr__(self, "num_columns", selection_extent(self.num_columns))


Problem: TypeAlias = (
    GemmProblem
    | MqaLogitsProblem
    | PagedMqaLogitsProblem
    | PagedMqaMetadataProblem
    | QuantizeProblem
    | IndexerCacheProblem
    | IndexerTopkProblem
)
