"""The whole of it: targets -> kernels built -> timings -> the table's file."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from moe_fp8.errors import ConfigError, SettingError, ToolchainError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.jit.runtime import preload
from moe_fp8.jit.toolchain import nvrtc_version
from moe_fp8.problems import selection_rows
from moe_fp8.settings import settings
from moe_fp8.specs import kernel_spec
from moe_fp8.tune.table import Timing, check_writable, merge, read_rows, rows_below, write_table
from moe_fp8.tune.targets import Target, candidates
from moe_fp8.tune.timing import fastest
from moe_fp8.warmup.run import hopper_device


def tune(
    targets: Sequence[Target],
    rows: Sequence[int],
    out: Path | None = None,
    *,
    factor: float = 1.6,
    max_seconds: float = float("inf"),
    jobs: int | None = None,
    quiet: bool = False,
) -> tuple[Path, list[Timing]]:
    """Time each target with each number of rows, merge what gains into the table `out`; (table, all timings).

    `out`: by default the package's own table for this device. `factor`: see `candidates`. After
    `max_seconds` no further timing is begun. What was timed is written, also where an error ends the work.
    Raises ToolchainError without a Hopper GPU; ConfigError for a table that cannot be read or written, and in
    batch-invariant mode, where no table is consulted; MoeFp8Error where a config computes something else.
    """
    started = time.monotonic()
    device = hopper_device()
    if device is None:
        raise ToolchainError(
            "tuning times kernels and there is no Hopper GPU here; see what `moe-fp8 doctor` says"
        )
    if settings().batch_invariant:
        raise SettingError("MOE_FP8_BATCH_INVARIANT", "off while tuning", True, "unset it")
    path = _table_path(out, device)
    check_writable(path)
    old = read_rows(path)
    timings: list[Timing] = []
    try:
        for timing in _timings(targets, rows, device.num_sms, factor, jobs, quiet):
            timings.append(timing)
            if not quiet:
                print(_line(timing), file=sys.stderr, flush=True)
            if time.monotonic() - started > max_seconds:
                break
    finally:
        if timings:
            write_table(path, _header(device), merge(old, timings))
    return path, timings


def _timings(
    targets: Sequence[Target], rows: Sequence[int], num_sms: int, factor: float, jobs: int | None, quiet: bool
) -> Iterator[Timing]:
    wanted = sorted({selection_rows(count) for count in rows})
    # Targets of equal weights follow each other, so that the weights are made once.
    for target in sorted(set(targets), key=lambda target: (target[1:], target.layout)):
        problems = {count: target.problem(count, num_sms) for count in wanted}
        configs = {count: candidates(problem, factor) for count, problem in problems.items()}
        preload(
            {
                kernel_spec(replace(problems[count], config=str(config)))
                for count in wanted
                for config in configs[count]
            },
            jobs,
            False if quiet else None,
        )
        last = 0
        for count in wanted:
            names = [str(config) for config in configs[count]]
            best, us, model_us = fastest(target, count, names)
            yield Timing(target, count, max(last, rows_below(count)), best, us, names[0], model_us)
            last = count


def _line(timing: Timing) -> str:
    target = timing.target
    what = f"{target.layout} {target.n}x{target.k}"
    what += f" of {target.num_experts} experts" if target.layout != "dense" else ""
    return (
        f"{what}, {timing.rows} rows: {timing.config} {timing.us:.2f} us, "
        f"model's {timing.model_config} {timing.model_us:.2f} us"
    )


def _table_path(out: Path | None, device: DeviceInfo) -> Path:
    if out is not None:
        return out.expanduser().absolute()
    name = gemm_table.device_of(device.name)
    if not name:
        words = ", ".join(gemm_table.DEVICES.values())
        raise ConfigError("--out", f"a file, as this is none of {words}", device.name, "give one with --out")
    return gemm_table.table_file(name)


def _header(device: DeviceInfo) -> dict[str, str]:
    return {
        "device": device.name,
        "driver": ".".join(map(str, device.driver_version)),
        "cuda": ".".join(map(str, nvrtc_version())),
        "torch": metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
    }
