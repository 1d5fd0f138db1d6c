"""Ranks that build the same kernels share the work, whatever happens to one of them.

The compiler is replaced by one that sleeps, so that the wall time does not depend on the cores of a machine:
each process with one job stands for a rank with a core of its own.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moe_fp8.jit import runtime
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import build
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]

#: A rank. It prints a line before the build, a line for each compilation, and a line of results.
_RANK = """
import json, os, sys, time
from pathlib import Path
from moe_fp8.errors import CompileError
from moe_fp8.jit import store as module
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import build
from moe_fp8.jit.key import kernel_key
from moe_fp8.jit.sources import SourceTree
from tests.cpu.jit_kernels import spec
cache, kernels, count, jobs, seconds, broken, stuck = json.loads(sys.argv[1])
def sleepy(one, sources):
    factor = dict(one.defines)["FACTOR"]
    print(f"compiles {factor}", flush=True)
    time.sleep(600 if factor == stuck else seconds)
    if factor == broken:
        raise CompileError(one.name, f"kernel {factor} is broken")
    return Artifact(kernel_key(one, sources), one.name, b"code", 1, 0, 0, 0, "13.0", seconds, "", ())
if seconds:
    module.compile_kernel = sleepy
store = module.KernelStore(cache, SourceTree(Path(kernels)))
# The real compiler refuses 33 threads.
specs = [spec(factor=factor, num_threads=33 if factor == broken else 128) for factor in range(1, count + 1)]
store.key(specs[0])
print("started", flush=True)
sys.stdin.readline()
cpu, error, report = time.process_time(), "", None
began = time.time()
try:
    report = build(specs, store, jobs, False)
except CompileError as caught:
    error = str(caught)
told = {"began": began, "ended": time.time(), "cpu": time.process_time() - cpu, "error": error}
if report is not None:
    told.update(compiled=report.compiled, cached=report.cached, rows=len(report.rows))
print(json.dumps(told))
"""


def start(
    tmp_path: Path,
    *,
    count: int,
    jobs: int = 1,
    seconds: float = 0.0,
    broken: int | None = None,
    stuck: int | None = None,
) -> subprocess.Popen[str]:
    """A rank that is ready to build. With `seconds` its compiler sleeps; without, it is the real compiler.

    The kernel `broken` does not compile, and the kernel `stuck` takes for ever.
    """
    told = [str(tmp_path / "cache"), str(tmp_path / "kernels"), count, jobs, seconds, broken, stuck]
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, json.dumps(told)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> tuple[list[int], dict[str, Any]]:
    """(the kernels that the rank tried to compile, its results)."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    *compiled, told = out.splitlines()
    return [int(line.removeprefix("compiles ")) for line in compiled], json.loads(told)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels", "tiny")


def test_eight_ranks_share_the_work(tmp_path: Path) -> None:
    count, seconds = 32, 0.25
    ranks = [start(tmp_path, count=count, seconds=seconds) for _ in range(8)]
    for rank in ranks:
        go(rank)
    results = [finish(rank) for rank in ranks]
    compiled = [factor for factors, _ in results for factor in factors]
    assert sorted(compiled) == list(range(1, count + 1)), "each kernel is compiled once in all"
    assert [told["rows"] for _, told in results] == [count] * 8
    assert sum(told["compiled"] for _, told in results) == count
    wall = max(told["ended"] for _, told in results) - min(told["began"] for _, told in results)
    # One rank alone takes 8 s. Eight ranks take 1 s; the rest is left to a busy machine.
    assert wall < count * seconds * 0.8
    assert max(told["cpu"] for _, told in results) < wall / 2, "a rank that waits burns a core"


def test_ranks_with_compiler_processes_share_the_work(tmp_path: Path) -> None:
    ranks = [start(tmp_path, count=12, jobs=2) for _ in range(4)]
    for rank in ranks:
        go(rank)
    results = [finish(rank)[1] for rank in ranks]
    assert sum(told["compiled"] for told in results) == 12
    assert [told["compiled"] + told["cached"] for told in results] == [12] * 4
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 12
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_rank_that_dies_with_a_lock_blocks_nobody(tmp_path: Path) -> None:
    first = start(tmp_path, count=4, seconds=0.05, stuck=2)
    go(first)
    assert first.stdout is not None
    assert [first.stdout.readline() for _ in range(2)] == ["compiles 1\n", "compiles 2\n"]
    second = start(tmp_path, count=4, seconds=0.05)
    go(second)
    # The second rank does not wait for the held kernel 2 while there are others.
    assert second.stdout is not None
    assert [second.stdout.readline() for _ in range(2)] == ["compiles 3\n", "compiles 4\n"]
    time.sleep(0.2)
    assert second.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    killed = time.time()
    compiled, told = finish(second)
    assert (compiled, told["rows"]) == ([2], 4)
    assert told["ended"] - killed < 5


def test_a_killed_rank_with_compiler_processes_holds_up_none(tmp_path: Path) -> None:
    victim, survivor = (start(tmp_path, count=12, jobs=2) for _ in range(2))
    go(victim)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*.kernel")) and time.monotonic() < deadline:
        time.sleep(0.01)
    go(survivor)
    time.sleep(0.1)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert finish(survivor)[1]["rows"] == 12
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 12


@pytest.mark.parametrize(
    ("seconds", "jobs", "error"), [(0.1, 1, "kernel 3 is broken"), (0.0, 2, "static assertion")]
)
def test_every_rank_reports_a_kernel_that_does_not_compile(
    tmp_path: Path, seconds: float, jobs: int, error: str
) -> None:
    ranks = [start(tmp_path, count=6, jobs=jobs, seconds=seconds, broken=3) for _ in range(3)]
    for rank in ranks:
        go(rank)
    results = [finish(rank) for rank in ranks]
    assert [error in told["error"] for _, told in results] == [True] * 3
    if seconds:
        compiled = [factor for factors, _ in results for factor in factors]
        assert sorted(compiled) == [1, 2, 3, 3, 3, 4, 5, 6], "each whole kernel is compiled once in all"
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    found = [store.get(store.key(spec(factor=factor))) is not None for factor in range(1, 7)]
    assert found == [True, True, False, True, True, True]


def test_a_rank_that_comes_late_starts_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels are in other hands: this rank waits for them, without processes of its own."""
    monkeypatch.setattr("moe_fp8.jit.build._Compiler._running", lambda self: pytest.fail("started"))
    ranks = [start(tmp_path, count=2, seconds=1.0) for _ in range(2)]
    for rank in ranks:
        go(rank)
        assert rank.stdout is not None
    began = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    assert sorted(began) == ["compiles 1\n", "compiles 2\n"]
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    report = build([spec(factor=1), spec(factor=2)], store, 2, False)
    assert (report.compiled, report.cached) == (0, 2)
    for rank in ranks:
        finish(rank)


def test_the_lock_does_not_outlive_its_holder_in_a_forked_process(tmp_path: Path) -> None:
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    key = store.key(spec())
    lock = store.try_lock(key)
    assert lock is not None and store.try_lock(key) is None
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        lock.close()
        again = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels")).try_lock(key)
        assert again is not None
        again.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_rank_with_a_forked_process_holds_no_lock(tmp_path: Path) -> None:
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    key = store.key(spec())
    told, tell = os.pipe()
    rank = os.fork()
    if rank == 0:
        locks = [store.try_lock(key), store.try_slot(1)]
        if os.fork() == 0:
            os.write(tell, b"%d" % os.getpid() if None not in locks else b"0")
        time.sleep(600)
        os._exit(0)
    child = int(os.read(told, 20))
    try:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        assert child and store.try_lock(key) is not None
        other = KernelStore(tmp_path / "cache")
        assert None not in [other.try_slot(1) for _ in range(os.cpu_count() or 1)]
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def ends_well(child: int) -> bool:
    """Whether a forked process ends with 0 in a few seconds; it is killed if it does not."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_process_that_is_forked_while_a_thread_compiles_waits_no_longer_than_others(tmp_path: Path) -> None:
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    key = store.key(spec())
    lock = store.try_lock(key)
    assert lock is not None
    with store._mutex:  # as a thread holds it for a moment
        child = os.fork()
        if child == 0:
            while store.try_lock(key) is None:
                time.sleep(0.01)
            os._exit(0)
    time.sleep(0.1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    lock.close()
    assert ends_well(child)


def test_a_process_that_is_forked_while_a_thread_loads_loads_too() -> None:
    loading, ended = threading.Event(), threading.Event()

    class Store(KernelStore):
        def get_or_compile(self, spec: KernelSpec) -> tuple[Artifact, bool]:
            if threading.current_thread() is not threading.main_thread():
                loading.set()
                ended.wait(20)
            return Artifact("00", spec.name, b"", 1, 0, 0, 0, "13.0", 0.0, "", ()), True

    runtime._RUNTIME._store, before = Store(None), runtime._RUNTIME._store
    runtime._RUNTIME._loader, loader = (lambda *_: object()), runtime._RUNTIME._loader
    thread = threading.Thread(target=runtime.get_kernel, args=(spec(),))
    try:
        thread.start()
        assert loading.wait(20)
        child = os.fork()
        if child == 0:
            try:
                runtime.get_kernel(spec())
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert ends_well(child)
    finally:
        ended.set()
        thread.join()
        runtime._RUNTIME._by_spec.pop(spec(), None)
        runtime._RUNTIME._store, runtime._RUNTIME._loader = before, loader


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE])
def test_an_error_that_passes_does_not_give_up_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, opened, failed = KernelStore(tmp_path / "cache"), os.open, []

    def open_once(path: Any, *options: Any, **more: Any) -> int:
        if str(path).endswith((".lock", ".tmp")) and len(failed) < 2:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return opened(path, *options, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", Mock(side_effect=OSError(number, os.strerror(number))))
        store.publish("none", b"0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_once)
        lock = store.try_lock("00")
        store.publish("one", b"1")
    assert len(failed) == 2 and lock is not None and not (tmp_path / "cache" / "one").exists()
    store.publish("two", b"2")
    assert (tmp_path / "cache" / "two").read_bytes() == b"2"


def test_a_forked_process_that_leaves_a_lock_closes_no_file_of_its_own(tmp_path: Path) -> None:
    store = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    lock = store.try_lock(store.key(spec()))
    assert lock is not None
    child = os.fork()
    if child == 0:
        try:
            own = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
            lock.close()
            for descriptor in own:
                os.fstat(descriptor)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert ends_well(child)
    # The parent's lock is as it was.
    assert KernelStore(tmp_path / "cache").try_lock(store.key(spec())) is None
    lock.close()


def test_a_rank_that_waits_for_a_lock_takes_what_is_published(tmp_path: Path) -> None:
    store, stuck = (KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels")) for _ in range(2))
    lock = stuck.try_lock(stuck.key(spec()))
    assert lock is not None
    publishing = threading.Timer(0.2, stuck.compile, [spec()])
    publishing.start()
    began = time.monotonic()
    assert store.get_or_compile(spec())[1]
    assert time.monotonic() - began < 10
    publishing.join()
    lock.close()


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """The time that the cores have spent on a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_rank_that_waits_for_slots_sleeps(tmp_path: Path) -> None:
    """Many jobs that wait for a slot of a rank at work take a small part of one core."""
    stuck = KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels"))
    count = 16
    slots = [stuck.try_slot(count) for _ in range(max(count, os.cpu_count() or 1))]
    assert None not in slots
    rank = start(tmp_path, count=count, jobs=count)
    before = cpu_seconds(rank)
    go(rank)
    time.sleep(1)
    assert rank.poll() is None and not list((tmp_path / "cache").glob("*.kernel"))
    assert cpu_seconds(rank) - before < 0.2
    assert slots[0] is not None
    slots[0].close()
    assert finish(rank)[1]["compiled"] == count


def test_a_damaged_file_is_told_once_by_a_rank_that_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_fp8.jit.store._LOCK_SECONDS", 0.5)
    store, stuck = (KernelStore(tmp_path / "cache", SourceTree(tmp_path / "kernels")) for _ in range(2))
    path = store.path(stuck.key(spec()))
    lock = stuck.try_lock(stuck.key(spec()))
    assert lock is not None and path is not None
    path.write_bytes(b"damaged")
    assert build([spec()], store, 1, False).compiled == 1
    assert [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()] == [
        f"kernel file {path} is damaged and will be rebuilt"
    ]
