"""Plans and builds as tables for a terminal of 100 columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moe_fp8.jit.build import BuildReport
from moe_fp8.specs import GEMM_LAYOUTS, IN_DTYPES, K_OFFSETS, KernelSpec
from moe_fp8.warmup.planner import Plan
from moe_fp8.warmup.rows import Ranges

#: The width of output, in columns, if stdout is no terminal.
PLAIN_WIDTH = 100

#: The number of a key's digits that tables show; they are enough to distinguish kernels.
KEY_DIGITS = 12

_LAYOUT_NAMES = {code: name for name, code in GEMM_LAYOUTS.items()} | {K_OFFSETS: "k_offsets"}
_DTYPE_NAMES = {code: name for name, code in IN_DTYPES.items()}


def console() -> Console:
    """Standard output, as wide as its terminal, or `PLAIN_WIDTH` if stdout is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def plan_table(
    plan: Plan, keys: Mapping[KernelSpec, str] | None, cached: Collection[KernelSpec] | None
) -> Group:
    """A table for each kernel source, with one line for each distinct kernel and its rows."""
    options = plan.options
    heading = (
        f"{plan.model.name}: {len(plan.specs)} kernels for tp={options.tp} ep={options.ep} "
        f"max_tokens={options.max_tokens} max_batch={options.max_batch} next_n={_values(options.next_n)} "
        f"num_sms={_values(options.num_sms)}"
    )
    served: dict[KernelSpec, list[tuple[int, int]]] = {}
    for row in plan.rows:
        served.setdefault(row.spec, []).extend(row.rows)

    def cells(spec: KernelSpec) -> tuple[str, ...]:
        return _span(served[spec]), *state(spec, keys, cached)

    tables = _kernel_tables(heading, plan.specs, ("rows", "key", "cached"), cells)
    return Group(tables, *_unplanned(plan))


def _values(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _unplanned(plan: Plan) -> list[RenderableType]:
    """The layers that the plan leaves to other kernels, with the reasons."""
    if not plan.unplanned:
        return []
    table = table_of("\nnot planned")
    for name, justify in (("layer", "left"), ("N x K", "right"), ("reason", "left")):
        table.add_column(name, justify=cast(JustifyMethod, justify), overflow="fold")
    for layer in plan.unplanned:
        sizes = (layer.num_experts, layer.n, layer.k)
        shown = " x ".join(str(size) for size in sizes if size is not None)
        table.add_row(layer.what, shown, layer.reason)
    return [table]


def state(
    spec: KernelSpec, keys: Mapping[KernelSpec, str] | None, cached: Collection[KernelSpec] | None
) -> tuple[str, str]:
    """A kernel's shortened key, and "yes" or "no" for whether it is built; "-" stands for unknown."""
    key = "-" if keys is None else keys[spec][:KEY_DIGITS]
    return key, "-" if cached is None else ("yes" if spec in cached else "no")


def rows_table(
    plan: Plan, keys: Mapping[KernelSpec, str] | None, cached: Collection[KernelSpec] | None
) -> Group:
    """A table for each op and layout, with one line for each weight shape and kernel."""
    heading = (
        f"\n{plan.model.name}: {len(plan.rows)} uses\n"
        f"rows: {_MEANINGS['rows']}\non: devices whose tables pick the kernel; other: all other devices"
    )
    parts: list[RenderableType] = [Text(heading)]
    for op, layout in dict.fromkeys((row.op, row.layout) for row in plan.rows):
        rows = [row for row in plan.rows if (row.op, row.layout) == (op, layout)]
        table = table_of(f"\n{op}, {layout}" if op == "grouped_gemm_fp8_contiguous" else f"\n{op}")
        sized = any(row.k is not None for row in rows)
        if sized:
            table.add_column("experts x N x K", justify="right", no_wrap=True)
        by_device = any(row.devices for row in rows)
        table.add_column("rows", justify="right", overflow="fold")
        if by_device:
            table.add_column("on", overflow="fold")
        table.add_column("config", overflow="fold")
        table.add_column("key", no_wrap=True)
        table.add_column("cached", no_wrap=True)
        table.add_column("for", overflow="fold")
        for row in rows:
            sizes = " x ".join(str(size) for size in (row.num_experts, row.n, row.k) if size is not None)
            ranges = ", ".join(_range(*pair) for pair in row.rows)
            devices = (" ".join(device or "other" for device in row.devices),) if by_device else ()
            cells = (ranges, *devices, row.config, *state(row.spec, keys, cached), ", ".join(row.what))
            table.add_row(*((sizes,) if sized else ()), *cells)
        parts.append(table)
    return Group(*parts)


def build_table(report: BuildReport) -> Group:
    """A table for each kernel source, with one line for each kernel of the build and its ptxas report."""
    rows = {row.spec: row for row in report.rows}

    def cells(spec: KernelSpec) -> tuple[str, ...]:
        row = rows[spec]
        time = "cached" if row.cached else f"{row.seconds:.2f} s"
        numbers = (row.registers, row.spill_bytes, row.local_bytes)
        return (*map(str, numbers), time, row.key[:KEY_DIGITS])

    heading = f"{report.compiled} compiled, {report.cached} already there, {report.seconds:.1f} s"
    return _kernel_tables(heading, rows, ("regs", "spill bytes", "local bytes", "time", "key"), cells)


#: The meanings of the columns of kernels.
_MEANINGS = {
    "layout": "where the rows of each expert are, or its columns",
    "block m": "rows of A in a tile",
    "block n": "rows of B (weights) in a tile",
    "block q": "query tokens in a tile",
    "num stages": "blocks of K, or of keys, that are on their way at once",
    "split k": "1: the blocks of a cluster share K, else the operands",
    "out fp32": "1: fp32 output, else bf16",
    "out bf16": "1: bf16 logits, else fp32",
    "in dtype": "what the kernel reads",
    "power of two": "1: scales are powers of two",
    "masked": "1: rows of each expert in a buffer of its own",
    "terms": "1: the kernel for many pairs of query and key",
    "compressed": "1: column 0 of a row is its first key",
    "fill": "1: -inf outside of a row's keys",
    "page size": "keys of a page",
    "cluster size": "blocks of a cluster",
    "threads": "threads of a block",
    "rows": "rows of A if dense, mean rows of an expert if grouped, else queries, requests or tokens",
    "regs": "registers of a thread",
    "spill bytes": "registers in memory, for each thread",
    "local bytes": "local memory of each thread",
    "key": f"the first {KEY_DIGITS} digits of the kernel's key",
    "cached": "whether the kernel is built",
    "time": "of compiling",
}


def _kernel_tables(
    heading: str,
    specs: Collection[KernelSpec],
    columns: tuple[str, ...],
    cells: Callable[[KernelSpec], tuple[str, ...]],
) -> Group:
    """A table for each name in `specs`: macros that differ among its kernels, then `cells` in `columns`."""
    parts: list[RenderableType] = []
    used: dict[str, None] = {}
    for name in dict.fromkeys(spec.name for spec in specs):
        facts = {spec: _facts(spec) for spec in specs if spec.name == name}
        names = list(dict.fromkeys(fact for values in facts.values() for fact in values))
        if len(facts) > 1:
            names = [fact for fact in names if len({values.get(fact) for values in facts.values()}) > 1]
        table = table_of(f"\n{name}")
        # A space instead of an underscore lets a name wrap.
        for column in (*(fact.replace("_", " ") for fact in names), *columns):
            used[column] = None
            is_text = column in ("layout", "in dtype", "rows", "key", "cached")
            # Folding keeps a value whole if its column is too narrow.
            justify: JustifyMethod = "left" if is_text else "right"
            table.add_column(column, justify=justify, no_wrap=is_text, overflow="fold")
        for spec, values in facts.items():
            table.add_row(*(values.get(fact, "") for fact in names), *cells(spec))
        parts.append(table)
    meanings = "; ".join(f"{column}: {_MEANINGS[column]}" for column in used if column in _MEANINGS)
    return Group(Text(heading), *parts, Text(f"\n{meanings}"))


def table_of(title: str) -> Table:
    """An empty table, to which the caller adds columns."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _facts(spec: KernelSpec) -> dict[str, str]:
    """The macros and cluster size that distinguish `spec` from others of its name; a layout as its name."""
    values = dict(spec.defines)
    facts = {}
    if "LAYOUT" in values:
        facts["layout"] = _LAYOUT_NAMES[values.pop("LAYOUT")]
    if "IN_DTYPE" in values:
        facts["in_dtype"] = _DTYPE_NAMES[values.pop("IN_DTYPE")]
    facts |= {name.lower(): str(value) for name, value in values.items()}
    return {**facts, "cluster_size": str(spec.cluster_size), "threads": str(spec.num_threads)}


def _span(ranges: Iterable[tuple[int, int]] | Ranges) -> str:
    firsts, lasts = zip(*ranges, strict=True)
    return _range(min(firsts), max(lasts))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
