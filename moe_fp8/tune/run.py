"""Problems -> kernels built -> timings -> files: of all timings, and the device's table."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_fp8.errors import ConfigError, MoeFp8Error, SettingError, ToolchainError
from moe_fp8.heuristics import gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.jit.files import locked
from moe_fp8.jit.progress import Lossy
from moe_fp8.jit.runtime import preload
from moe_fp8.jit.toolchain import nvrtc_version
from moe_fp8.problems import selection_rows
from moe_fp8.settings import settings
from moe_fp8.specs import kernel_spec
from moe_fp8.tune.fit import fit, held_out, write_constants
from moe_fp8.tune.interrupts import Interrupts
from moe_fp8.tune.sample import expert_counts
from moe_fp8.tune.table import check_writable, merge, read_rows, table_choice, table_rows, write_table
from moe_fp8.tune.targets import Target, candidates
from moe_fp8.tune.timing import time_configs
from moe_fp8.tune.timings import (
    Timing,
    check_device,
    merge_timings,
    of_this_version,
    read_timings,
    regret,
    untimed,
    write_timings,
)
from moe_fp8.warmup.run import hopper_device

#: Replays of which the median counts.
REPLAYS = 11

_Entry = TypeVar("_Entry")


def tune(
    problems: Iterable[tuple[Target, int]],
    out: Path | None = None,
    *,
    timings_file: Path | None = None,
    factor: float = 1.6,
    replays: int = REPLAYS,
    max_seconds: float = float("inf"),
    jobs: int | None = None,
    quiet: bool = False,
) -> tuple[Path, list[Timing]]:
    """Time each (target, rows), merge what gains into the table `out`; returns (table, new timings).

    `out`: by default the package's own table for this device. `timings_file`: all timings are added to this
    file; then no table is written unless `out` is given. `factor`: see `candidates`. No further
    timing begins after `max_seconds`. Timings are written also if an error or a signal ends the work (see
    `Interrupts`). Raises ToolchainError without a Hopper GPU; ConfigError for a file that cannot be read or
    written or has timings of another device, and in batch-invariant mode, which consults no table;
    MoeFp8Error if a config computes something else.
    """
    device = hopper_device()
    if device is None:
        raise ToolchainError(
            "tuning times kernels and there is no Hopper GPU here; see what `moe-fp8 doctor` says"
        )
    if settings().batch_invariant:
        raise SettingError("MOE_FP8_BATCH_INVARIANT", "off while tuning", True, "unset it")
    path = None
    if out is not None or timings_file is None:
        path = _target(table_path(out, device.name))
    if timings_file is not None:
        timings_file = _target(timings_file)
    if path is not None and path == timings_file:
        raise ConfigError("--out", "another file than --timings", str(path))
    for file in filter(None, (path, timings_file)):
        check_writable(file)
    # The package's own table serves every device of a name, such as "H100".
    old_rows = partial(read_rows, device=device.name if out is not None else None)
    old_timings = partial(_old_timings, device=device)
    if path is not None:
        old_rows(path)  # raises now, and not after hours, if they cannot be read
    if timings_file is not None:
        old_timings(timings_file)
    machine = about(device)
    log = None if quiet or sys.stderr is None else Lossy(sys.stderr)
    stop = time.monotonic() + max_seconds
    timings: list[Timing] = []

    def spent() -> bool:
        return bool(timings) and time.monotonic() > stop

    def put_timings(file: Path, old: list[Timing]) -> None:
        write_timings(file, machine, merge_timings(old, timings))

    def put_rows(file: Path, old: list[dict[str, Any]]) -> None:
        write_table(file, machine, merge(old, table_rows(timings), timings))

    interrupts = Interrupts()
    with interrupts.handled():
        try:
            with interrupts.raised():
                for timing in _timings(problems, device.num_sms, factor, replays, jobs, quiet, spent):
                    timings.append(timing)
                    if log is not None:
                        print(_line(timing), file=log, flush=True)
        finally:
            additions = []
            if timings and timings_file is not None:
                additions.append(partial(_add, timings_file, old_timings, put_timings))
            if timings and path is not None:
                additions.append(partial(_add, path, old_rows, put_rows))
            _do_all(additions)
    written = path or timings_file
    assert written is not None
    return written, timings


def _do_all(actions: Iterable[Callable[[], None]]) -> None:
    """Do every action, also after an error of another; then raise the first error."""
    errors: list[Exception] = []
    for action in actions:
        try:
            action()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _add(file: Path, read: Callable[[Path], list[_Entry]], put: Callable[[Path, list[_Entry]], None]) -> None:
    """Add what was timed to what `read` finds in the file now: another process may have written meanwhile.

    If the file no longer fits or cannot be written, what was timed goes into a new file, which the
    ConfigError names.
    """
    with _alone(file):
        try:
            put(file, read(file))
        except ConfigError as error:
            remedy = f"what was timed now is in {_beside(file, put)}"
            raise ConfigError(error.field, error.expected, error.got, remedy) from error
        except OSError as error:
            remedy = f"what was timed now is in {_beside(file, put)}"
            raise ConfigError("--out, --timings", "a file that can be written", str(error), remedy) from error


def _target(file: Path) -> Path:
    """Where a link leads to: it stays a link, and its target is written."""
    return Path(os.path.realpath(file))


def _beside(file: Path, put: Callable[[Path, list[_Entry]], None]) -> Path:
    """Write what was timed into a new file beside `file`, else into the folder of temporary files."""
    with suppress(OSError):
        return _new(file, file.parent, put)
    return _new(file, Path(tempfile.gettempdir()), put)


def _new(file: Path, folder: Path, put: Callable[[Path, list[_Entry]], None]) -> Path:
    descriptor, name = tempfile.mkstemp(file.suffix, f"{file.stem}.", folder)
    os.close(descriptor)
    put(Path(name), [])
    return Path(name)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """No other process merges into the file meanwhile, unless its file system has no locks."""
    with ExitStack() as held:
        with suppress(OSError):  # The timings of hours are written all the same.
            held.enter_context(locked(file.parent))
        yield


def _old_timings(timings_file: Path, device: DeviceInfo) -> list[Timing]:
    if not timings_file.exists():
        return []
    machine, timings = read_timings(timings_file)
    check_device("--timings", timings_file, machine["device"], device.name)
    # The head of the file names one number of SMs for all its timings.
    if any(timing.num_sms != device.num_sms for timing in timings):
        raise ConfigError(
            "--timings", f"no file, or timings on {device.num_sms} SMs alone",
            f"{timings_file}, on {timings[0].num_sms}", "give another file",
        )  # fmt: skip
    return timings


def refit(timings_file: Path, out: Path | None = None) -> str:
    """Fit the cost model to a file of timings and write its constants; returns what the fit is worth.

    `out`: by default the package's own constants. A quarter of the GEMMs is left out of the fit and tests
    it. Raises ConfigError for a file that cannot be read or written.
    """
    machine, timings = read_timings(timings_file)
    timings = of_this_version(timings)
    path = _target(out or Path(str(gemm_costs.FILE)))
    check_writable(path)
    fitted_to, tested_on = held_out(timings)
    before = regret(tested_on, partial(_choice, gemm_costs.constants()))
    fitted = fit(fitted_to)
    write_constants(path, machine, fitted)
    after = regret(tested_on, partial(_choice, fitted))
    lines = [f"{path}: fitted to {len(fitted_to)} timings; what the choice loses on {len(tested_on)} others:"]
    lines += [f"{name}: {before.get(name, 0):.2%} before, {now:.2%} now" for name, now in after.items()]
    lines += _without(tested_on, partial(_choice, fitted))
    return "\n".join(lines)


def retable(timings_file: Path, out: Path | None = None) -> str:
    """Make the table of the timings' device anew; returns what it is worth.

    `out`: by default the package's own table of that device. Raises ConfigError for a file that cannot be
    read or written, or if the package has no table for the device.
    """
    machine, timings = read_timings(timings_file)
    timings = of_this_version(timings)
    if not timings:
        raise ConfigError("--timings", "timings to make a table of", "none")
    path = _target(table_path(out, machine["device"]))
    check_writable(path)
    rows = table_rows(timings)
    write_table(path, machine, rows)
    by_model = partial(_choice, gemm_costs.constants())
    before = regret(timings, by_model)
    after = regret(timings, partial(table_choice, rows, by_model))
    lines = [f"{path}: {len(rows)} rows of {len(timings)} timings; what the choice loses on these:"]
    lines += [f"{name}: {before[name]:.2%} by the model, {after[name]:.2%} with the table" for name in before]
    lines += _without(timings, by_model)
    return "\n".join(lines)


def _without(timings: Sequence[Timing], choose: Callable[[Timing], str]) -> list[str]:
    """A line on the choices that were not timed, if there are any."""
    count = untimed(timings, choose)
    return [f"{count} of {len(timings)} choices were not timed and do not count"] if count else []


def _choice(fitted: gemm_costs.Constants, timing: Timing) -> str:
    """The config that the cost model takes to be the fastest."""
    target = timing.target
    problem = target.problem(timing.rows, timing.num_sms)
    configs = gemm_configs(target.layout, target.k, num_sms=timing.num_sms)
    return str(min(configs, key=lambda config: gemm_costs.cost(config, problem, fitted)))


def _timings(
    problems: Iterable[tuple[Target, int]],
    num_sms: int,
    factor: float,
    replays: int,
    jobs: int | None,
    quiet: bool,
    spent: Callable[[], bool],
) -> Iterator[Timing]:
    for target, group in groupby(problems, key=lambda problem: problem[0]):
        if spent():
            return
        configs = {
            rows: candidates(target.problem(rows, num_sms), factor)
            for rows in sorted({selection_rows(rows) for _, rows in group})
        }
        preload(
            {
                kernel_spec(replace(target.problem(rows, num_sms), config=str(config)))
                for rows, tried in configs.items()
                for config in tried
            },
            jobs,
            False if quiet else None,
        )
        for rows, tried in configs.items():
            for counts in expert_counts(target, rows):
                if spent():
                    return
                try:
                    us = time_configs(target, rows, counts, [str(config) for config in tried], replays)
                except torch.OutOfMemoryError as error:
                    raise MoeFp8Error(
                        f"{_named(target, rows)}: expected tensors that fit into the memory of the GPU, got "
                        f"{str(error).splitlines()[0]}; leave this GEMM out, or give fewer rows"
                    ) from error
                yield Timing(target, rows, counts, us, num_sms)


def _named(target: Target, rows: int) -> str:
    experts = f" of {target.num_experts} experts" if target.layout != "dense" else ""
    return f"{target.layout} {target.n}x{target.k}{experts}, {rows} rows"


def _line(timing: Timing) -> str:
    model, best = next(iter(timing.us)), min(timing.us, key=timing.us.__getitem__)
    return (
        f"{_named(timing.target, timing.rows)}: "
        f"{best} {timing.us[best]:.2f} us, model's {model} {timing.us[model]:.2f} us"
    )


def table_path(out: Path | None, device: str) -> Path:
    """`out`, or the package's table of the device that the driver calls `device`; raises ConfigError."""
    if out is not None:
        try:
            return out.expanduser().absolute()
        except RuntimeError as error:  # a user without a home directory
            raise ConfigError("--out", f"a path ({error})", str(out)) from error
    name = gemm_table.device_of(device)
    if not name:
        words = ", ".join(gemm_table.DEVICES.values())
        raise ConfigError("--out", f"a file, as this is none of {words}", device, "give one with --out")
    return Path(str(gemm_table.table_file(name)))


def about(device: DeviceInfo) -> dict[str, Any]:
    """What a file says of the machine that its timings come from, as JSON types."""
    return {
        "device": device.name,
        "num_sms": device.num_sms,
        "driver": ".".join(map(str, device.driver_version)),
        "cuda": ".".join(map(str, nvrtc_version())),
        "torch": metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
    }
