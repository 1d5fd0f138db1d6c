"""Plans and builds as tables for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from moe_fp8.jit.build import BuildReport
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.planner import Plan, PlanRow, Ranges

#: Columns where stdout is no terminal: a log should not wrap at 80.
_PLAIN_WIDTH = 160


def console() -> Console:
    """Standard output, wide enough for the tables where it goes to a file."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def plan_table(plan: Plan, keys: Mapping[KernelSpec, str] | None) -> Table:
    """One line for each distinct kernel: what it is, and what it serves."""
    options = plan.options
    table = Table(
        title=f"{plan.model.name}: {len(plan.specs)} kernels for tp={options.tp} ep={options.ep} "
        f"max_tokens={options.max_tokens} max_batch={options.max_batch} next_n={options.next_n} "
        f"num_sms={options.num_sms}",
        caption="rows: of A for dense, expected of one expert for grouped layouts, else queries or requests",
    )
    table.add_column("#", justify="right")
    for heading in ("kernel", "for", "config"):
        table.add_column(heading, overflow="fold")
    for heading in ("smem KiB", "cluster", "uses", "rows"):
        table.add_column(heading, justify="right")
    table.add_column("key", overflow="fold")
    for number, spec in enumerate(plan.specs, 1):
        rows = [row for row in plan.rows if row.spec == spec]
        table.add_row(
            str(number),
            spec.name,
            _purpose(rows),
            _config(spec, plan.specs, hidden="LAYOUT"),
            f"{spec.smem_bytes / 1024:.1f}",
            str(spec.cluster_size),
            str(len(rows)),
            _span([pair for row in rows for pair in row.rows]),
            "-" if keys is None else keys[spec][:12],
        )
    return table


def rows_table(plan: Plan) -> Table:
    """One line for each use of a kernel: module, shape, layout and the rows that it serves."""
    numbers = {spec: number for number, spec in enumerate(plan.specs, 1)}
    table = Table(title=f"{plan.model.name}: {len(plan.rows)} uses")
    for heading in ("op", "what", "layout"):
        table.add_column(heading, overflow="fold")
    for heading in ("N", "K", "experts", "rows", "kernel #"):
        table.add_column(heading, justify="right")
    for row in plan.rows:
        shape = (_number(row.n), _number(row.k), _number(row.num_experts))
        ranges = ", ".join(_range(*pair) for pair in row.rows)
        table.add_row(row.op, ", ".join(row.what), row.layout or "", *shape, ranges, str(numbers[row.spec]))
    return table


def build_table(report: BuildReport) -> Table:
    """One line for each kernel of a build, with what ptxas reported."""
    table = Table(title=f"{report.compiled} compiled, {report.cached} already there, {report.seconds:.1f} s")
    table.add_column("kernel", overflow="fold")
    table.add_column("config", overflow="fold")
    for heading in ("registers", "spill bytes", "local bytes", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("key")
    specs = tuple(row.spec for row in report.rows)
    for row in report.rows:
        seconds = "cached" if row.cached else f"{row.seconds:.2f}"
        numbers = (str(row.registers), str(row.spill_bytes), str(row.local_bytes), seconds)
        table.add_row(row.spec.name, _config(row.spec, specs), *numbers, row.key[:12])
    return table


def _purpose(rows: list[PlanRow]) -> str:
    return ", ".join(dict.fromkeys(row.layout or row.op.removesuffix("_fp8") for row in rows))


def _config(spec: KernelSpec, specs: tuple[KernelSpec, ...], hidden: str = "") -> str:
    """The macros by which `spec` differs from others of its name (all if it is alone), less `hidden`."""
    others = [other for other in specs if other.name == spec.name and other != spec]
    shown = [
        (name, value)
        for name, value in spec.defines
        if name != hidden and (not others or any(dict(other.defines).get(name) != value for other in others))
    ]
    return " ".join(f"{name.lower()}={value}" for name, value in shown)


def _span(ranges: list[tuple[int, int]] | Ranges) -> str:
    return _range(min(first for first, _ in ranges), max(last for _, last in ranges))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
