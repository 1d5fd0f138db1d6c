"""Progress of a build: a bar on a terminal, else a line for each kernel. Other work shows its time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeAlias

from moe_fp8.specs import KernelSpec


@dataclass(frozen=True)
class BuildRow:
    """One kernel of a build. `seconds` is the compile time, 0.0 if the kernel was `cached`."""

    spec: KernelSpec
    key: str
    cached: bool
    seconds: float
    registers: int
    spill_bytes: int
    local_bytes: int
    warnings: tuple[str, ...]


#: A callback that is called after each kernel with (kernels done, kernels in all, the row).
ProgressCallback: TypeAlias = Callable[[int, int, BuildRow], None]

#: None or True: a bar on a terminal, else a line for each compiled kernel, on stderr. False: silence.
Progress: TypeAlias = ProgressCallback | bool | None


@contextmanager
def open_progress(progress: Progress, total: int) -> Iterator[ProgressCallback]:
    """The callback that `progress` stands for, valid within the context."""
    if callable(progress):
        yield progress
    elif progress is False:
        yield lambda done, total, row: None
    elif sys.stderr.isatty():
        with _bar(total) as callback:
            yield callback
    else:
        yield line_printer(sys.stderr)


def line_printer(stream: TextIO) -> ProgressCallback:
    """A callback that prints a line for each compiled kernel, and a last line with the totals."""
    compiled = 0

    def show(done: int, total: int, row: BuildRow) -> None:
        nonlocal compiled
        if not row.cached:
            compiled += 1
            print(f"[{done}/{total}] compiled {row.spec} in {row.seconds:.2f} s", file=stream, flush=True)
        if done == total:
            print(f"{total} kernels ready, {compiled} compiled now", file=stream, flush=True)

    return show


@contextmanager
def _bar(total: int) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("kernels"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def show(done: int, total: int, row: BuildRow) -> None:
            bar.update(task, completed=done, description=str(row.spec))

        yield show


@contextmanager
def show_time(what: str, quiet: bool = False, after: float = 1.0) -> Iterator[None]:
    """Within the context, show `what` and its seconds on stderr once they are more than `after`.

    Only a terminal shows it, and the line is removed at the end.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    stream, started, done = sys.stderr, time.monotonic(), threading.Event()

    def show() -> None:
        pause = after
        while not done.wait(pause):
            pause = 0.5
            print(f"\r{what}: {time.monotonic() - started:.0f} s", end="", file=stream, flush=True)
        if pause != after:
            # Return to the first column and erase the line.
            print("\r\x1b[K", end="", file=stream, flush=True)

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
