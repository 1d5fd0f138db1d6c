from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_fp8.jit import files
from moe_fp8.jit import store as store_module
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.files import decode, encode
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]

_ARTIFACT = Artifact(
    key="0" * 32,
    name="tiny",
    cubin=b"\x7fELF" + bytes(range(256)),
    registers=10,
    spill_bytes=0,
    local_bytes=0,
    static_smem_bytes=128,
    nvrtc="13.0",
    compile_seconds=0.25,
    log="a log",
    warnings=("one", "two"),
)


@pytest.fixture
def sources(tmp_path: Path) -> SourceTree:
    return SourceTree(write_kernels(tmp_path / "kernels", "tiny"))


def test_encoding_round_trips_and_detects_every_change() -> None:
    data = encode(_ARTIFACT)
    assert decode(data) == _ARTIFACT
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        assert decode(bytes(damaged)) is None, position
    for length in (0, 1, 20, 60, len(data) - 1):
        assert decode(data[:length]) is None, length
    assert decode(data + b"x") is None


def test_an_artifact_of_another_version_is_as_good_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "fields", lambda kind: [*fields(kind), SimpleNamespace(name="__doc__")])
        newer = encode(_ARTIFACT)
    with monkeypatch.context() as patch:
        patch.setattr(files, "fields", lambda kind: fields(kind)[:-1])
        older = encode(_ARTIFACT)
    assert decode(newer) is None
    assert decode(older) is None


def test_second_process_hits(tmp_path: Path, sources: SourceTree) -> None:
    first, hit = KernelStore(tmp_path / "cache", sources).get_or_compile(spec())
    assert not hit
    second, hit = KernelStore(tmp_path / "cache", sources).get_or_compile(spec())
    assert hit
    assert second == first


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o755), (0o022, 0o755), (0o077, 0o700)])
def test_others_may_read_but_not_write(tmp_path: Path, sources: SourceTree, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        KernelStore(tmp_path / "cache", sources).get_or_compile(spec())
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()}
    # Nobody else may open a lock, or he could hold it.
    assert modes == {".kernel": 0o644, ".lock": 0o600}
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == mode


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "swap", "pipe"])
def test_damaged_files_are_rebuilt(tmp_path: Path, sources: SourceTree, damage: str) -> None:
    root = tmp_path / "cache"
    store = KernelStore(root, sources)
    artifact, _ = store.get_or_compile(spec())
    path = store.path(artifact.key)
    assert path is not None
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 0x40]) + data[-99:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pipe":
        path.unlink()
        os.mkfifo(path, 0o644)
    else:
        # This is a whole artifact of another kernel under this kernel's name.
        other, _ = store.get_or_compile(spec(factor=5))
        other_path = store.path(other.key)
        assert other_path is not None
        path.write_bytes(other_path.read_bytes())
    fresh, hit = KernelStore(root, sources).get_or_compile(spec())
    assert not hit
    assert fresh.cubin == artifact.cubin
    assert path.read_bytes()[:17] == data[:17]
    assert KernelStore(root, sources).get_or_compile(spec())[1]


def test_threads_compile_once(tmp_path: Path, sources: SourceTree) -> None:
    for root in (tmp_path / "cache", None):
        store = KernelStore(root, sources)
        hits: list[bool] = []

        def ask(store: KernelStore, hits: list[bool]) -> None:
            hits.append(store.get_or_compile(spec())[1])

        threads = [threading.Thread(target=ask, args=(store, hits)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(hits) == [False] + [True] * 7


_DIE_WITH_THE_LOCK = """
import json, os, sys, time
from moe_fp8.jit import store as module
from tests.cpu.jit_kernels import spec
def die(*arguments):
    print("holding", flush=True)
    time.sleep(600)
setattr(module, sys.argv[2], die)
module.KernelStore.at(**json.loads(sys.argv[1])).get_or_compile(spec())
"""


@pytest.mark.parametrize("at", ["compile_kernel", "encode"])
def test_kill_9_blocks_nobody(tmp_path: Path, sources: SourceTree, at: str) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    process = subprocess.Popen(
        [sys.executable, "-c", _DIE_WITH_THE_LOCK, json.dumps(store.location()), at],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    started = time.monotonic()
    artifact, hit = store.get_or_compile(spec())
    assert not hit
    assert time.monotonic() - started < 10
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        f"{artifact.key}.kernel",
        f"{artifact.key}.lock",
    ]


def test_a_stuck_holder_only_costs_a_compile(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    store.get("0" * 32)
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.05)
    with open(tmp_path / "cache" / f"{store.key(spec())}.lock", "w") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        assert not store.get_or_compile(spec())[1]
    assert KernelStore(tmp_path / "cache", sources).get_or_compile(spec())[1]


def test_a_kernel_outlives_a_crash_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash of the machine may leave an empty file, or none."""
    real, synced = os.fsync, []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        size = os.fstat(descriptor).st_size if path.is_file() else None
        synced.append((path.suffix, size, len(list(tmp_path.glob("*.kernel")))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    KernelStore(tmp_path).put(_ARTIFACT)
    assert synced == [(".tmp", len(encode(_ARTIFACT)), 0), ("", None, 1)]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_that_is_not_finished_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        files.publish(tmp_path / "kernel", b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_read_though_somebody_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / f"{_ARTIFACT.key}.kernel"
    os.mkfifo(path, 0o644)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert KernelStore(tmp_path).get(_ARTIFACT.key) is None
        os.write(writer, encode(_ARTIFACT))
        assert KernelStore(tmp_path).get(_ARTIFACT.key) is None
    finally:
        os.close(writer)


def test_metadata_without_end_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.json, "dumps", lambda *_, **__: "[" * 100_000)
    assert decode(encode(_ARTIFACT)) is None


def test_a_kernel_that_was_read_is_kept_in_memory(tmp_path: Path) -> None:
    KernelStore(tmp_path).put(_ARTIFACT)
    store = KernelStore(tmp_path)
    assert store.get(_ARTIFACT.key) == _ARTIFACT
    (tmp_path / f"{_ARTIFACT.key}.kernel").unlink()
    assert store.get(_ARTIFACT.key) == _ARTIFACT
    assert store.get_kept(_ARTIFACT.key) is None


def test_put_then_get(tmp_path: Path) -> None:
    KernelStore(tmp_path / "cache").put(_ARTIFACT)
    assert KernelStore(tmp_path / "cache").get(_ARTIFACT.key) == _ARTIFACT
    assert KernelStore(tmp_path / "cache").get("1" * 32) is None
    KernelStore(tmp_path / "cache").put(replace(_ARTIFACT, registers=11))
    assert KernelStore(tmp_path / "cache").get(_ARTIFACT.key) == replace(_ARTIFACT, registers=11)


def _open_files(folder: Path) -> list[Path]:
    """The folder and its files, as far as this process has them open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it may have been closed meanwhile
            found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    return [path for path in found if path.is_relative_to(folder)]


def test_reading_and_writing_leave_no_file_open(tmp_path: Path) -> None:
    for number in range(3):
        key = f"{number:032x}"
        KernelStore(tmp_path).put(Artifact(key, "tiny", b"cubin", 1, 0, 0, 0, "13.0", 0.1))
        assert KernelStore(tmp_path).get(key) is not None
    assert _open_files(tmp_path) == []


def test_the_lock_of_a_folder_has_one_holder(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with files.locked(tmp_path):
            entered.set()

    other = threading.Thread(target=enter)
    with files.locked(tmp_path):
        other.start()
        assert not entered.wait(0.2)
        assert tmp_path in _open_files(tmp_path)
    other.join(20)
    assert entered.is_set()
    assert _open_files(tmp_path) == []


def test_a_folder_that_is_only_read_is_no_place_for_workers(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    writable = KernelStore(tmp_path / "cache", sources)
    assert writable.location()["root"] == str(tmp_path / "cache")
    # chmod alone does not stop root, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert KernelStore(tmp_path / "cache", sources).location()["root"] is None
