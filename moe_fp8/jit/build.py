"""Parallel build: many specs -> artifacts, compiled by several processes."""

from __future__ import annotations

import fcntl
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeAlias

from moe_fp8.errors import CompileError, JitError
from moe_fp8.jit import worker
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.files import decode
from moe_fp8.jit.progress import BuildRow, Progress, ProgressCallback, open_progress
from moe_fp8.jit.store import FIRST_PAUSE, KernelStore, default_store, longer
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec

__all__ = ["BuildReport", "BuildRow", "Progress", "ProgressCallback", "build"]


@dataclass(frozen=True)
class BuildReport:
    """The result of a build: a row for every distinct spec, in the given order. `seconds` is wall time."""

    rows: tuple[BuildRow, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """The number of kernels that this build compiled."""
        return sum(not row.cached for row in self.rows)

    @property
    def cached(self) -> int:
        """The number of kernels that were in the store, or that another process has compiled meanwhile."""
        return sum(row.cached for row in self.rows)


def build(
    specs: Iterable[KernelSpec],
    store: KernelStore | None = None,
    jobs: int | None = None,
    progress: Progress = None,
) -> BuildReport:
    """Make sure that `store` (default: the process's store) holds a kernel for every spec. Needs no GPU.

    `jobs`: compiler processes; the default is MOE_FP8_JOBS, else the available cores. They are fresh
    processes that import neither the caller's main module nor torch. The build tries all specs, then raises
    CompileError with all failures. It raises ToolchainError if there is no compiler. Processes that build
    into one store at the same time share the work: each kernel is compiled once in all, by as many compiler
    processes in all as the machine has cores, or by `jobs` if this is more.

    `progress` is as in `moe_fp8.warmup.build_plan`.
    """
    started = time.perf_counter()
    store = store or default_store()
    wanted = tuple(dict.fromkeys(specs))
    rows: dict[KernelSpec, BuildRow] = {}
    failures: list[tuple[KernelSpec, str]] = []
    with open_progress(progress, len(wanted)) as report:

        def done(spec: KernelSpec, artifact: Artifact, hit: bool) -> None:
            rows[spec] = _row(spec, artifact, hit)
            report(len(rows), len(wanted), rows[spec])

        missing = []
        for spec in wanted:
            artifact = store.get(store.key(spec))
            if artifact is None:
                missing.append(spec)
            else:
                done(spec, artifact, True)
        if missing:
            store.check_compiler(missing[0])
        jobs = max(1, min(settings().jobs if jobs is None else jobs, len(missing)))
        for spec, result, hit in _get_missing(store, missing, jobs):
            if isinstance(result, str):
                failures.append((spec, result))
            else:
                done(spec, result, hit)
    if failures:
        name = failures[0][0].name
        raise CompileError(name, "\n".join(f"{spec}: {log}" for spec, log in failures))
    return BuildReport(tuple(rows[spec] for spec in wanted), time.perf_counter() - started)


def _row(spec: KernelSpec, artifact: Artifact, cached: bool) -> BuildRow:
    return BuildRow(
        spec,
        artifact.key,
        cached,
        0.0 if cached else artifact.compile_seconds,
        artifact.registers,
        artifact.spill_bytes,
        artifact.local_bytes,
        artifact.warnings,
    )


#: The artifact, or an error message.
_Result: TypeAlias = Artifact | str


def _get_missing(
    store: KernelStore, specs: list[KernelSpec], jobs: int
) -> Iterator[tuple[KernelSpec, _Result, bool]]:
    """(spec, artifact or error message, whether another process compiled it) for each of `specs`.

    Any number of processes may build the same kernels. This one hires a compiler for each of the store's
    slots that it gets, and takes a kernel's lock only when a compiler is free. Without a slot it looks for
    what the others publish. A kernel in other hands is looked at again later, because its holder may fail.
    """
    waiting = deque(specs)
    tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[KernelSpec, _Result]] = queue.SimpleQueue()
    crew: list[tuple[_Compiler | _InProcess, threading.Thread, ExitStack]] = []
    busy, pause, progressed = 0, FIRST_PAUSE, time.monotonic()
    try:
        while waiting or busy:
            if waiting and busy == len(crew) < jobs:
                slot = ExitStack() if jobs == 1 else store.try_slot(jobs, time.monotonic() - progressed)
                if slot is not None:
                    compiler = _InProcess(store) if jobs == 1 else _Compiler(store.location())
                    thread = threading.Thread(target=_run, args=(compiler, slot, tasks, results))
                    crew.append((compiler, thread, slot))
                    try:
                        thread.start()
                    except RuntimeError as error:  # a limit on processes counts threads, too
                        if len(crew) == 1:
                            raise CompileError(waiting[0].name, _unusable(error)) from error
                        crew.pop()
                        slot.close()
                        jobs = len(crew)
            task = _take(store, waiting) if busy < len(crew) else None
            if task is None and busy < jobs:
                task = _look(store, waiting)
            if task is not None and task.artifact is None:
                tasks.put(task)
                busy += 1
            if task is not None and not waiting:
                # Whoever is done now leaves, so that another process gets the slot.
                tasks.put(None)
            if task is not None:
                pause, progressed = FIRST_PAUSE, time.monotonic()
                if task.artifact is not None:
                    yield task.spec, task.artifact, True
                continue
            try:
                # A whole crew at work has nothing to do before the next result.
                spec, result = results.get(timeout=pause if waiting and busy < jobs else None)
            except queue.Empty:
                pause = longer(pause)
                continue
            busy -= 1
            if not isinstance(result, str) and result.key != store.key(spec):
                result = "the kernel sources or NVRTC changed while this process runs; restart it"
            if not isinstance(result, str):
                # The worker wrote the artifact to disk if it could; this process keeps it in memory too.
                store.adopt(result)
            yield spec, result, False
    finally:
        # An interrupted caller gets here early. Workers have nothing to save. Another interrupt may end this
        # block anywhere. The threads end in any case, because the first statement cannot block.
        tasks.put(None)
        for compiler, _, _ in crew:
            compiler.stop()
        for _, thread, slot in crew:
            if thread.ident is not None:
                thread.join()
            # A thread that did not start has not given its slot back.
            slot.close()


@dataclass(frozen=True)
class _Task:
    """A kernel to compile with its lock, or a kernel that another process has published as `artifact`."""

    spec: KernelSpec
    lock: ExitStack
    artifact: Artifact | None


def _take(store: KernelStore, waiting: deque[KernelSpec]) -> _Task | None:
    """The first of `waiting` that no other process holds, or None; those that are held move to the end."""
    for _ in range(len(waiting)):
        spec = waiting.popleft()
        key = store.key(spec)
        lock = store.try_lock(key)
        if lock is None:
            waiting.append(spec)
            continue
        with lock:
            artifact = store.get(key)
            # Only a kernel that must be compiled keeps its lock beyond this block.
            return _Task(spec, lock.pop_all() if artifact is None else lock, artifact)
    return None


def _look(store: KernelStore, waiting: deque[KernelSpec]) -> _Task | None:
    """The first of `waiting` if it is published; else it moves to the end, and the result is None.

    Only one is looked for, because a rank with many kernels may wait for a minute. Once everything is
    published, every look finds a kernel.
    """
    if not waiting:
        return None
    spec = waiting.popleft()
    key = store.key(spec)
    artifact = store.get(key)
    if artifact is None:
        waiting.append(spec)
        # If another process holds the kernel, its `_LOCK_SECONDS` begin now, while this rank has no slot. The
        # look is short: other ranks must not take it for a holder, and it comes ten times a second.
        lock = store.try_lock(key, clean=False)
        if lock is not None:
            lock.close()
        return None
    return _Task(spec, ExitStack(), artifact)


def _run(
    compiler: _Compiler | _InProcess,
    slot: ExitStack,
    tasks: queue.SimpleQueue[_Task | None],
    results: queue.SimpleQueue[tuple[KernelSpec, _Result]],
) -> None:
    """Feed a compiler in a thread of its own, until a task is None; then end it and give its slot back."""
    with slot:
        while (task := tasks.get()) is not None:
            try:
                with task.lock:
                    result = compiler.compile(task.spec)
            except Exception as error:
                # The build waits for a result of every task, so any error must become a result.
                result = _unusable(error)
            results.put((task.spec, result))
        tasks.put(None)  # One None is for all threads.
        compiler.close()


def _unusable(error: Exception) -> str:
    return f"the compiler cannot be used ({type(error).__name__}: {error})"


class _InProcess:
    """The compiler of a build with one job: it needs no process of its own."""

    def __init__(self, store: KernelStore) -> None:
        self._store = store

    def compile(self, spec: KernelSpec) -> _Result:
        try:
            return self._store.compile(spec)
        except CompileError as error:
            return error.log

    def stop(self) -> None:
        """There is nothing to stop: NVRTC cannot be interrupted."""

    def close(self) -> None:
        """There is nothing to close."""


class _Compiler:
    """One worker process, which starts with the first kernel and is started again if it dies."""

    def __init__(self, location: dict[str, str | None]) -> None:
        self._location = location
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: IO[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Kill the process, if it runs, and start no other. Any thread may call it; `close` does the rest."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if it runs. Only the thread that calls `compile` may call it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, self._replies):
            # Closing fails if unsent bytes remain for the ended process.
            with suppress(OSError):
                _pipe(stream).close()

    def compile(self, spec: KernelSpec) -> _Result:
        process = self._running()
        reply = None
        try:
            worker.write_frame(_pipe(process.stdin), {"spec": asdict(spec)})
            reply = worker.read_frame(_pipe(self._replies))
        except (OSError, ValueError):
            # The pipe broke, or it holds something else than a reply. Both count as no reply.
            pass
        if reply is None:
            self.close()
            return f"the compiler process ended early (exit status {process.returncode})"
        header, payload = reply
        if "error" in header:
            return str(header["error"])
        artifact = decode(payload)
        return "the artifact was damaged on its way" if artifact is None else artifact

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise OSError("the build was stopped")
            if self._process is None:
                # multiprocessing would import the caller's main module, and so torch, in every child.
                # With -c, the working folder is searched first until the path is replaced. Ctrl-C reaches the
                # workers, too, but this process tells of it and ends them.
                # Replies have a pipe of their own, since the interpreter's start may print to stdout.
                self._replies, writer = _reply_pipe()
                code = (
                    "import sys; sys.path[:] = sys.argv[1:]; "
                    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
                    f"from moe_fp8.jit.worker import main; main({writer})"
                )
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", code, *_import_path()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        pass_fds=(writer,),
                    )
                finally:
                    os.close(writer)
                worker.write_frame(_pipe(self._process.stdin), self._location)
            return self._process


def _reply_pipe() -> tuple[IO[bytes], int]:
    """A pipe: the end to read, and the descriptor to write to.

    Where a standard stream is closed, its number is free, but a child has a stream of its own there.
    """
    reader, writer = os.pipe()
    try:
        return os.fdopen(reader, "rb"), fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(writer)


def _import_path() -> list[str]:
    """The folders in which a worker finds this package, and what it imports, where this process found them.

    Python itself ignores entries that are no text. An empty entry is the working folder of an interactive
    interpreter, whose files no worker may run.
    """
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    package = str(Path(__file__).parents[2])
    return path if package in path else [package, *path]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise JitError("a compiler process was started without pipes")
    return stream
