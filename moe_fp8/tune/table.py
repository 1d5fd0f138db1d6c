"""A device's table: its rows from timings, its file, and the changes that new timings make in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import TOKEN_TILES
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.files import publish
from moe_fp8.problems import DEFAULT_NUM_SMS
from moe_fp8.tune.targets import Target
from moe_fp8.tune.timings import Timing, check_device

#: A row is written if the best config takes less than the model's choice by at least this share.
LEAST_GAIN = 0.05


def rows_below(rows: int) -> int:
    """The most rows that need a smaller tile than `rows`, or fewer blocks of 64: no row reaches that far."""
    if rows > 64:
        return (rows - 1) // 64 * 64
    return max((tile for tile in TOKEN_TILES if tile < rows), default=0)


def mean_times(timings: Iterable[Timing]) -> dict[tuple[Target, int], dict[str, float]]:
    """(target, rows) -> config -> microseconds: the geometric mean over the spreads of experts' rows."""
    by_problem: dict[tuple[Target, int], list[Mapping[str, float]]] = {}
    for timing in timings:
        by_problem.setdefault((timing.target, timing.rows), []).append(timing.us)
    return {
        problem: {
            config: geometric_mean([us[config] for us in spreads])
            for config in spreads[0]
            if all(config in us for us in spreads)
        }
        for problem, spreads in sorted(by_problem.items())
    }


def table_rows(timings: Iterable[Timing]) -> list[dict[str, Any]]:
    """A row for each problem whose best config gains `LEAST_GAIN` over the cost model's choice.

    A problem whose choice was not timed gives no row. Equal neighbours become one row.
    """
    timings = tuple(timings)
    num_sms = {(timing.target, timing.rows): timing.num_sms for timing in timings}
    found: list[dict[str, Any]] = []
    for target, problems in groupby(mean_times(timings).items(), key=lambda item: item[0][0]):
        timed = 0
        for (_, rows), us in problems:
            if not us:  # no config was timed with every spread of experts' rows
                continue
            problem = target.problem(rows, num_sms[target, rows])
            model = us.get(str(gemm_costs.cheapest(problem.for_selection())))
            best = min(us, key=us.__getitem__)
            if model is not None and us[best] <= model * (1 - LEAST_GAIN):
                above = max(timed, rows_below(rows))
                gain = round(1 - us[best] / model, 3)
                row = {**target._asdict(), "rows": rows, "above": above, "config": best, "gain": gain}
                if problem.num_sms != DEFAULT_NUM_SMS:
                    row["num_sms"] = problem.num_sms
                found.append(row)
            timed = rows
    return _joined(found)


def table_choice(
    rows: Iterable[dict[str, Any]], model_choice: Callable[[Timing], str], timing: Timing
) -> str:
    """The config that a table of these rows has for a timed problem, else the cost model's."""
    key = _key(timing)
    for row in rows:
        if gemm_table.row_key(row) == key and row["above"] < timing.rows <= row["rows"]:
            return str(row["config"])
    return model_choice(timing)


def _key(timing: Timing) -> gemm_table.Key:
    return gemm_table.row_key({**timing.target._asdict(), "num_sms": timing.num_sms})


def _joined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of which each begins where another ends, with an equal config, as one row of the least gain."""
    joined: list[dict[str, Any]] = []
    for row in rows:
        last = joined[-1] if joined else None
        if (
            last is not None
            and gemm_table.row_key(last) == gemm_table.row_key(row)
            and last["rows"] == row["above"]
            and last["config"] == row["config"]
        ):
            joined[-1] = {**row, "above": last["above"], "gain": min(last["gain"], row["gain"])}
        else:
            joined.append(row)
    return joined


def merge(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], timings: Iterable[Timing]
) -> list[dict[str, Any]]:
    """A table's rows: `new`, and the rows of `old` whose config was not timed now for their rows.

    An old row may have joined neighbours. Only the neighbour that was timed now is dropped or replaced.
    """
    timed: dict[gemm_table.Key, dict[int, set[str]]] = {}
    for timing in timings:
        timed.setdefault(_key(timing), {}).setdefault(timing.rows, set()).update(timing.us)
    rows = list(new)
    replaced = {(gemm_table.row_key(row), row["rows"]) for row in new}
    for row in old:
        key = gemm_table.row_key(row)
        counts = timed.get(key, {})
        rest, least = row["rows"], row.get("above", 0)
        while rest > least:
            # An old row ends at the number of rows that was timed now, and goes on below it.
            below = max([least, *(count for count in counts if count < rest)])
            if (key, rest) in replaced or row["config"] in counts.get(rest, ()):
                below = max(below, rows_below(rest))
            else:
                rows.append({**row, "rows": rest, "above": below})
            rest = below
    rows.sort(key=lambda row: (*gemm_table.row_key(row), row["rows"]))
    return _joined(rows)


def check_writable(path: Path) -> None:
    """Raises ConfigError if no file can be put at `path`; makes its folder."""
    remedy = "give a file in a folder that you can write"
    try:
        if path.is_dir():
            raise ConfigError("--out, --timings", "a file", str(path), remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            "--out, --timings", f"a place that can be written ({error.strerror})", str(path), remedy
        ) from error


def read_rows(path: Path, device: str | None = None) -> list[dict[str, Any]]:
    """The rows of a table, none if there is no file.

    Raises ConfigError if it is no table, or the table of another device than `device`.
    """
    try:
        found = json.loads(path.read_text()) if path.exists() else {"device": device, "rows": []}
        of, rows = found["device"], found["rows"]
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise ValueError("rows that `moe-fp8 tune` would not write")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("--out", "a table as `moe-fp8 tune` writes it, or no file", str(path)) from error
    if device is not None:
        check_device("--out", path, of, device)
    return cast(list[dict[str, Any]], rows)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    numbers = [row.get(name) for name in ("n", "k", "num_experts", "rows")]
    numbers += [row.get("above", 0), row.get("num_sms", 1)]
    texts = row.get("layout"), row.get("config")
    return all(type(one) is int for one in numbers) and all(isinstance(one, str) for one in texts)


def write_table(path: Path, header: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Put a table at `path`, a line for each row. A reader sees either the old file or the new file."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in header.items())
    text = f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n'
    publish(path, text.encode())
