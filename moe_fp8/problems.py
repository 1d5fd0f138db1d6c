"""Problems: each describes one call of an op by its computation and its shapes, but not by its kernel.

The planner enumerates problems, and an op derives its problem from its tensors. Both pass the problem to
`moe_fp8.specs`, which chooses a kernel. A problem holds the exact sizes of the call. The choice uses the
problem's `for_selection()`, which rounds the sizes that only affect speed. Therefore the planner can try
every rounded problem that a call of a model may give, whatever a heuristic does with the fields. This module
needs only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, TypeAlias, TypeVar

GemmLayout = Literal["dense", "m_indices", "psum", "offsets", "masked"]
OutDtype = Literal["bfloat16", "float32"]
InDtype = Literal["bfloat16", "float16", "float32"]

#: Streaming multiprocessors of an H100 SXM and of an H200. Plans assume this number if there is no GPU.
DEFAULT_NUM_SMS = 132

#: Rows between segment starts in the `m_indices` and `psum` layouts.
SEGMENT_ALIGNMENT = 128

#: Half of a block of rows, and the most rows of padding that an expert of a full buffer has, on average.
_HALF_BLOCK, _MOST_PADDING = SEGMENT_ALIGNMENT // 2, SEGMENT_ALIGNMENT * 3 // 4

#: With more blocks an expert, the mean of rows decides. (The number of blocks tells little more then, and
#: planning takes longer with each number that is told apart.)
_MOST_BLOCKS = 8

#: From this number of rows on, the choice of a GEMM kernel no longer changes.
_MOST_ROWS = 32_768


@lru_cache(maxsize=1 << 16)  # planning asks for the same numbers millions of times
def selection_rows(rows: int) -> int:
    """The rows for the choice of a GEMM kernel: at most 1/32 more than there are, and never above 32,768.

    All numbers up to 64 and all multiples of 64 up to 4096 stay as they are, so no tile boundary is lost.
    """
    step = max(1, (1 << max(rows - 1, 0).bit_length() >> 1) // 32)
    return min(-(-rows // step) * step, _MOST_ROWS)


def selection_extent(size: int) -> int:
    """The value that the choice of a kernel uses for other sizes: `size` rounded up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()


_Problem = TypeVar("_Problem", bound="_Rounded")


@dataclass(frozen=True)
class _Rounded:
    """A problem whose choice of a kernel uses the sizes `ROUNDED` only roughly."""

    ROUNDED: ClassVar[tuple[str, ...]]

    def for_selection(self: _Problem) -> _Problem:
        """The problem that the choice of a kernel uses: the sizes `ROUNDED` by `selection_extent`."""
        return replace(self, **{name: selection_extent(getattr(self, name)) for name in self.ROUNDED})


@dataclass(frozen=True)
class GemmProblem:
    """D[M,N] = A[M,K] @ B[N,K]^T with 1x128 and 128x128 scales; grouped by expert unless dense.

    `m`: the rows of `a` (of one expert's buffer for "masked"). `expected_m`: the expected number of valid
    rows of an expert, or None. `m` and `expected_m` only guide the choice of a tile. If `m` tells how many
    blocks experts fill, it counts for more than `expected_m` (see `blocks`).
    `device`: the device whose measured table corrects the choice, or "" for none. `batch_invariant`: a row's
    bits must not depend on `m` or the layout. `config`: the tile that the caller asks for, as text, or None.
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
        """The rows that a token tile should cover, rounded by `selection_rows`; 1 or more.

        If `expected_m` is not used, these are all rows for "dense" and "masked", else the mean per expert. If
        `blocks` is known, the mean leaves out the padding that is to be expected.
        """
        return _gemm_rows(self.layout, self.m, self.num_experts, self.expected_m, self.blocks)

    @property
    def blocks(self) -> int | None:
        """The blocks of 128 rows that experts fill, rounded by `selection_rows`, or None if it is not known.

        Layouts whose segments start at multiples of 128 rows tell this number by `m`, unless there is a
        single expert. `expected_m` counts for more in four cases: experts have at most half a block of rows,
        since blocks tell little of so few rows; they have many blocks; `m` is too small for `expected_m`; or
        it is so large that the buffer probably has room to spare. Then this number is not used.
        """
        return _gemm_blocks(self.layout, self.m, self.num_experts, self.expected_m)

    @property
    def blocks_decide(self) -> bool:
        """Whether the number of blocks decides, and not `rows`."""
        blocks = self.blocks
        return blocks is not None and blocks <= _MOST_BLOCKS * self.num_experts

    def for_selection(self) -> GemmProblem:
        """The problem that the choice of a kernel uses: with `blocks` blocks, or `rows` rows an expert."""
        m, expected_m = gemm_selection(self.layout, self.m, self.num_experts, self.expected_m)
        return GemmProblem(
            self.layout,
            m,
            self.n,
            self.k,
            self.num_experts,
            expected_m,
            self.out_dtype,
            self.num_sms,
            self.device,
            self.batch_invariant,
            self.config,
        )


@lru_cache(maxsize=1 << 16)
def gemm_selection(
    layout: GemmLayout, m: int, num_experts: int, expected_m: int | None
) -> tuple[int, int | None]:
    """`m` and `expected_m` of `GemmProblem.for_selection`, for launches that have no time for the problem."""
    blocks = _gemm_blocks(layout, m, num_experts, expected_m)
    if blocks is not None:
        return blocks * SEGMENT_ALIGNMENT, None
    rows = _gemm_rows(layout, m, num_experts, expected_m, None)
    return rows, rows


def _gemm_blocks(layout: GemmLayout, m: int, num_experts: int, expected_m: int | None) -> int | None:
    if num_experts == 1 or layout not in ("m_indices", "psum"):
        return None
    rows = m + -m % SEGMENT_ALIGNMENT
    blocks = selection_rows(max(1, rows // SEGMENT_ALIGNMENT))
    if expected_m is not None:
        full = 0 <= rows - expected_m * num_experts <= _MOST_PADDING * num_experts
        if not full or expected_m <= _HALF_BLOCK or blocks > _MOST_BLOCKS * num_experts:
            return None
    return blocks


def _gemm_rows(
    layout: GemmLayout, m: int, num_experts: int, expected_m: int | None, blocks: int | None
) -> int:
    if blocks is not None:
        # On average, half of an expert's last block is padding. The mean is taken to be 64 or more, since
        # experts without rows need no tile.
        mean = -(-blocks * SEGMENT_ALIGNMENT // max(1, num_experts))
        rows = max(mean - _HALF_BLOCK, _HALF_BLOCK)
    elif expected_m is not None and layout != "dense":
        rows = min(expected_m, m)
    else:
        # The experts share the rows of a contiguous layout.
        rows = m if layout in ("dense", "masked") else -(-m // max(1, num_experts))
    return selection_rows(max(1, rows))


@dataclass(frozen=True)
class KGroupedGemmProblem:
    """D[e] (+)= A[:, ke] @ B[:, ke]^T for the columns ke of each of `num_experts` experts.

    `m`, `n`: the rows of A and of B; both have 1 x 128 scales. `k`: the columns of all experts together. One
    expert is a dense GEMM. `accumulate`: whether D holds values to which the products are added; only fp32 is
    added to.
    """

    m: int
    n: int
    k: int
    num_experts: int
    accumulate: bool = False
    num_sms: int = DEFAULT_NUM_SMS
    out_dtype: OutDtype = "float32"

    def for_selection(self) -> KGroupedGemmProblem:
        """The problem that the choice of a kernel uses: one expert of the mean columns, all rounded up."""
        mean = selection_extent(-(-self.k // max(1, self.num_experts)))
        m, n = selection_extent(self.m), selection_extent(self.n)
        return replace(self, m=m, n=n, k=mean, num_experts=1)


@dataclass(frozen=True)
class MqaLogitsProblem:
    """Prefill indexer logits of `num_queries` rows against `num_keys` keys.

    `whole_queries`, `whole_keys`: if this is a chunk of a call, the sizes of the whole call, which choose the
    kernel; else 0. `batch_invariant`: a row's bits must not depend on any of these sizes.
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
        """The problem that the choice of a kernel uses: the whole call, rounded by `selection_extent`."""
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

    `num_workers`: workers of the schedule; 0 means `num_sms`.
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
        """The problem that the choice of a kernel uses: `batch` rounded, without a number of workers."""
        return replace(self, batch=selection_extent(self.batch), num_workers=0)


@dataclass(frozen=True)
class PagedMqaMetadataProblem(_Rounded):
    """The schedule of the paged logits of a batch. `num_sms` are the GPU's; the workers choose no kernel."""

    batch: int
    next_n: int
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("batch",)


@dataclass(frozen=True)
class QuantizeProblem(_Rounded):
    """1x128 quantization of `[m, k]` to FP8 with MN-major scales."""

    m: int
    k: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("m",)


@dataclass(frozen=True)
class SiluMulQuantizeProblem(_Rounded):
    """SiLU(gate) * up of `[m, 2k]`, quantized 1x128 to `[m, k]`.

    `num_experts`: the number of buffers of `m` rows, each with its first `masked_m` rows valid; None means
    one buffer with all rows valid. `rounded`: SiLU and the product are rounded to bf16.
    """

    m: int
    k: int
    num_experts: int | None = None
    power_of_two: bool = False
    rounded: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("m",)


@dataclass(frozen=True)
class IndexerCacheProblem(_Rounded):
    """Quantization of index keys into a paged cache, with one scale per key."""

    num_rows: int
    head_dim: int
    in_dtype: InDtype = "bfloat16"
    power_of_two: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("num_rows",)


@dataclass(frozen=True)
class IndexerTopkProblem(_Rounded):
    """Selection of the greatest logits in each of `num_rows` rows of `num_columns` columns."""

    num_rows: int
    num_columns: int
    in_dtype: OutDtype = "float32"
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("num_rows", "num_columns")


@dataclass(frozen=True)
class GemmSiluMulProblem:
    """SiLU(gate) * up, quantized, of the product of `m` rows and their experts' interleaved `[n, k]` weights.

    `expected_m`: the expected rows of an expert, or None for the mean.
    """

    m: int
    n: int
    k: int
    num_experts: int
    expected_m: int | None = None
    power_of_two: bool = False
    rounded: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    @property
    def rows(self) -> int:
        """The rows of an expert that a tile should cover, rounded by `selection_rows`; 1 or more."""
        rows = -(-self.m // self.num_experts) if self.expected_m is None else min(self.expected_m, self.m)
        return selection_rows(max(1, rows))

    def for_selection(self) -> GemmSiluMulProblem:
        """The problem that the choice of a kernel uses: every expert has `rows` rows."""
        return replace(self, m=self.rows * self.num_experts, expected_m=self.rows)


@dataclass(frozen=True)
class MoePermuteProblem(_Rounded):
    """Copies of `num_tokens` rows of `k` values to the experts that each of them goes to.

    `in_dtype` None means FP8 input with scales; otherwise the input is quantized. `wide_ids`: int64 ids.
    """

    num_tokens: int
    topk: int
    k: int
    in_dtype: InDtype | None = "bfloat16"
    power_of_two: bool = False
    wide_ids: bool = False
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("num_tokens",)


@dataclass(frozen=True)
class MoeCombineProblem(_Rounded):
    """The weighted sums of `topk` rows of `n` values for each of `num_tokens` tokens."""

    num_tokens: int
    topk: int
    n: int
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("num_tokens",)


@dataclass(frozen=True)
class RouteTopkProblem(_Rounded):
    """The choice of `topk` of `num_experts` experts for each of `num_tokens` tokens."""

    num_tokens: int
    num_experts: int
    topk: int
    in_dtype: InDtype = "bfloat16"
    num_sms: int = DEFAULT_NUM_SMS

    ROUNDED = ("num_tokens",)


Problem: TypeAlias = (
    GemmProblem
    | KGroupedGemmProblem
    | MqaLogitsProblem
    | PagedMqaLogitsProblem
    | PagedMqaMetadataProblem
    | QuantizeProblem
    | SiluMulQuantizeProblem
    | IndexerCacheProblem
    | IndexerTopkProblem
    | GemmSiluMulProblem
    | MoePermuteProblem
    | MoeCombineProblem
    | RouteTopkProblem
)
