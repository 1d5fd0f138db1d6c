"""Measured corrections to the choice of a GEMM tile: one JSON file a device, as `moe-fp8 tune` writes it.

A row is one problem for which a config was faster than the cost model's choice. It serves every number of
rows from its own down to the next that was measured or needs a smaller tile or fewer ("above"), and of a
grouped problem every layout, since they all cost the same. But it serves no problem whose number of blocks
decides, and it holds for the number of SMs that it was measured on. The model chooses for all other problems.
A problem without a row was not measured, or the model chose well for it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from moe_fp8.errors import TileError
from moe_fp8.heuristics.gemm.tiles import GemmConfig, parse_gemm_config
from moe_fp8.problems import DEFAULT_NUM_SMS, GemmProblem

if TYPE_CHECKING:
    from importlib.abc import Traversable

#: Devices that a problem can name, and words of the driver's name for each.
DEVICES = {"h100": "H100", "h200": "H200"}

#: Dense GEMMs take rows of 132 SMs from this number of SMs on. On fewer SMs, they lose 3 to 4% to the model's
#: choice. Grouped GEMMs lose 0 to 5% on any number but that of the measurement.
_LEAST_DENSE_SMS = 96

_FOLDER = resources.files(__package__) / "tuned"

#: Whether it is grouped, N, K, experts, and the SMs that the row was measured on.
Key = tuple[bool, int, int, int, int]

#: (rows, above, config), ascending.
_Rows = tuple[tuple[int, int, str], ...]


def device_of(name: str) -> str:
    """The table's name for a GPU that the driver calls `name`; "" if none is meant for it."""
    words = name.split()
    return next((device for device, word in DEVICES.items() if word in words), "")


def table_file(device: str) -> Traversable:
    """Where the package keeps the device's table, be it there or not."""
    return _FOLDER / f"{device}.json"


@cache
def devices() -> tuple[str, ...]:
    """The values of a problem's `device` on which the choice depends: "" and each device with a table."""
    return ("", *(device for device in DEVICES if table_file(device).is_file()))


def row_key(row: dict[str, Any]) -> Key:
    """The key by which a row of the table is found, together with its number of rows."""
    num_sms = row.get("num_sms", DEFAULT_NUM_SMS)
    return row["layout"] != "dense", row["n"], row["k"], row["num_experts"], num_sms


@cache
def _table(device: str) -> dict[Key, _Rows]:
    if device not in devices() or not device:
        return {}
    measured: dict[Key, list[tuple[int, int, str]]] = {}
    for row in json.loads(table_file(device).read_text())["rows"]:
        measured.setdefault(row_key(row), []).append((row["rows"], row.get("above", 0), row["config"]))
    return {key: tuple(sorted(rows)) for key, rows in measured.items()}


def lookup(problem: GemmProblem) -> GemmConfig | None:
    """The config that the device's table has for `problem`, if any.

    None for batch-invariant results, and if the number of blocks decides, which tells more than a mean.
    """
    row = find_row(problem)
    return None if row is None else row[2]


def find_row(problem: GemmProblem) -> tuple[int, int, GemmConfig] | None:
    """(rows, above, config) of the table's row that `lookup` takes its answer from."""
    if problem.batch_invariant or problem.blocks_decide:
        return None
    dense, num_sms = problem.layout == "dense", problem.num_sms
    for measured in (num_sms, DEFAULT_NUM_SMS) if dense and num_sms >= _LEAST_DENSE_SMS else (num_sms,):
        key = not dense, problem.n, problem.k, problem.num_experts, measured
        if row := _row(_table(problem.device).get(key, ()), problem):
            return row
    return None


def _row(found: _Rows, problem: GemmProblem) -> tuple[int, int, GemmConfig] | None:
    wanted = problem.rows
    at = bisect_left(found, (wanted,))
    if at == len(found) or found[at][1] >= wanted:
        return None
    rows, above, text = found[at]
    try:
        return rows, above, parse_gemm_config(text, problem)
    except TileError:
        return None  # a table of another version
