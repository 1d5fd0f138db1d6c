"""Descriptions of one call of an op: what is computed, on which shapes; nothing about how.

A problem is what the planner enumerates and what an op derives from its tensors; both hand it to
`moe_fp8.specs`. It holds what it was given. The choice of a kernel sees it `for_selection`, where sizes that
only tune are rounded, so that the planner can try each problem that any call of a model may be, whatever a
heuristic does with its fields. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

#: Heads that an indexer may have, and keys of a page of its cache.
INDEXER_HEADS = (8, 16, 32, 64)
PAGE_SIZES = (32, 64, 128)

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

    `m`: the rows of `a` (of one expert's buffer for "masked"). `expected_m`: the valid rows that an expert is
    expected to have, or None. Both only tune.
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

    @property
    def rows(self) -> int:
        """The rows that a token tile should cover, by `selection_rows`; 1 or more.

        Without a hint these are all rows for "dense" and "masked", else the average of the experts.
        """
        rows = -(-self.m // self._shares)
        if self.expected_m is not None and self.layout != "dense":
            rows = min(self.expected_m, self.m)
        return selection_rows(max(1, rows))

    @property
    def _shares(self) -> int:
        # The rows of a contiguous layout are shared out among the experts.
        return 1 if self.layout in ("dense", "masked") else max(1, self.num_experts)

    def for_selection(self) -> GemmProblem:
        """The problem as the choice of a kernel sees it: as if every expert had `rows` rows."""
        rows = self.rows
        return GemmProblem(
            self.layout,
            rows * self._shares,
            self.n,
            self.k,
            self.num_experts,
            rows,
            self.out_dtype,
            self.num_sms,
            self.device,
            self.batch_invariant,
            self.config,
        )


@dataclass(frozen=True)
class MqaLogitsProblem:
    """Prefill indexer logits of `num_queries` rows against `num_keys` keys.

    `whole_queries`, `whole_keys`: sizes of the call that this is a chunk of, whose kernel it gets; 0 where it
    is no chunk. `batch_invariant`: a row's bits do not depend on any of these.
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
    whole_queries: int = 0
    whole_keys: int = 0

    def for_selection(self) -> MqaLogitsProblem:
        """The problem as the choice of a kernel sees it: the whole, its sizes as `selection_extent`."""
        return replace(
            self,
            num_queries=selection_extent(self.whole_queries or self.num_queries),
            num_keys=selection_extent(self.whole_keys or self.num_keys),
            whole_queries=0,
            whole_keys=0,
        )


@dataclass(frozen=True)
class PagedMqaLogitsProblem:
    """Decode indexer logits of `batch` requests of `next_n` tokens against a paged cache.

    `num_workers`: workers of the schedule; 0 for as many as there are SMs.
    """

    batch: int
    next_n: int
    num_heads: int
    head_dim: int
    block_size: int
    num_sms: int = DEFAULT_NUM_SMS
    out_dtype: OutDtype = "float32"
    num_workers: int = 0

    def for_selection(self) -> PagedMqaLogitsProblem:
        """The problem as the choice of a kernel sees it: whatever the number of workers."""
        return self if self.num_workers == 0 else replace(self, num_workers=0)


@dataclass(frozen=True)
class PagedMqaMetadataProblem:
    """Division of a batch's KV among `num_sms` workers."""

    batch: int
    next_n: int
    num_sms: int = DEFAULT_NUM_SMS

    def for_selection(self) -> PagedMqaMetadataProblem:
        """The problem as the choice of a kernel sees it: all of it."""
        return self


@dataclass(frozen=True)
class QuantizeProblem:
    """1x128 quantization of `[m, k]` to FP8 with MN-major scales."""

    m: int
    k: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    def for_selection(self) -> QuantizeProblem:
        """The problem as the choice of a kernel sees it: `m` as `selection_extent`."""
        return replace(self, m=selection_extent(self.m))


@dataclass(frozen=True)
class SiluMulQuantizeProblem:
    """SiLU(gate) * up of `[m, 2k]`, quantized 1x128 to `[m, k]`.

    `num_experts`: buffers of `m` rows each, of which the first `masked_m` count; None where there is one and
    all its rows do.
    """

    m: int
    k: int
    num_experts: int | None = None
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    def for_selection(self) -> SiluMulQuantizeProblem:
        """The problem as the choice of a kernel sees it: `m` as `selection_extent`."""
        return replace(self, m=selection_extent(self.m))


@dataclass(frozen=True)
class IndexerCacheProblem:
    """Quantization of index keys into a paged cache, one scale a key."""

    num_rows: int
    head_dim: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    def for_selection(self) -> IndexerCacheProblem:
        """The problem as the choice of a kernel sees it: `num_rows` as `selection_extent`."""
        return replace(self, num_rows=selection_extent(self.num_rows))


@dataclass(frozen=True)
class IndexerTopkProblem:
    """The greatest logits of `num_rows` rows of `num_columns`."""

    num_rows: int
    num_columns: int
    in_dtype: OutDtype = "float32"
    num_sms: int = DEFAULT_NUM_SMS

    def for_selection(self) -> IndexerTopkProblem:
        """The problem as the choice of a kernel sees it: sizes as `selection_extent`."""
        return replace(
            self,
            num_rows=selection_extent(self.num_rows),
            num_columns=selection_extent(self.num_columns),
        )


Problem: TypeAlias = (
    GemmProblem
    | MqaLogitsProblem
    | PagedMqaLogitsProblem
    | PagedMqaMetadataProblem
    | QuantizeProblem
    | SiluMulQuantizeProblem
    | IndexerCacheProblem
    | IndexerTopkProblem
)
