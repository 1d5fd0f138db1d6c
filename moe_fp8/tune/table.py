"""A device's table: its rows, its file, and what new timings change in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import TOKEN_TILES
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.tune.targets import Target

#: A row is written where the best config takes less than the model's choice by more than this.
LEAST_GAIN = 0.02


def rows_below(rows: int) -> int:
    """The most rows that need a smaller tile than `rows`, or fewer of 64: theirs is another matter."""
    if rows > 64:
        return (rows - 1) // 64 * 64
    return max((tile for tile in TOKEN_TILES if tile < rows), default=0)


@dataclass(frozen=True)
class Timing:
    """The fastest config of one problem and the cost model's choice, with their microseconds a call.

    It stands for more than `above` and up to `rows` rows.
    """

    target: Target
    rows: int
    above: int
    config: str
    us: float
    model_config: str
    model_us: float

    @property
    def gains(self) -> bool:
        return self.us < self.model_us * (1 - LEAST_GAIN)

    def to_row(self) -> dict[str, Any]:
        return {
            **self.target._asdict(),
            "rows": self.rows,
            "above": self.above,
            "config": self.config,
            "us": round(self.us, 2),
            "model_config": self.model_config,
            "model_us": round(self.model_us, 2),
        }


def check_writable(path: Path) -> None:
    """Raises ConfigError where a file cannot be put at `path`; makes its folder."""
    remedy = "give a file in a folder that you can write with --out"
    try:
        if path.is_dir():
            raise ConfigError("--out", "a file", str(path), remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            "--out", f"a place that can be written ({error.strerror})", str(path), remedy
        ) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, none where there is no file; raises ConfigError where it is no table."""
    try:
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        for row in rows:
            gemm_table.row_key(row), row["rows"], row["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--out", "a table as `moe-fp8 tune` writes it, or no file", str(path)) from error
    return cast(list[dict[str, Any]], rows)


def merge(old: Sequence[dict[str, Any]], timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """A table's rows: those of `old` that `timings` say nothing about, and of `timings` those that gain."""
    timed: dict[gemm_table.Key, list[int]] = {}
    for timing in timings:
        timed.setdefault(gemm_table.row_key(timing.target._asdict()), []).append(timing.rows)
    rows = [timing.to_row() for timing in timings if timing.gains]
    for row in old:
        counts = timed.get(gemm_table.row_key(row), [])
        if row["rows"] not in counts:
            # An old row ends where a number of rows was timed now.
            above = max([row.get("above", 0), *(count for count in counts if count < row["rows"])])
            rows.append({**row, "above": above})
    return sorted(rows, key=lambda row: (*gemm_table.row_key(row), row["rows"]))


def write_table(path: Path, header: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Put a table at `path`, a line for each row; whoever reads it sees the old one or the new one."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in header.items())
    text = f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n'
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
