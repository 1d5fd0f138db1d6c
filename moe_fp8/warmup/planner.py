"""Computes every kernel that a model can launch, with the selector that the ops use.

The plan is computed exactly, not sampled: `specs.kernel_spec` is a pure function of a problem, and the
planner calls it with every problem that an op can derive from a call of the model. This is possible because
`for_selection` rounds the sizes, so that few distinct problems remain. The planner does not know the GPU of
the server, so it tries each device with a measured table. It assumes nothing else about the selector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import GemmConfig
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.heuristics.gemm.tiles import Shares
from moe_fp8.jit.key import kernel_key
from moe_fp8.problems import (
    DEFAULT_NUM_SMS,
    SEGMENT_ALIGNMENT,
    GemmLayout,
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    SiluMulQuantizeProblem,
    selection_extent,
    selection_rows,
)
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup.model import ModelDescription
from moe_fp8.warmup.shapes import GemmShape, Parallelism, gemm_shapes, local_experts

_CONTIGUOUS: tuple[GemmLayout, ...] = ("m_indices", "psum", "offsets")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlanOptions:
    """The limits of a server's calls, which use bf16 outputs and activations of the model's dtype.

    `max_tokens`: tokens of one forward pass. `max_batch`: requests decoded together, each with 1 to
    `next_n` tokens. `num_sms`: the number of SMs that the ops will use. `block_size`: tokens of a page of
    the indexer's cache. `masked_rows`: the most rows of an expert's buffer in the masked layout; by default
    enough for `max_batch` and `next_n`, rounded up to a multiple of 128. `pad_intermediate`: see
    `gemm_shapes`. `batch_invariant`: whether the server runs with MOE_FP8_BATCH_INVARIANT on; the default is
    this process's setting.
    """

    tp: int = 1
    ep: int = 1
    max_tokens: int = 16384
    max_batch: int = 256
    next_n: int = 1
    num_sms: int = DEFAULT_NUM_SMS
    block_size: int = 64
    masked_rows: int | None = None
    pad_intermediate: bool = False
    batch_invariant: bool = field(default_factory=lambda: settings().batch_invariant)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_batch", "next_n", "num_sms", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "an integer >= 1", getattr(self, name))
        if self.masked_rows is not None and self.masked_rows < 1:
            raise ConfigError("masked_rows", "an integer >= 1", self.masked_rows)


@dataclass(frozen=True)
class PlanRow:
    """One kernel for one use: the `rows` of this use for which the selector picks `spec` on some device.

    `rows` are inclusive ranges. They count rows of A ("M") for "dense", queries or requests for the
    indexer, and the expected rows of an expert for grouped layouts. `what` names the modules that share the
    shape; `n`, `k` and `num_experts` are None if they do not apply.
    """

    op: str
    what: tuple[str, ...]
    layout: str | None
    n: int | None
    k: int | None
    num_experts: int | None
    rows: Ranges
    spec: KernelSpec

    @property
    def use(self) -> str:
        """One line of text: op, layout, weights, rows and modules."""
        sizes = " x ".join(str(size) for size in (self.num_experts, self.n, self.k) if size is not None)
        ranges = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in self.rows)
        parts = (self.op, self.layout, sizes, f"rows {ranges}", f"({', '.join(self.what)})")
        return " ".join(part for part in parts if part)

    @property
    def config(self) -> str:
        """A GEMM's tile as text (`GemmConfig`), else the macros of the kernel as `name=value` pairs."""
        values = dict(self.spec.defines)
        if self.layout is None:
            return " ".join(f"{name.lower()}={value}" for name, value in values.items())
        shares: Shares = "k" if values["SPLIT_K"] else "operands"
        block_m, block_n, stages = (values[name] for name in ("BLOCK_M", "BLOCK_N", "NUM_STAGES"))
        return str(GemmConfig(block_m, block_n, stages, self.spec.cluster_size, shares))


@dataclass(frozen=True)
class Plan:
    """The kernels of a model: `rows` by use, and `specs`, the distinct kernels in order of first use."""

    model: ModelDescription
    options: PlanOptions
    rows: tuple[PlanRow, ...]
    specs: tuple[KernelSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(dict.fromkeys(row.spec for row in self.rows)))

    def __contains__(self, spec: object) -> bool:
        return spec in self.specs

    def keys(self) -> dict[KernelSpec, str]:
        """The content key of each kernel with this machine's NVRTC; raises ToolchainError if it has none."""
        return {spec: kernel_key(spec) for spec in self.specs}

    def to_dict(
        self, keys: Mapping[KernelSpec, str] | None = None, cached: Collection[KernelSpec] | None = None
    ) -> dict[str, Any]:
        """The plan as JSON types, with each kernel's key from `keys` and whether `cached` contains it."""
        numbers = {spec: number for number, spec in enumerate(self.specs)}
        return {
            "model": asdict(self.model),
            "options": asdict(self.options),
            "kernels": [
                {
                    "name": spec.name,
                    "defines": dict(spec.defines),
                    "num_threads": spec.num_threads,
                    "smem_bytes": spec.smem_bytes,
                    "cluster_size": spec.cluster_size,
                    "key": None if keys is None else keys[spec],
                    "cached": None if cached is None else spec in cached,
                }
                for spec in self.specs
            ],
            "rows": [
                {
                    "op": row.op,
                    "what": list(row.what),
                    "layout": row.layout,
                    "n": row.n,
                    "k": row.k,
                    "num_experts": row.num_experts,
                    "rows": [list(pair) for pair in row.rows],
                    "config": row.config,
                    "kernel": numbers[row.spec],
                    "key": None if keys is None else keys[row.spec],
                    "cached": None if cached is None else row.spec in cached,
                }
                for row in self.rows
            ],
        }


def plan(
    model: ModelDescription, options: PlanOptions | None = None, *, extra: Sequence[GemmShape] = ()
) -> Plan:
    """Plan one rank of `model`; `extra` are further GEMMs of the caller that the config does not define.

    Needs no GPU, no torch and no compiler. Raises ConfigError if the parallelism does not fit the model.
    """
    options = options or PlanOptions()
    parallelism = Parallelism(options.tp, options.ep)
    shapes = (*gemm_shapes(model, parallelism, pad_intermediate=options.pad_intermediate), *extra)
    bounds = _Bounds.of(model, options, parallelism)
    rows = [*_gemm_rows(shapes, bounds, options), *_quantize_rows(model, shapes, bounds, options)]
    rows += [*_silu_mul_rows(shapes, bounds, options), *_indexer_rows(model, options)]
    return Plan(model, options, tuple(rows))


@dataclass(frozen=True)
class _Bounds:
    """The most rows of each kind of buffer on one rank."""

    dense: int
    context: int
    contiguous: int
    masked: int

    @classmethod
    def of(cls, model: ModelDescription, options: PlanOptions, parallelism: Parallelism) -> _Bounds:
        decode = options.max_batch * options.next_n
        dense = max(options.max_tokens, decode)
        # Every expert's last segment may be padded up to the alignment.
        padding = local_experts(model, parallelism) * (SEGMENT_ALIGNMENT - 1)
        contiguous = dense * parallelism.dp * model.experts_per_token + padding
        masked = options.masked_rows or _round_up(decode * parallelism.dp, SEGMENT_ALIGNMENT)
        context = max(dense, model.max_positions)
        return cls(dense, context, _round_up(contiguous, SEGMENT_ALIGNMENT), masked)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _runs(limit: int, reduced: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """The runs (first, last) of 1..limit whose numbers `reduced` maps to the same value.

    `reduced` rounds up, or to the most that it distinguishes: then the last run has all larger numbers.
    """
    first = 1
    while first <= limit:
        last = reduced(first)
        if last < first or reduced(last + 1) <= last:
            last = limit
        yield first, min(last, limit)
        first = last + 1


def _sweep(
    runs: Iterable[tuple[int, int]], problems_at: Callable[[int], Iterable[Problem]]
) -> Iterator[tuple[KernelSpec, Ranges]]:
    """The kernels of all `runs` of rows, each with its ranges of rows."""
    found: dict[KernelSpec, list[tuple[int, int]]] = {}
    for first, last in runs:
        for spec in {kernel_spec(problem): None for problem in problems_at(first)}:
            ranges = found.setdefault(spec, [])
            if ranges and ranges[-1][1] + 1 == first:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
    for spec, ranges in found.items():
        yield spec, tuple(ranges)


def _merge_shapes(shapes: Iterable[GemmShape]) -> dict[tuple[int, int, int | None], list[GemmShape]]:
    """Group the shapes by (N, K, experts), because equal shapes give the same problem."""
    merged: dict[tuple[int, int, int | None], list[GemmShape]] = {}
    for shape in shapes:
        merged.setdefault((shape.n, shape.k, shape.num_experts), []).append(shape)
    return merged


def _gemm_rows(shapes: Iterable[GemmShape], bounds: _Bounds, options: PlanOptions) -> Iterator[PlanRow]:
    for (n, k, experts), same in _merge_shapes(shapes).items():
        what = tuple(dict.fromkeys(shape.what for shape in same))
        if experts is None:
            most = bounds.context if any(shape.whole_context for shape in same) else bounds.dense
            uses: list[tuple[str, GemmLayout, int]] = [("gemm_fp8", "dense", most)]
        else:
            uses = [("grouped_gemm_fp8_contiguous", layout, bounds.contiguous) for layout in _CONTIGUOUS]
            uses.append(("grouped_gemm_fp8_masked", "masked", bounds.masked))
        for op, layout, limit in uses:
            problems_at = _gemm_problems(layout, limit, n, k, experts, options)
            for spec, ranges in _sweep(_runs(limit, selection_rows), problems_at):
                yield PlanRow(op, what, layout, n, k, experts, ranges, spec)


def _gemm_problems(
    layout: GemmLayout, limit: int, n: int, k: int, experts: int | None, options: PlanOptions
) -> Callable[[int], Iterable[GemmProblem]]:
    devices = gemm_table.devices()

    def problems_at(rows: int) -> Iterator[GemmProblem]:
        # As expected_m, `rows` takes every number that fits in a buffer. Without expected_m, the op's mean
        # rows per expert are among these numbers.
        m, hint = (rows, None) if experts is None else (limit, rows)
        for device in devices:
            yield GemmProblem(
                layout,
                m,
                n,
                k,
                experts or 1,
                hint,
                num_sms=options.num_sms,
                device=device,
                batch_invariant=options.batch_invariant,
            )

    return problems_at


def _quantize_rows(
    model: ModelDescription, shapes: Iterable[GemmShape], bounds: _Bounds, options: PlanOptions
) -> Iterator[PlanRow]:
    """The rows of `quantize_fp8`: for the input of each GEMM, and for the indexer's queries."""
    inputs: dict[int, list[str]] = {}
    for shape in shapes:
        inputs.setdefault(shape.k, []).append(shape.what)
    if model.indexer is not None:
        inputs.setdefault(model.indexer.head_dim, []).append("indexer.q")
    experts = max((shape.num_experts or 1 for shape in shapes), default=1)
    heads = 1 if model.indexer is None else model.indexer.num_heads
    most = max(bounds.contiguous, bounds.masked * experts, bounds.dense * heads, bounds.context)
    for (k, what), power_of_two in product(inputs.items(), (False, True)):

        def quantize(rows: int, k: int = k, power_of_two: bool = power_of_two) -> Iterable[Problem]:
            return (QuantizeProblem(rows, k, model.dtype, power_of_two, options.num_sms),)

        for spec, ranges in _sweep(_runs(most, selection_extent), quantize):
            yield PlanRow("quantize_fp8", tuple(dict.fromkeys(what)), None, None, k, None, ranges, spec)


def _silu_mul_rows(shapes: Iterable[GemmShape], bounds: _Bounds, options: PlanOptions) -> Iterator[PlanRow]:
    """The rows of `silu_mul_quantize`, before each down projection; routed experts also use buffers."""
    uses: dict[tuple[int, int | None], list[str]] = {}
    for shape in shapes:
        if shape.what.endswith(".down"):
            for num_experts in dict.fromkeys((None, shape.num_experts)):
                uses.setdefault((shape.k, num_experts), []).append(shape.what)
    for ((k, num_experts), what), power_of_two in product(uses.items(), (False, True)):

        def silu_mul(
            rows: int, k: int = k, num_experts: int | None = num_experts, power_of_two: bool = power_of_two
        ) -> Iterable[Problem]:
            return (SiluMulQuantizeProblem(rows, k, num_experts, power_of_two, options.num_sms),)

        most = max(bounds.contiguous, bounds.dense) if num_experts is None else bounds.masked
        names = tuple(dict.fromkeys(what))
        for spec, ranges in _sweep(_runs(most, selection_extent), silu_mul):
            yield PlanRow("silu_mul_quantize", names, None, None, k, num_experts, ranges, spec)


#: The dtypes that logits may have.
_LOGITS: tuple[OutDtype, ...] = ("float32", "bfloat16")


def _indexer_rows(model: ModelDescription, options: PlanOptions) -> Iterator[PlanRow]:
    indexer = model.indexer
    if indexer is None:
        return
    heads, dim, sms = indexer.num_heads, indexer.head_dim, options.num_sms
    most_queries = max(options.max_tokens, options.max_batch * options.next_n)
    for power_of_two in (False, True):

        def cached(rows: int, power_of_two: bool = power_of_two) -> Iterable[Problem]:
            return (IndexerCacheProblem(rows, dim, model.dtype, power_of_two, sms),)

        for spec, ranges in _sweep(_runs(most_queries, selection_extent), cached):
            yield PlanRow("indexer_quantize_and_cache", ("indexer.k",), None, None, None, None, ranges, spec)
    for compressed, fill, dtype in product((False, True), (False, True), _LOGITS):
        what = ("indexer", "compressed" if compressed else "full", *(("fill",) if fill else ()), dtype)

        def prefill(
            queries: int, compressed: bool = compressed, fill: bool = fill, dtype: OutDtype = dtype
        ) -> Iterator[MqaLogitsProblem]:
            # One call may have the keys of several requests.
            for keys, _ in _runs(options.max_batch * model.max_positions, selection_extent):
                yield MqaLogitsProblem(
                    queries, keys, heads, dim, compressed, fill, sms, dtype, options.batch_invariant
                )

        for spec, ranges in _sweep(_runs(most_queries, selection_extent), prefill):
            yield PlanRow("mqa_logits_fp8", what, None, None, None, None, ranges, spec)
    for dtype in _LOGITS:

        def chosen(rows: int, dtype: OutDtype = dtype) -> Iterator[IndexerTopkProblem]:
            # A decode step's logits may be one page wider than the longest context.
            for columns, _ in _runs(2 * model.max_positions, selection_extent):
                yield IndexerTopkProblem(rows, columns, dtype, sms)

        for spec, ranges in _sweep(_runs(most_queries, selection_extent), chosen):
            yield PlanRow("indexer_topk", ("indexer", dtype), None, None, None, None, ranges, spec)
    for next_n in range(1, options.next_n + 1):
        what = ("indexer", f"next_n={next_n}", f"page={options.block_size}")

        def logits(batch: int, next_n: int = next_n) -> Iterable[Problem]:
            return (
                PagedMqaLogitsProblem(batch, next_n, heads, dim, options.block_size, sms, dtype)
                for dtype in _LOGITS
            )

        def metadata(batch: int, next_n: int = next_n) -> Iterable[Problem]:
            return (PagedMqaMetadataProblem(batch, next_n, sms),)

        for op, problems_at in (("paged_mqa_logits_fp8", logits), ("paged_mqa_logits_metadata", metadata)):
            every_batch = ((batch, batch) for batch in range(1, options.max_batch + 1))
            for spec, ranges in _sweep(every_batch, problems_at):
                yield PlanRow(op, what, None, None, None, None, ranges, spec)
