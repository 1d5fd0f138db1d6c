"""The file of timings: every config of every GEMM that was timed, from which constants and tables are made.

It is gzip-compressed text. The first line is a JSON object about the machine, and each other line is one
`Timing`.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import gemm_configs
from moe_fp8.jit.files import publish
from moe_fp8.limits import refuse_k, refuse_n
from moe_fp8.problems import DEFAULT_NUM_SMS
from moe_fp8.specs import GEMM_LAYOUTS
from moe_fp8.tune.targets import Target

_REMEDY = "give a file that `moe-fp8 tune --timings` wrote"


@dataclass(frozen=True)
class Timing:
    """Microseconds a call of several configs of one GEMM.

    `rows`: the mean number of rows of an expert, which is all that the selector knows. `counts`: the rows
    that each expert had. `us`: config -> microseconds. `num_sms`: the SMs of the device.
    """

    target: Target
    rows: int
    counts: tuple[int, ...]
    us: Mapping[str, float]
    num_sms: int = DEFAULT_NUM_SMS

    @property
    def key(self) -> tuple[Target, int, tuple[int, ...]]:
        return self.target, self.rows, self.counts


def read_timings(path: Path) -> tuple[dict[str, Any], list[Timing]]:
    """(about the machine, timings); raises ConfigError if `path` holds no timings.

    A file that does not say how many SMs the device has is read as timings of `DEFAULT_NUM_SMS`.
    """
    try:
        with gzip.open(path, "rt") as file:
            about = json.loads(file.readline())
            if not isinstance(about["device"], str):
                raise ValueError("its first line names no device")
            num_sms = about.get("num_sms", DEFAULT_NUM_SMS)
            if not isinstance(num_sms, int) or num_sms < 1:
                raise ValueError("its first line has no number of SMs")
            return about, [_timing(json.loads(line), num_sms) for line in file]
    except (
        OSError, EOFError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError,
        RecursionError, zlib.error,
    ) as error:  # fmt: skip
        raise ConfigError("--timings", f"a file of timings ({error})", str(path), _REMEDY) from error


def check_device(option: str, path: Path, found: str, device: str) -> None:
    """Raises ConfigError if the file at `path` has what was timed on another device."""
    if found != device:
        raise ConfigError(
            option, f"no file, or timings of {device} alone", f"{path}, of {found}", "give another file"
        )


def write_timings(path: Path, about: Mapping[str, Any], timings: Iterable[Timing]) -> None:
    """Put the timings at `path`. A reader sees either the old file or the new file."""
    lines = [json.dumps(dict(about)), *(_line(timing) for timing in timings)]
    # No time and no name in the header: equal timings are equal bytes.
    publish(path, gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def merge_timings(old: Iterable[Timing], new: Iterable[Timing]) -> list[Timing]:
    """All timings in the order of their problems; a new timing of a problem replaces the old timing."""
    found = {timing.key: timing for timing in (*old, *new)}
    return [found[key] for key in sorted(found)]


def of_this_version(timings: Iterable[Timing]) -> list[Timing]:
    """The timings without the times of configs that their GEMMs may not use now, such as of removed tiles."""
    found = []
    for timing in timings:
        target = timing.target
        usable = {str(config) for config in gemm_configs(target.layout, target.k, num_sms=timing.num_sms)}
        us = {config: value for config, value in timing.us.items() if config in usable}
        if us:
            found.append(replace(timing, us=us))
    return found


def class_of(timing: Timing) -> str:
    """Dense or grouped, and an order of magnitude of rows."""
    rows = next((f"up to {most} rows" for most in (64, 256) if timing.rows <= most), "more rows")
    return f"{'dense' if timing.target.layout == 'dense' else 'grouped'}, {rows}"


def regret(timings: Iterable[Timing], choose: Callable[[Timing], str]) -> dict[str, float]:
    """Class -> the share of time that chosen configs lose to the best timed configs, as a geometric mean.

    A choice that was not timed does not count (`untimed`).
    """
    ratios: dict[str, list[float]] = {}
    for timing in timings:
        us = timing.us.get(choose(timing))
        if us is not None:
            ratios.setdefault(class_of(timing), []).append(us / min(timing.us.values()))
    return {name: geometric_mean(values) - 1 for name, values in sorted(ratios.items())}


def untimed(timings: Iterable[Timing], choose: Callable[[Timing], str]) -> int:
    """The number of timings whose chosen config was not timed."""
    return sum(choose(timing) not in timing.us for timing in timings)


def _line(timing: Timing) -> str:
    us = {config: round(value, 3) for config, value in timing.us.items()}
    record = {"layout": timing.target.layout, "n": timing.target.n, "k": timing.target.k, "rows": timing.rows}
    return json.dumps({**record, "counts": timing.counts, "us": us}, separators=(",", ":"))


def _timing(record: dict[str, Any], num_sms: int) -> Timing:
    counts = tuple(int(count) for count in record["counts"])
    target = Target(record["layout"], int(record["n"]), int(record["k"]), len(counts))
    us = {str(name): float(value) for name, value in record["us"].items()}
    rows = int(record["rows"])
    known = target.layout in GEMM_LAYOUTS and not refuse_n(target.n) and not refuse_k(target.k)
    if not known or rows < 1 or min(counts, default=-1) < 0 or (target.layout == "dense" and len(counts) > 1):
        raise ValueError("a line has no GEMM")
    if not us or not all(0 < value < math.inf for value in us.values()):
        raise ValueError("a line has no times")
    return Timing(target, rows, counts, us, num_sms)
