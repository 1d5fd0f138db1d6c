from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import pytest

from moe_fp8.errors import CompileError, ToolchainError
from moe_fp8.jit import build as build_module
from moe_fp8.jit import progress as progress_module
from moe_fp8.jit import worker
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import _Compiler, _get_missing, _import_path, build
from moe_fp8.jit.progress import BuildRow, line_printer
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.jit.worker import read_frame, serve, write_frame
from moe_fp8.settings import settings
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> SourceTree:
    return SourceTree(write_kernels(tmp_path / "kernels", "tiny", "other"))


_SPECS = [spec(factor=factor) for factor in (2, 3, 4)] + [spec("other")]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("on_disk", [True, False])
def test_build_then_all_cached(tmp_path: Path, sources: SourceTree, jobs: int, on_disk: bool) -> None:
    root = tmp_path / "cache" if on_disk else None
    store = KernelStore(root, sources)
    seen: list[tuple[int, int, BuildRow]] = []
    report = build([*_SPECS, _SPECS[0]], store, jobs, lambda *event: seen.append(event))
    assert [row.spec for row in report.rows] == _SPECS
    assert [row.key for row in report.rows] == [store.key(each) for each in _SPECS]
    assert (report.compiled, report.cached) == (4, 0)
    assert all(row.seconds > 0 and row.registers > 0 and row.spill_bytes == 0 for row in report.rows)
    assert [(done, total) for done, total, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {row for _, _, row in seen} == set(report.rows)

    again = build(_SPECS, KernelStore(root, sources) if on_disk else store, jobs, False)
    assert (again.compiled, again.cached) == (0, 4)
    assert all(row.seconds == 0 for row in again.rows)


@pytest.mark.parametrize("jobs", [1, 2])
def test_failures_are_reported_after_the_rest_is_done(tmp_path: Path, sources: SourceTree, jobs: int) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    broken = [spec(num_threads=33), spec(num_threads=34)]
    with pytest.raises(CompileError, match="static assertion") as caught:
        build([*broken, *_SPECS], store, jobs, False)
    assert all(str(each) in str(caught.value) for each in broken)
    assert str(caught.value).count("failed to compile") == 1, "the log of each kernel has no heading"
    assert all(KernelStore(tmp_path / "cache", sources).get(store.key(each)) for each in _SPECS)


def test_a_compiler_that_dies_is_replaced(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = _Compiler._running
    killed: list[int] = []

    def kill_the_first(self: _Compiler) -> subprocess.Popen[bytes]:
        process = running(self)
        if not killed:
            killed.append(process.pid)
            process.kill()
            process.wait()
        return process

    monkeypatch.setattr(_Compiler, "_running", kill_the_first)
    store = KernelStore(tmp_path / "cache", sources)
    with pytest.raises(CompileError, match="ended early"):
        build(_SPECS, store, 2, False)
    assert sum(store.get(store.key(each)) is not None for each in _SPECS) == 3
    assert build(_SPECS, store, 2, False).compiled == 1


@pytest.mark.parametrize(
    ("kind", "method"), [(_Compiler, "stop"), (threading.Thread, "join"), (subprocess.Popen, "wait")]
)
def test_a_second_interrupt_leaves_no_thread_no_process_and_no_lock(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    """The second interrupt comes while the build ends its compilers and threads because of the first."""
    original, running = getattr(kind, method), _Compiler._running
    processes: list[subprocess.Popen[bytes]] = []

    def interrupted(self: object, *given: object, **named: object) -> object:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return original(self, *given, **named)

    def noted(self: _Compiler) -> subprocess.Popen[bytes]:
        processes.append(running(self))
        return processes[-1]

    monkeypatch.setattr(_Compiler, "_running", noted)
    before = set(threading.enumerate())
    store = KernelStore(tmp_path / "cache", sources)
    building = _get_missing(store, [spec(factor=factor) for factor in range(2, 12)], 2)
    assert isinstance(building, Generator)
    next(building)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, interrupted)
        with suppress(KeyboardInterrupt):
            building.close()
    deadline = time.monotonic() + 120
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert processes and all(process.returncode is not None for process in processes)
    assert not store._lock_files


def test_a_build_that_ends_early_waits_for_no_compiler(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it early. Here, each compiler works on a kernel that takes long."""
    interpreter = tmp_path / "interpreter"
    interpreter.write_text("#!/bin/sh\nexec sleep 30\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    before = set(threading.enumerate())
    store = KernelStore(tmp_path / "cache", sources)
    KernelStore(tmp_path / "cache", sources).get_or_compile(_SPECS[2])
    building = _get_missing(store, _SPECS[:3], 3)
    assert isinstance(building, Generator)
    assert next(building)[0] == _SPECS[2]
    began = time.monotonic()
    building.close()
    assert time.monotonic() - began < 15
    assert set(threading.enumerate()) <= before
    assert not store._lock_files


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_thread_that_cannot_start_keeps_no_slot(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = KernelStore(tmp_path / "cache", sources)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CompileError, match="can't start new thread"):
            build(_SPECS, store, jobs, False)
    assert not store._lock_files
    assert build(_SPECS, store, jobs, False).compiled == 4


def test_a_limit_on_threads_leaves_the_compilers_that_have_one(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def start_one(self: threading.Thread) -> None:
        if threading.active_count() > before:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    store, before = KernelStore(tmp_path / "cache", sources), threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert build(_SPECS, store, 2, False).compiled == 4
    assert len(refused) == 1
    assert not store._lock_files


def test_a_reply_that_is_damaged_fails_its_kernel_only(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, store = worker.read_frame, KernelStore(tmp_path / "cache", sources)

    def cut(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
        reply = read(stream)
        assert reply is not None
        return reply[0], reply[1][:-1]

    compiler = _Compiler(store.location())
    try:
        with monkeypatch.context() as patch:
            # The whole reply stays in the pipe, behind what is no JSON.
            other = b"\4\0\0\0" + bytes(8) + b"oops"
            patch.setattr(worker, "read_frame", lambda stream: read(io.BytesIO(other)))
            assert "the compiler process ended early" in str(compiler.compile(_SPECS[0]))
            patch.setattr(worker, "read_frame", cut)
            assert compiler.compile(_SPECS[1]) == "the artifact was damaged on its way"
        result = compiler.compile(_SPECS[2])
        assert not isinstance(result, str) and result.key == store.key(_SPECS[2])
    finally:
        compiler.close()


def test_ctrl_c_is_left_to_the_process_that_builds(tmp_path: Path, sources: SourceTree) -> None:
    """A terminal sends it to the compilers, too. They must not end with a traceback of their own."""
    compiler = _Compiler(KernelStore(tmp_path / "cache", sources).location())
    try:
        assert not isinstance(compiler.compile(_SPECS[0]), str)
        process = compiler._running()
        process.send_signal(signal.SIGINT)
        assert not isinstance(compiler.compile(_SPECS[1]), str)
        assert compiler._running() is process
        compiler.stop()
        with pytest.raises(OSError, match="stopped"):
            compiler.compile(_SPECS[2])
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("count", "given", "default"), [(1, 4, 4), (1, None, 4), (3, 0, 4), (3, 1, 4), (3, None, 1)]
)
def test_one_kernel_or_one_job_needs_no_process_and_no_slot(
    sources: SourceTree, monkeypatch: pytest.MonkeyPatch, count: int, given: int | None, default: int
) -> None:
    store = KernelStore(None, sources)
    monkeypatch.setattr(_Compiler, "_running", lambda self: pytest.fail("a process was started"))
    monkeypatch.setattr(store, "try_slot", lambda *_: pytest.fail("a slot was taken"))
    monkeypatch.setattr(build_module, "settings", lambda: replace(settings(), jobs=default))
    assert build(_SPECS[:count], store, given, False).compiled == count


def test_a_compiler_that_cannot_start_fails_its_kernels_and_ends_the_build(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: _Compiler) -> subprocess.Popen[bytes]:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(_Compiler, "_running", broken)
    with pytest.raises(CompileError, match="broken on purpose"):
        build(_SPECS, KernelStore(tmp_path / "cache", sources), 2, False)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_missing_compiler_is_told_before_anything_is_tried(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc cannot be loaded")

    store = KernelStore(tmp_path / "cache", sources)
    build(_SPECS[:1], store, 1, False)
    monkeypatch.setattr("moe_fp8.jit.store.nvrtc", missing)
    assert build(_SPECS[:1], store, jobs, False).cached == 1
    with pytest.raises(ToolchainError, match=r"^libnvrtc cannot be loaded$"):
        build(_SPECS, store, jobs, False)
    with pytest.raises(ToolchainError, match=r"^libnvrtc cannot be loaded$"):
        store.compile(_SPECS[1])


def test_workers_do_not_import_the_callers_main(tmp_path: Path, sources: SourceTree) -> None:
    """The script has no __main__ guard, so multiprocessing's spawn would run it and its imports again."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
from pathlib import Path
print("main runs")
from moe_fp8.jit.build import build
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec
store = KernelStore({str(tmp_path / "cache")!r}, SourceTree(Path({str(tmp_path / "kernels")!r})))
report = build([spec(factor=f) for f in (2, 3, 4)], store, jobs=2, progress=True)
print(report.compiled)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "main runs\n3\n"
    assert done.stderr.count("compiled tiny[") == 3
    assert "3 kernels ready, 3 compiled now" in done.stderr


def test_a_worker_runs_no_file_of_the_working_folder(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    for name in ("json", "struct", "subprocess"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(folder)
    # Python ignores the path, and takes the empty text for the working folder.
    monkeypatch.setattr(sys, "path", [tmp_path, "", *sys.path])
    assert build(_SPECS[:2], KernelStore(None, sources), 2, False).compiled == 2
    assert not (tmp_path / "ran").exists()


def test_a_worker_finds_a_package_that_an_interpreter_found_in_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", Path("no text"), str(tmp_path)])
    assert _import_path() == [str(_ROOT), str(tmp_path)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(_ROOT)])
    assert _import_path() == [str(tmp_path), str(_ROOT)]


@pytest.mark.parametrize("text", ["x", "a line that is longer than the lengths in front of a reply"])
def test_what_an_interpreter_prints_at_its_start_is_no_reply(
    tmp_path: Path,
    sources: SourceTree,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(f"print({text!r}, flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert build(_SPECS, KernelStore(tmp_path / "cache", sources), 2).compiled == len(_SPECS)
    assert capfd.readouterr().out == "", "stdout is the caller's, such as for --json"


def test_replies_do_not_take_the_place_of_a_standard_stream_that_is_closed() -> None:
    """A compiler has a stream of its own there, to which the interpreter or a warning may print."""
    program = (
        "import os; from moe_fp8.jit.build import _reply_pipe; "
        "[os.close(number) for number in (0, 1, 2)]; os._exit(_reply_pipe()[1] < 3)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sources_that_change_while_a_process_runs_are_an_error(tmp_path: Path, sources: SourceTree) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    keys = [store.key(each) for each in _SPECS]
    header = tmp_path / "kernels" / "common" / "scaled.cuh"
    header.write_text(f"{header.read_text()}// changed\n")
    with pytest.raises(CompileError, match="changed while this process runs; restart it"):
        build(_SPECS, store, 2, False)
    assert not any(map(store.get, keys))


def test_lines(sources: SourceTree) -> None:
    stream = io.StringIO()
    store = KernelStore(None, sources)
    build(_SPECS[:1], store, 1, False)
    build(_SPECS[:2], store, 1, line_printer(stream))
    first, last = stream.getvalue().splitlines()
    assert first.startswith("[2/2] compiled tiny[factor=3,")
    assert last == "2 kernels ready, 1 compiled now"


def test_a_terminal_gets_a_bar(
    sources: SourceTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True, raising=False)
    assert build(_SPECS[:1], KernelStore(None, sources), 1).compiled == 1
    shown = capsys.readouterr().err
    assert "1/1" in shown
    assert "tiny[factor=2," in shown


def test_a_row_has_the_numbers_of_its_kernel(sources: SourceTree) -> None:
    store = KernelStore(None, sources)
    store.put(Artifact(store.key(spec()), "tiny", b"cubin", 1, 2, 3, 4, "13.0", 5.0, "a log", ("a warning",)))
    (row,) = build([spec()], store, 1, False).rows
    assert (row.registers, row.spill_bytes, row.local_bytes, row.warnings) == (1, 2, 3, ("a warning",))
    assert row.cached and row.seconds == 0


def test_an_empty_build_is_a_build(tmp_path: Path) -> None:
    assert build([], KernelStore(None), progress=False).rows == ()


def test_a_message_that_is_cut_off_is_no_message() -> None:
    stream = io.BytesIO()
    write_frame(stream, {"spec": "tiny"}, b"payload")
    whole = stream.getvalue()
    assert read_frame(io.BytesIO(whole)) == ({"spec": "tiny"}, b"payload")
    assert not any(read_frame(io.BytesIO(whole[:size])) for size in range(len(whole)))


def test_a_worker_without_a_first_message_ends_in_silence() -> None:
    """The process that started it has died."""
    command = [sys.executable, "-c", "from moe_fp8.jit.worker import main; main(1)"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_worker_whose_replies_nobody_reads_ends(tmp_path: Path, sources: SourceTree) -> None:
    requests = io.BytesIO()
    write_frame(requests, {"spec": asdict(spec())})
    requests.seek(0)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as replies:
        serve(KernelStore(tmp_path, sources), requests, replies)
