"""Locks of kernels and slots for compilers: what holds them, for how long, and what may be in their place."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from moe_fp8.jit import build as build_module
from moe_fp8.jit.build import _Compiler, _get_missing, _look, _Result, build
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import FIRST_PAUSE, KernelStore, longer
from moe_fp8.specs import KernelSpec
from tests.cpu.jit_kernels import spec, write_kernels


@pytest.fixture
def stores(tmp_path: Path) -> tuple[KernelStore, KernelStore]:
    """The stores of two ranks on one folder."""
    sources = write_kernels(tmp_path / "kernels", "tiny")
    first, second = (KernelStore(tmp_path / "cache", SourceTree(sources)) for _ in range(2))
    return first, second


def test_slots_are_as_many_as_cores_or_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    first, second = (KernelStore(tmp_path / "cache") for _ in range(2))
    slots = [first.try_slot(1), second.try_slot(1)]
    assert None not in slots and first.try_slot(1) is None
    # A rank that was told to use more compilers may use them.
    assert first.try_slot(3) is not None
    assert slots[0] is not None
    slots[0].close()
    assert second.try_slot(1) is not None
    # A store that no other process sees needs no slots.
    memory = KernelStore(None)
    assert None not in [memory.try_slot(1) for _ in range(3)]


# With one job a rank needs no slot.
@pytest.mark.parametrize(("held", "jobs"), [("kernel", 1), ("kernel", 2), ("slots", 2)])
def test_a_stuck_rank_only_costs_time(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch, jobs: int, held: str
) -> None:
    """A rank that is stopped, for example by a debugger, holds its locks for ever."""
    monkeypatch.setattr("moe_fp8.jit.store._LOCK_SECONDS", 0.3)
    store, stuck = stores
    specs = [spec(factor=factor) for factor in range(2, 5)]
    locks = [stuck.try_lock(stuck.key(specs[0])) if held == "kernel" else stuck.try_slot(2) for _ in range(1)]
    if held == "slots":
        while (lock := stuck.try_slot(2)) is not None:
            locks.append(lock)
    assert None not in locks
    assert build(specs, store, jobs, False).compiled == 3


def test_a_lock_that_was_taken_meanwhile_is_waited_for_anew(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_fp8.jit.store._LOCK_SECONDS", 0.2)
    store, other = stores
    key = store.key(spec())
    for _ in range(2):
        lock = other.try_lock(key)
        assert lock is not None and store.try_lock(key) is None, "a holder that has just come is not stuck"
        lock.close()
        own = store.try_lock(key)
        assert own is not None
        own.close()
        time.sleep(0.3)


def test_a_lock_that_is_given_back_is_free_though_a_process_is_being_forked(
    stores: tuple[KernelStore, KernelStore],
) -> None:
    """Such a process has the file open for a moment, as with a second descriptor."""
    store, other = stores
    key = store.key(spec())
    lock = store.try_lock(key)
    (file,) = store._lock_files
    copy = os.dup(file.fileno())
    try:
        assert lock is not None and other.try_lock(key) is None
        lock.close()
        assert other.try_lock(key) is not None
    finally:
        os.close(copy)


def test_the_holder_of_a_lock_removes_no_file_that_another_kernels_holder_writes(
    stores: tuple[KernelStore, KernelStore], tmp_path: Path
) -> None:
    store, _ = stores
    keys = [store.key(spec(factor=factor)) for factor in (2, 3)]
    store.get(keys[0])  # which makes the folder
    own, others = (tmp_path / "cache" / f"{key}.kernel.abc.tmp" for key in keys)
    own.write_bytes(b"half")
    others.write_bytes(b"half")
    assert store.try_lock(keys[0]) is not None and store.try_slot(1) is not None
    assert others.exists() and not own.exists()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_lock_that_cannot_be_given_back_costs_no_kernel(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """NFS may fail to unlock a file, such as one that was removed. Closing it gives the lock back, too."""
    flock = fcntl.flock

    def keep(file: IO[bytes], operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(code, os.strerror(code))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", keep)
    store, other = stores
    assert build([spec(), spec(factor=3)], store, 2, False).compiled == 2
    assert not store._lock_files
    assert other.try_lock(other.key(spec())) is not None


def test_a_rank_asks_for_a_slot_less_and_less_often(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = stores
    asked: list[float] = []

    def slot(jobs: int, waited: float) -> ExitStack | None:
        asked.append(waited)
        return ExitStack() if waited > 1 else None

    monkeypatch.setattr(store, "try_slot", slot)
    assert build([spec(factor=2), spec(factor=3)], store, 2, False).compiled == 2
    assert len(asked) < 60


def test_a_rank_that_has_waited_for_long_still_looks_ten_times_a_second() -> None:
    pauses = [FIRST_PAUSE]
    for _ in range(100):
        pauses.append(longer(pauses[-1]))
    assert pauses == sorted(pauses) and pauses[10] > 10 * FIRST_PAUSE and pauses[-1] == 0.1


def test_the_time_of_a_held_kernel_runs_while_a_rank_waits_for_a_slot(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is stopped at work holds slots and kernels. The others wait once, not for each of them."""
    monkeypatch.setattr("moe_fp8.jit.store._LOCK_SECONDS", 0.2)
    store, stuck = stores
    key = store.key(spec())
    assert stuck.try_lock(key) is not None
    assert _look(store, deque([spec()])) is None
    time.sleep(0.3)
    assert store.try_lock(key) is not None


def test_a_rank_takes_no_slot_for_kernels_in_other_hands(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits with one slot, so that others get the rest."""
    monkeypatch.setattr("moe_fp8.jit.store._LOCK_SECONDS", 0.3)
    store, stuck = stores
    specs = [spec(factor=factor) for factor in (2, 3)]
    assert None not in [stuck.try_lock(stuck.key(each)) for each in specs]
    try_lock, try_slot, taken = store.try_lock, store.try_slot, []

    def lock(key: str, *, clean: bool = True) -> ExitStack | None:
        found = try_lock(key, clean=clean)
        if clean and found is not None:
            taken.append("kernel")
        return found

    def slot(jobs: int, waited: float) -> ExitStack | None:
        taken.append("slot")
        return try_slot(jobs, waited)

    monkeypatch.setattr(store, "try_lock", lock)
    monkeypatch.setattr(store, "try_slot", slot)
    assert build(specs, store, 2, False).compiled == 2
    assert taken[:3] == ["slot", "kernel", "slot"]


def test_a_compiler_without_further_kernels_gives_its_slot_back(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank need not wait for the longest kernel of this one."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    store, other = stores
    compiled, go_on = _Compiler.compile, threading.Event()

    def slow(self: _Compiler, one: KernelSpec) -> _Result:
        if one == spec(factor=3):
            go_on.wait(60)
        return compiled(self, one)

    monkeypatch.setattr(_Compiler, "compile", slow)
    building = _get_missing(store, [spec(factor=2), spec(factor=3)], 2)
    try:
        assert next(building)[0] == spec(factor=2)
        deadline = time.monotonic() + 10
        while (slot := other.try_slot(2)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert slot is not None and other.try_slot(2) is None
    finally:
        go_on.set()
    assert [found for found, _, _ in building] == [spec(factor=3)]


def test_holders_of_slots_that_publish_are_not_stuck(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    specs = [spec(factor=factor) for factor in range(2, 5)]
    clock, waits = [0.0], []

    def late(jobs: int, waited: float) -> None:
        other.get_or_compile(specs[len(waits)])
        waits.append(waited)
        clock[0] += 100

    monkeypatch.setattr(store, "try_slot", late)
    monkeypatch.setattr(build_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert [cached for _, _, cached in _get_missing(store, specs, 2)] == [True] * 3
    assert waits == [0, 0, 0], "the time since the last kernel"


def test_a_kernel_that_is_published_before_its_lock_is_taken_is_not_compiled_again(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    take = store.try_lock

    def late(key: str) -> ExitStack | None:
        other.get_or_compile(spec())
        return take(key)

    monkeypatch.setattr(store, "try_lock", late)
    assert store.get_or_compile(spec())[1]


@pytest.mark.parametrize("obstacle", ["link", "folder"])
def test_what_stands_in_the_place_of_a_lock_costs_this_lock(
    stores: tuple[KernelStore, KernelStore], tmp_path: Path, obstacle: str
) -> None:
    """Two ranks may then compile this kernel. All kernels are kept."""
    store, _ = stores
    specs = [spec(factor=factor) for factor in range(2, 5)]
    place = tmp_path / "cache" / f"{store.key(specs[1])}.lock"
    store.get_or_compile(specs[0])
    if obstacle == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
    assert build(specs, store, 1, False).compiled == 2
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 3
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_listed_leaves_no_lock_behind(
    stores: tuple[KernelStore, KernelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    key = store.key(spec())

    def refuse(path: Path, pattern: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refuse)
        lock = store.try_lock(key)
    assert lock is not None and other.try_lock(key) is None
    lock.close()
    assert other.try_lock(key) is not None
