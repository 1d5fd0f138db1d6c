"""Measured corrections to the choice of a GEMM tile: one JSON file a device, as `moe-fp8 tune` writes it.

A row is one problem and the config that was fastest for it. A problem uses the row of its own layout, N,
K and number of experts with the fewest rows that are not below its own; without one the cost model decides.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from functools import cache
from importlib import resources

from moe_fp8.heuristics.gemm_configs import GemmConfig, parse_gemm_config
from moe_fp8.problems import GemmProblem

#: Devices that a problem can name, and words of the driver's name for each.
DEVICES = {"h100": "H100", "h200": "H200"}

_Key = tuple[str, int, int, int]


def device_of(name: str) -> str:
    """The table's name for a GPU that the driver calls `name`; "" if none is meant for it."""
    return next((device for device, word in DEVICES.items() if word in name), "")


@cache
def _rows(device: str) -> dict[_Key, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Rows that were measured, ascending, and the config of each, by layout, N, K and experts."""
    file = resources.files("moe_fp8.heuristics") / "tuned" / f"{device}.json"
    if not device or not file.is_file():
        return {}
    measured: dict[_Key, list[tuple[int, str]]] = {}
    for row in json.loads(file.read_text())["rows"]:
        key = row["layout"], row["n"], row["k"], row["num_experts"]
        measured.setdefault(key, []).append((row["rows"], row["config"]))
    return {key: tuple(zip(*sorted(rows), strict=True)) for key, rows in measured.items()}  # type: ignore[misc]


def lookup(problem: GemmProblem) -> GemmConfig | None:
    """The config that the device's table has for `problem`, if any."""
    if problem.batch_invariant or problem.expected_m is None:
        return None
    found = _rows(problem.device).get((problem.layout, problem.n, problem.k, problem.num_experts))
    if found is None:
        return None
    rows, configs = found
    at = bisect_left(rows, problem.expected_m)
    return parse_gemm_config(configs[at], problem) if at < len(rows) else None
