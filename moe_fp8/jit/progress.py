"""Progress of a build: a bar on a terminal, else a line for each kernel. Other work shows its time.

Output that is lost does not end the work: see `Lossy`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias, cast

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


class Lossy:
    """A text stream that drops what `stream` does not take, such as a pipe whose reader has left.

    Characters that the stream's encoding lacks become escapes. `error` is the first error of `stream`, or
    None.
    """

    def __init__(self, stream: TextIO) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self.error = self.error or error
        return len(text)

    def flush(self) -> None:
        """Flush what `stream` takes."""
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error

    def settle(self) -> None:
        """Flush for the last time. What `stream` does not take goes to /dev/null, because the interpreter
        flushes again when it ends."""
        try:
            self._stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output() -> Iterator[Lossy]:
    """Within the context, sys.stdout (the value) and sys.stderr are `Lossy`; a closed one drops all."""
    given = sys.stdout, sys.stderr
    if None in given:
        # No other file may get the number of a closed stream, and a compiler process inherits the numbers.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
    out, err = (
        Lossy(os.fdopen(number, "w", closefd=False) if stream is None else stream)
        for number, stream in enumerate(given, 1)
    )
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        sys.stdout, sys.stderr = given
        out.settle()
        err.settle()


@contextmanager
def open_progress(progress: Progress, total: int) -> Iterator[ProgressCallback]:
    """The callback that `progress` stands for, valid within the context."""
    stream = _open_stderr()
    if callable(progress):
        yield progress
    elif progress is False or stream is None:
        yield lambda done, total, row: None
    elif stream.isatty():
        with _bar(total) as callback:
            yield callback
    else:
        yield line_printer(stream)


def _open_stderr() -> TextIO | None:
    """The stream that shows progress; None if it is closed, or if the process has none."""
    return None if getattr(sys.stderr, "closed", False) else sys.stderr


def line_printer(stream: TextIO) -> ProgressCallback:
    """A callback that prints a line for each compiled kernel, and a last line with the totals."""
    compiled, lossy = 0, Lossy(stream)

    def show(done: int, total: int, row: BuildRow) -> None:
        nonlocal compiled
        if not row.cached:
            compiled += 1
            print(f"[{done}/{total}] compiled {row.spec} in {row.seconds:.2f} s", file=lossy, flush=True)
        if done == total:
            print(f"{total} kernels ready, {compiled} compiled now", file=lossy, flush=True)

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
    with Progress(*columns, console=Console(file=cast(TextIO, Lossy(sys.stderr)))) as bar:
        task = bar.add_task("", total=total)

        def show(done: int, total: int, row: BuildRow) -> None:
            bar.update(task, completed=done, description=str(row.spec))

        yield show


@contextmanager
def show_time(what: str, quiet: bool = False, after: float = 1.0) -> Iterator[None]:
    """Within the context, show `what` and its seconds on stderr once they are more than `after`.

    Only a terminal shows it, and the line is removed at the end.
    """
    terminal = _open_stderr()
    if quiet or terminal is None or not terminal.isatty():
        yield
        return
    stream, started, done = Lossy(terminal), time.monotonic(), threading.Event()

    def show() -> None:
        pause = after
        while not done.wait(pause):
            pause = 0.5
            print(f"\r{what}: {time.monotonic() - started:.0f} s", end="", file=stream, flush=True)
        if pause != after:
            # Return to the first column and erase the line.
            print("\r\x1b[K", end="", file=stream, flush=True)

    thread = threading.Thread(target=show)
    with suppress(RuntimeError):  # a limit on processes counts threads, and the work may need none
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
