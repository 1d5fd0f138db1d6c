"""Parallel build: many specs -> artifacts, compiled by several processes."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TypeAlias

from moe_fp8.errors import CompileError, JitError
from moe_fp8.jit import worker
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.files import decode
from moe_fp8.jit.progress import BuildRow, Progress, ProgressCallback, open_progress
from moe_fp8.jit.store import KernelStore, default_store
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
        """The number of kernels that the store already held."""
        return sum(row.cached for row in self.rows)


def build(
    specs: Iterable[KernelSpec],
    store: KernelStore | None = None,
    jobs: int | None = None,
    progress: Progress = None,
) -> BuildReport:
    """Make sure that `store` (default: the process's store) holds a kernel for every spec. Needs no GPU.

    `jobs`: compiler processes; the default is MOE_FP8_JOBS, else the available cores. They are fresh
    processes that import neither the caller's main module nor torch. Builds of several processes on one store
    share the work: each kernel is compiled once, and all builds together run `jobs` compiler processes. The
    build tries all specs, then raises CompileError with all failures. It raises ToolchainError if there is no
    compiler.
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
        jobs = min(settings().jobs if jobs is None else jobs, len(missing))
        results = _compile_here(store, missing) if jobs <= 1 else _compile_apart(store, missing, jobs)
        for spec, result in results:
            if isinstance(result, str):
                failures.append((spec, result))
            else:
                done(spec, *result)
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


#: (artifact, whether the store already held it), or an error message.
_Result: TypeAlias = tuple[Artifact, bool] | str


#: Seconds to wait before a kernel is looked for again that another process is compiling.
_PAUSE_S = 0.02


def _compile_here(store: KernelStore, specs: list[KernelSpec]) -> Iterator[tuple[KernelSpec, _Result]]:
    waiting = deque(specs)
    while waiting:
        spec = waiting.popleft()
        try:
            found = store.try_compile(spec)
        except CompileError as error:
            yield spec, error.log
        else:
            if found is not None:
                yield spec, found
            else:
                waiting.append(spec)
                time.sleep(_PAUSE_S)


def _compile_apart(
    store: KernelStore, specs: list[KernelSpec], jobs: int
) -> Iterator[tuple[KernelSpec, _Result]]:
    tasks: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
    for spec in specs:
        tasks.put(spec)
    results: queue.SimpleQueue[tuple[KernelSpec, _Result]] = queue.SimpleQueue()
    compilers = [_Compiler(store, number) for number in range(jobs)]
    threads = [threading.Thread(target=compiler.run, args=(tasks, results)) for compiler in compilers]
    try:
        for thread in threads:
            thread.start()
        for _ in specs:
            spec, result = results.get()
            if not isinstance(result, str):
                # The worker wrote the artifact to disk if it could; this process keeps it in memory too.
                store.adopt(result[0])
            yield spec, result
    finally:
        # An interrupted caller gets here early. Workers have nothing to save.
        for compiler in compilers:
            compiler.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class _Compiler:
    """One worker process, which is restarted if it dies, and the loop that feeds it from a thread.

    The process runs only while this build holds the worker's slot of the store. Without it, the loop looks
    for what the holders publish.
    """

    def __init__(self, store: KernelStore, number: int) -> None:
        self._store = store
        self._slot = store.slot(number)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(
        self,
        tasks: queue.SimpleQueue[KernelSpec],
        results: queue.SimpleQueue[tuple[KernelSpec, _Result]],
    ) -> None:
        while not self._stopped:
            try:
                spec = tasks.get_nowait()
            except queue.Empty:
                break
            try:
                result = self._compile(spec) if self._slot.take() else self._look(spec)
            except Exception as error:
                # The build waits for a result of every task, so any error must become a result.
                result = f"the compiler process cannot be used ({type(error).__name__}: {error})"
            if result is None:  # another process is compiling it
                tasks.put(spec)
                time.sleep(_PAUSE_S)
            else:
                results.put((spec, result))
        self.stop()

    def _look(self, spec: KernelSpec) -> _Result | None:
        artifact = self._store.get(self._store.key(spec))
        return None if artifact is None else (artifact, True)

    def stop(self) -> None:
        """End the process, if it runs, and start no other."""
        with self._lock:
            self._stopped = True
            process, self._process = self._process, None
        if process is not None:
            _end(process)
        self._slot.release()

    def _compile(self, spec: KernelSpec) -> _Result | None:
        process = self._running()
        reply = None
        try:
            worker.write_frame(_pipe(process.stdin), {"spec": worker.spec_to_json(spec)})
            reply = worker.read_frame(_pipe(process.stdout))
        except (OSError, ValueError):
            # The pipe broke, or stop() closed it. Both count as no reply.
            pass
        if reply is None:
            with self._lock:
                if self._process is process:
                    self._process = None
            _end(process)
            return f"the compiler process ended early (exit status {process.returncode})"
        header, payload = reply
        if "busy" in header:
            return None
        if "error" in header:
            return str(header["error"])
        artifact = decode(payload)
        return "the artifact was damaged on its way" if artifact is None else (artifact, bool(header["hit"]))

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise OSError("the build was stopped")
            if self._process is None:
                # multiprocessing would import the caller's main module, and so torch, in every child.
                code = (
                    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
                    "from moe_fp8.jit.worker import main; main()"
                )
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                worker.write_frame(_pipe(self._process.stdin), self._store.location())
            return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        # Closing fails if unsent bytes remain for the ended process.
        with suppress(OSError):
            _pipe(stream).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise JitError("a compiler process was started without pipes")
    return stream
