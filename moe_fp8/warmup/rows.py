"""The uses of kernels: the kernels that the selector may pick for each op and weight shape, by rows.

The rows are computed exactly, not sampled: `specs.kernel_spec` is a pure function of a problem, and it is
called with every problem that an op can derive from a call of the model. This is possible because
`for_selection` rounds the sizes, so that few distinct problems remain. The planner does not know the GPU of
the server, so it tries each device with a measured table. It assumes nothing else about the selector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moe_fp8.heuristics import GemmConfig
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.heuristics.gemm.tiles import Shares
from moe_fp8.limits import MAX_EXPERTS, MAX_ROUTED_EXPERTS, SCALE_BLOCK
from moe_fp8.problems import (
    SEGMENT_ALIGNMENT,
    GemmLayout,
    GemmProblem,
    GemmSiluMulProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    InDtype,
    KGroupedGemmProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
    selection_extent,
    selection_rows,
)
from moe_fp8.specs import IN_DTYPES, KernelSpec, kernel_spec
from moe_fp8.warmup.engines import Logits
from moe_fp8.warmup.models import Indexer, ModelDescription
from moe_fp8.warmup.options import PlanOptions, every
from moe_fp8.warmup.shapes import GemmShape, experts_per_token, local_experts

Ranges = tuple[tuple[int, int], ...]

#: In a prefill, engines project the cached latents of several requests up together: of 8 whole contexts at
#: least (vLLM), but not of more tokens than this. (SGLang's 131,072 tokens need no other kernel.)
_CONTEXTS, _MOST_PROJECTED = 8, 65536


@dataclass(frozen=True)
class PlanRow:
    """One kernel for one use: the `rows` of this use for which the selector picks `spec` on some device.

    `rows` are inclusive ranges. They count rows of A ("M") for "dense", queries or requests for the indexer,
    tokens for weight gradients, and the mean rows of an expert for grouped layouts (`GemmProblem.rows`). (If
    the number of blocks decides, it chooses among several kernels with the same rows.) `what` names the
    modules that share the shape; `n`, `k` and `num_experts` are None if they do not apply. `devices` are the
    devices on which the selector picks the kernel, if its choice depends on the device; "" stands for any
    device without a measured table.
    """

    op: str
    what: tuple[str, ...]
    layout: str | None
    n: int | None
    k: int | None
    num_experts: int | None
    rows: Ranges
    spec: KernelSpec
    devices: tuple[str, ...] = ()

    @property
    def use(self) -> str:
        """One line of text: op, layout, weights, rows and modules."""
        sizes = " x ".join(str(size) for size in (self.num_experts, self.n, self.k) if size is not None)
        ranges = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in self.rows)
        parts = (self.op, self.layout, sizes, f"rows {ranges}", f"({', '.join(self.what)})")
        return " ".join(part for part in parts if part)

    @property
    def config(self) -> str:
        """A GEMM's tile as text (`GemmConfig`), else the macros of the kernel as `name=value` pairs.

        A kernel without macros has the text "one form".
        """
        values: dict[str, Any] = dict(self.spec.defines)
        if self.layout is None:
            if "IN_DTYPE" in values:
                values["IN_DTYPE"] = next(
                    name for name, code in IN_DTYPES.items() if code == values["IN_DTYPE"]
                )
            return " ".join(f"{name.lower()}={value}" for name, value in values.items()) or "one form"
        shares: Shares = "k" if values["SPLIT_K"] else "operands"
        block_m, block_n, stages = (values[name] for name in ("BLOCK_M", "BLOCK_N", "NUM_STAGES"))
        return str(GemmConfig(block_m, block_n, stages, self.spec.cluster_size, shares))


@dataclass(frozen=True)
class Bounds:
    """The most rows of each kind of buffer on one rank, and the most tokens of one expert."""

    dense: int
    context: int
    contiguous: int
    masked: int
    expert: int

    @classmethod
    def of(cls, model: ModelDescription, options: PlanOptions) -> Bounds:
        own = max(options.max_tokens, options.most_decoded)
        # MLPs that more ranks split than attention get the tokens of all these ranks.
        attention = options.ways("attention")
        dense = own * max(1, *(-(-options.ways(kind) // attention) for kind in ("mlp", "shared")))
        # Every expert's last segment may be padded up to the alignment.
        padding = local_experts(model, options) * (SEGMENT_ALIGNMENT - 1)
        expert = own * options.dp
        contiguous = expert * experts_per_token(model, options) + padding
        masked = options.masked_rows or options.calls.masked_rows(expert, options.most_decoded * options.dp)
        contexts = max(_CONTEXTS, options.max_batch)
        projected = min(contexts * model.max_positions, _MOST_PROJECTED)
        context = max(dense, model.max_positions, projected)
        return cls(dense, context, _round_up(contiguous, SEGMENT_ALIGNMENT), masked, expert)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _runs(limit: int, reduced: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """The runs (first, last) of 1..limit whose numbers `reduced` maps to the same value.

    `reduced` rounds up to the next number that it distinguishes. It may map all larger numbers to the last of
    these: the last run has them all.
    """
    first = 1
    while first <= limit:
        last = reduced(first)
        if last < first or reduced(last + 1) <= last:
            last = limit
        yield first, min(last, limit)
        first = last + 1


def _rows(
    op: str, what: Iterable[str], runs: Iterable[tuple[int, int]],
    problems_at: Callable[[int], Iterable[Problem]], *,
    layout: str | None = None, n: int | None = None, k: int | None = None, num_experts: int | None = None,
) -> Iterator[PlanRow]:  # fmt: skip
    """The rows of one use: the kernels of all `runs` of rows, each with its ranges of rows and devices."""
    names = tuple(dict.fromkeys(what))
    found: dict[KernelSpec, list[tuple[int, int]]] = {}
    devices: dict[KernelSpec, dict[str, None]] = {}
    for first, last in runs:
        for problem in problems_at(first):
            spec = kernel_spec(problem)
            ranges = found.setdefault(spec, [])
            if not ranges or ranges[-1][1] < first - 1:
                ranges.append((first, last))
            else:
                ranges[-1] = (ranges[-1][0], last)
            if isinstance(problem, GemmProblem):
                devices.setdefault(spec, {})[problem.device] = None
    for spec, ranges in found.items():
        found_on = tuple(devices.get(spec, ()))
        yield PlanRow(op, names, layout, n, k, num_experts, tuple(ranges), spec, found_on)


def gemm_rows(shapes: Iterable[GemmShape], bounds: Bounds, options: PlanOptions) -> Iterator[PlanRow]:
    """The rows of the GEMMs; equal shapes give the same problems."""
    merged: dict[tuple[int, int, int | None], list[GemmShape]] = {}
    for shape in shapes:
        merged.setdefault((shape.n, shape.k, shape.num_experts), []).append(shape)
    for (n, k, experts), same in merged.items():
        what = [shape.what for shape in same]
        if experts is None:
            most = bounds.context if any(shape.whole_context for shape in same) else bounds.dense
            uses: list[tuple[str, GemmLayout, int]] = [("gemm_fp8", "dense", most)]
        else:
            contiguous = options.calls.contiguous
            uses = [("grouped_gemm_fp8_contiguous", layout, bounds.contiguous) for layout in contiguous]
            uses.append(("grouped_gemm_fp8_masked", "masked", bounds.masked))
        for op, layout, limit in uses:
            problems_at = _gemm_problems(layout, limit, n, k, experts, options)
            runs = _runs(limit, selection_rows)
            yield from _rows(op, what, runs, problems_at, layout=layout, n=n, k=k, num_experts=experts)


def _gemm_problems(
    layout: GemmLayout, limit: int, n: int, k: int, experts: int | None, options: PlanOptions
) -> Callable[[int], Iterable[GemmProblem]]:
    servers = tuple(
        product(gemm_table.devices(), options.sm_budgets, every(options.batch_invariant), options.out_dtypes)
    )

    # Some layouts tell how many blocks experts fill. Each number belongs to the rows that `GemmProblem.rows`
    # expects of an expert then.
    aligned: dict[int, list[int]] = {}
    for blocks, _ in _runs(-(-limit // SEGMENT_ALIGNMENT), selection_rows):
        problem = GemmProblem(layout, blocks * SEGMENT_ALIGNMENT, n, k, experts or 1)
        if problem.blocks is not None:
            aligned.setdefault(problem.rows, []).append(problem.m)

    def problems_at(rows: int) -> Iterator[GemmProblem]:
        # As expected_m, `rows` takes every number that fits in a buffer. The means of calls without it are
        # among these numbers. (With two experts or more, these calls never have `blocks`.)
        calls = [(rows, None if experts is None else rows)]
        calls += [(m, None) for m in aligned.get(selection_rows(rows), ())]
        for (m, hint), (device, sms, invariant, dtype) in product(calls, servers):
            yield GemmProblem(
                layout, m, n, k, experts or 1, hint, dtype,
                num_sms=sms, device=device, batch_invariant=invariant,
            )  # fmt: skip

    return problems_at


def quantize_rows(
    model: ModelDescription, shapes: Sequence[GemmShape], indexer: Indexer | None, bounds: Bounds,
    options: PlanOptions,
) -> Iterator[PlanRow]:  # fmt: skip
    """The rows of `quantize_fp8`: for the input of each GEMM, and for the indexer's queries."""
    inputs: dict[int, list[str]] = {}
    for shape in shapes:
        inputs.setdefault(shape.k, []).append(shape.what)
    if indexer is not None:
        inputs.setdefault(indexer.head_dim, []).append("indexer.q")
    experts = max((shape.num_experts or 1 for shape in shapes), default=1)
    heads = 1 if indexer is None else indexer.num_heads
    most = max(bounds.contiguous, bounds.masked * experts, bounds.dense * heads, bounds.context)
    for (k, what), power_of_two in product(inputs.items(), (False, True)):

        def quantize(rows: int, k: int = k, power_of_two: bool = power_of_two) -> Iterable[Problem]:
            for sms in options.sm_budgets:
                yield QuantizeProblem(rows, k, model.dtype, power_of_two, sms)

        yield from _rows("quantize_fp8", what, _runs(most, selection_extent), quantize, k=k)


def silu_mul_rows(shapes: Iterable[GemmShape], bounds: Bounds, options: PlanOptions) -> Iterator[PlanRow]:
    """The rows of `silu_mul_quantize`, before each down projection; routed experts also use buffers."""
    uses: dict[tuple[int, int | None], list[str]] = {}
    for shape in shapes:
        if shape.what.endswith(".down"):
            for num_experts in dict.fromkeys((None, shape.num_experts)):
                uses.setdefault((shape.k, num_experts), []).append(shape.what)
    for (k, num_experts), what in uses.items():

        def silu_mul(rows: int, k: int = k, num_experts: int | None = num_experts) -> Iterable[Problem]:
            kinds = product((False, True), (False, True), options.sm_budgets)
            for power_of_two, rounded, sms in kinds:
                yield SiluMulQuantizeProblem(rows, k, num_experts, power_of_two, rounded, sms)

        most = max(bounds.contiguous, bounds.dense) if num_experts is None else bounds.masked
        runs = _runs(most, selection_extent)
        yield from _rows("silu_mul_quantize", what, runs, silu_mul, k=k, num_experts=num_experts)


def gemm_silu_mul_rows(
    shapes: Iterable[GemmShape], bounds: Bounds, options: PlanOptions
) -> Iterator[PlanRow]:
    """The rows of `grouped_gemm_silu_mul_fp8`: the first product of routed experts that SiLU follows."""
    for shape in shapes:
        n, k, experts = shape.n, shape.k, shape.num_experts
        if experts is None or not shape.what.endswith(".gate_up") or n % 256:
            continue

        def problems_at(rows: int, n: int = n, k: int = k, experts: int = experts) -> Iterable[Problem]:
            for power_of_two, rounded, sms in product((False, True), (False, True), options.sm_budgets):
                yield GemmSiluMulProblem(bounds.contiguous, n, k, experts, rows, power_of_two, rounded, sms)

        op, runs = "grouped_gemm_silu_mul_fp8", _runs(bounds.contiguous, selection_rows)
        yield from _rows(op, [shape.what], runs, problems_at, n=n, k=k, num_experts=experts)


def weight_gradient_rows(
    shapes: Iterable[GemmShape], bounds: Bounds, options: PlanOptions
) -> Iterator[PlanRow]:
    """The rows of `k_grouped_gemm_fp8` for the weights of each GEMM; they count an expert's mean tokens.

    `gemm_fp8` with scales of 1 x 128 on both operands has the kernels of one expert, and more for bf16. It
    may be called for each expert on its own, and one expert may get the tokens of all ranks.
    """
    merged: dict[tuple[int, int, int | None], list[str]] = {}
    for shape in shapes:
        merged.setdefault((shape.n, shape.k, shape.num_experts), []).append(shape.what)
    for (n, k, experts), what in merged.items():
        local = experts or 1
        most = bounds.dense if experts is None else max(bounds.expert, -(-bounds.contiguous // local))

        def fp32(mean: int, n: int = n, k: int = k, local: int = local) -> Iterable[Problem]:
            for accumulate, sms in product((False, True), options.sm_budgets):
                yield KGroupedGemmProblem(n, k, mean * local, local, accumulate, sms)

        def bf16(mean: int, n: int = n, k: int = k) -> Iterable[Problem]:
            for sms in options.sm_budgets:
                yield KGroupedGemmProblem(n, k, mean, 1, False, sms, "bfloat16")

        uses: list[tuple[str, Callable[[int], Iterable[Problem]]]] = [("k_grouped_gemm_fp8", fp32)]
        if "bfloat16" in options.out_dtypes:
            uses.append(("gemm_fp8", bf16))
        for op, problems_at in uses:
            runs = _runs(_round_up(most, SCALE_BLOCK), selection_extent)  # whole scale blocks of tokens
            yield from _rows(op, what, runs, problems_at, n=n, k=k, num_experts=experts)


def moe_rows(
    model: ModelDescription, shapes: Iterable[GemmShape], bounds: Bounds, options: PlanOptions
) -> Iterator[PlanRow]:
    """The rows of `moe_permute` and `moe_combine`, around the routed experts of each hidden size."""
    topk = experts_per_token(model, options)
    down = [shape for shape in shapes if shape.num_experts is not None and shape.what.endswith(".down")]
    # Rows that are quantized already come without a dtype, and others in bf16 only.
    in_dtypes: tuple[InDtype | None, ...] = (None, "bfloat16") if model.dtype == "bfloat16" else (None,)
    for hidden in dict.fromkeys(shape.n for shape in down):

        def permute(tokens: int, hidden: int = hidden) -> Iterable[Problem]:
            kinds = product(in_dtypes, (False, True), (False, True), options.sm_budgets)
            for in_dtype, power_of_two, wide_ids, sms in kinds:
                yield MoePermuteProblem(tokens, topk, hidden, in_dtype, power_of_two, wide_ids, sms)

        def combine(tokens: int, hidden: int = hidden) -> Iterable[Problem]:
            for sms in options.sm_budgets:
                yield MoeCombineProblem(tokens, topk, hidden, sms)

        runs = tuple(_runs(bounds.expert, selection_extent))
        yield from _rows("moe_permute", ["experts.gate_up"], runs, permute, k=hidden)
        yield from _rows("moe_combine", ["experts.down"], runs, combine, k=hidden)


def route_rows(model: ModelDescription, bounds: Bounds, options: PlanOptions) -> Iterator[PlanRow]:
    """The rows of `route_topk`, for logits of the model's dtype and in fp32."""
    routers = (linear for linear in model.linears if linear.what == "router")
    for num_experts in dict.fromkeys(router.n[0].units for router in routers):
        if num_experts > MAX_EXPERTS or model.experts_per_token > MAX_ROUTED_EXPERTS:
            continue

        def route(tokens: int, num_experts: int = num_experts) -> Iterable[Problem]:
            for dtype, sms in product(dict.fromkeys((model.dtype, "float32")), options.sm_budgets):
                yield RouteTopkProblem(tokens, num_experts, model.experts_per_token, dtype, sms)

        runs = _runs(bounds.expert, selection_extent)
        yield from _rows("route_topk", ["router"], runs, route, num_experts=num_experts)


def indexer_rows(model: ModelDescription, indexer: Indexer, options: PlanOptions) -> Iterator[PlanRow]:
    """The rows of the indexer's ops: its cache, logits of prefill and decode, schedule and top-k."""
    heads, dim, budgets = indexer.num_heads, indexer.head_dim, options.sm_budgets
    padded = max(heads, options.calls.least_prefill_heads)
    positions = -(-model.max_positions // indexer.compression)
    batches = tuple(_runs(options.max_batch, selection_extent))
    tokens = tuple(_runs(max(options.max_tokens, options.most_decoded), selection_extent))

    if "indexer_quantize_and_cache" in options.calls.further:
        for power_of_two in (False, True):

            def cached(rows: int, power_of_two: bool = power_of_two) -> Iterable[Problem]:
                for sms in budgets:
                    yield IndexerCacheProblem(rows, dim, model.dtype, power_of_two, sms)

            yield from _rows("indexer_quantize_and_cache", ["indexer.k"], tokens, cached)
    for form in options.calls.logits:
        fill = ("fill",) if form.fill else ()

        def prefill(queries: int, form: Logits = form) -> Iterator[MqaLogitsProblem]:
            # One call may have the keys of several requests.
            for keys, _ in _runs(options.max_batch * positions, selection_extent):
                for sms, invariant in product(budgets, every(options.batch_invariant)):
                    yield MqaLogitsProblem(
                        queries, keys, padded, dim, form.compressed, form.fill, sms, form.dtype, invariant
                    )

        what = ("indexer", "compressed" if form.compressed else "full", *fill, form.dtype)
        yield from _rows("mqa_logits_fp8", what, tokens, prefill)
    dtypes = tuple(dict.fromkeys(form.dtype for form in options.calls.logits))
    for dtype in dtypes if "indexer_topk" in options.calls.further else ():

        def chosen(rows: int, dtype: OutDtype = dtype) -> Iterator[IndexerTopkProblem]:
            # Logits of prefill may have the keys of several requests. Those of a decode step may be one page
            # wider than the longest context.
            for columns, _ in _runs(max(2, options.max_batch) * positions, selection_extent):
                for sms in budgets:
                    yield IndexerTopkProblem(rows, columns, dtype, sms)

        yield from _rows("indexer_topk", ["indexer", dtype], tokens, chosen)
    for next_n, page in product(options.tokens_of_requests, options.pages(indexer)):

        def logits(batch: int, next_n: int = next_n, page: int = page) -> Iterable[Problem]:
            for dtype, sms in product(dtypes, budgets):
                yield PagedMqaLogitsProblem(batch, next_n, heads, dim, page, sms, dtype)

        def metadata(batch: int, next_n: int = next_n) -> Iterable[Problem]:
            for sms in budgets:
                yield PagedMqaMetadataProblem(batch, next_n, sms)

        what = ("indexer", f"next_n={next_n}", f"page={page}")
        yield from _rows("paged_mqa_logits_fp8", what, batches, logits)
        yield from _rows("paged_mqa_logits_metadata", what, batches, metadata)
