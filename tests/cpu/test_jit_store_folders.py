"""Folders that a store must not use, cannot write, or that go away."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

import pytest

from moe_fp8.jit import files
from moe_fp8.jit import store as store_module
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.settings import Settings
from tests.cpu.jit_kernels import spec, write_kernels


@pytest.fixture
def sources(tmp_path: Path) -> SourceTree:
    return SourceTree(write_kernels(tmp_path / "kernels", "tiny"))


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _use(store: KernelStore) -> None:
    """Use two kernels; each is compiled once and then found in memory."""
    for factor in (2, 3):
        assert not store.get_or_compile(spec(factor=factor))[1]
        assert store.get_or_compile(spec(factor=factor))[1]


def _kept(store: KernelStore) -> Path:
    """The file of a kernel that is compiled now."""
    artifact, _ = store.get_or_compile(spec())
    path = store.path(artifact.key)
    assert path is not None
    return path


def test_writable_by_others_is_not_used(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    KernelStore(root, sources).get_or_compile(spec())
    root.chmod(0o777)
    _use(KernelStore(root, sources))
    (message,) = _warnings(caplog)
    assert f"kernel store {root} can be written by others: its mode 777 lets all users write: " in message
    assert "MOE_FP8_CACHE_DIR" in message


def test_foreign_owner_is_not_used(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    root.mkdir(0o700)
    if os.geteuid() == 0:
        os.chown(root, 12345, 12345)
    else:
        # Only root may give a folder away; other users pretend to be somebody else.
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    _use(KernelStore(root, sources))
    (message,) = _warnings(caplog)
    owner, user = root.stat().st_uid, os.geteuid()
    assert f"{root} belongs to user {owner}, neither to this user ({user}) nor to root: " in message
    assert list(root.iterdir()) == []


def test_writable_file_is_not_used(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    path = _kept(store)
    path.chmod(0o666)
    assert KernelStore(tmp_path / "cache", sources).get(store.key(spec())) is None
    (message,) = _warnings(caplog)
    assert f"kernel file {path} can be written by others: its mode 666 lets all users write" in message


def test_a_link_is_not_used_and_is_replaced(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    path = _kept(KernelStore(tmp_path / "cache", sources))
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    assert not KernelStore(tmp_path / "cache", sources).get_or_compile(spec())[1]
    (message,) = _warnings(caplog)
    assert f"kernel file {path} is a symbolic link" in message and "kept in memory" not in message
    assert not path.is_symlink()


def test_every_reason_for_distrust_is_named() -> None:
    def status(mode: int, user: int) -> os.stat_result:
        return os.stat_result((mode, 0, 0, 1, user, 0, 0, 0, 0, 0))

    here = os.geteuid()
    stranger = f"belongs to user {here + 1}, neither to this user ({here}) nor to root"
    group = "can be written by others: its mode 775 lets its group write"
    assert files.distrust(status(stat.S_IFDIR | 0o755, here)) == ""
    assert files.distrust(status(stat.S_IFDIR | 0o755, 0)) == ""
    assert files.distrust(status(stat.S_IFDIR | 0o755, here + 1)) == stranger
    assert files.distrust(status(stat.S_IFDIR | 0o775, here)) == group
    assert files.distrust(status(stat.S_IFDIR | 0o757, here)) == group.replace(
        "775 lets its group", "757 lets all users"
    )
    assert files.distrust(status(stat.S_IFDIR | 0o775, here + 1)) == f"{stranger}, and it {group}"
    assert files.distrust(status(stat.S_IFLNK | 0o777, here)).startswith("is a symbolic link")


def test_read_only_folder_is_read_and_warned_about(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    KernelStore(root, sources).get_or_compile(spec())
    # chmod alone does not stop root, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    store = KernelStore(root, sources)
    assert store.get_or_compile(spec())[1]
    assert not store.get_or_compile(spec(factor=3))[1]
    assert store.get_or_compile(spec(factor=3))[1]
    assert len(list(root.glob("*.kernel"))) == 1
    (message,) = _warnings(caplog)
    assert "read-only" in message


def test_what_cannot_be_read_is_not_called_read_only(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    store = KernelStore(root, sources)
    store.get_or_compile(spec())

    def refuse(path: Path) -> tuple[bytes, os.stat_result]:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        patch.setattr(store_module, "read_file", refuse)
        _use(KernelStore(root, sources))
    assert ["read-only" in message for message in _warnings(caplog)] == [True, False, False]
    for factor, message in zip((2, 3), _warnings(caplog)[1:], strict=True):
        path = store.path(store.key(spec(factor=factor)))
        assert message == f"kernel file {path} cannot be read (Permission denied) and is not used"
    caplog.clear()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    _use(KernelStore(root, sources))
    (message,) = _warnings(caplog)
    assert f"kernel store {root} cannot be read: " in message


def test_folder_that_cannot_be_made(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    _use(KernelStore(tmp_path / "file" / "cache", sources))
    assert len(_warnings(caplog)) == 1
    caplog.clear()
    _use(KernelStore(tmp_path / "file", sources))
    assert len(_warnings(caplog)) == 1


def test_a_folder_in_the_place_of_a_kernel_costs_this_kernel(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels are kept, and a full disk is told later."""
    root = tmp_path / "cache"
    root.mkdir(0o755)
    store = KernelStore(root, sources)
    folder, kept = (root / f"{store.key(spec(factor=factor))}.kernel" for factor in (2, 3))
    folder.mkdir()
    _use(store)
    (message,) = _warnings(caplog)
    assert message == f"kernel file {folder} cannot be read (Is a directory) and is not used"
    assert kept.is_file()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for factor in (4, 5):
        assert not store.get_or_compile(spec(factor=factor))[1]
    _, message = _warnings(caplog)
    assert f"kernel store {root} cannot be written" in message and "No space left" in message
    assert set(root.glob("*.kernel")) == {folder, kept} and not list(root.glob("*.tmp"))


def test_without_locks_no_temporary_file_is_removed(
    tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may be writing it."""
    store = KernelStore(tmp_path / "cache", sources)
    key = store.key(spec())
    store.get(key)
    temporary = tmp_path / "cache" / f"{key}.kernel.abc.tmp"
    temporary.write_bytes(b"half")

    def fail(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        assert not store.get_or_compile(spec())[1]
    assert temporary.exists()
    lock = store.try_lock(key)
    assert lock is not None and not temporary.exists()
    lock.close()


def test_a_removed_temporary_file_is_written_again(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def removed(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        for temporary in (tmp_path / "cache").glob("*.tmp"):
            temporary.unlink()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", removed)
    _use(KernelStore(tmp_path / "cache", sources))
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 2
    assert _warnings(caplog) == []


@pytest.mark.parametrize("when", ["before a lock", "before publishing"])
def test_a_removed_folder_is_made_again(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    store.get_or_compile(spec())
    shutil.rmtree(tmp_path / "cache")
    if when == "before a lock":
        store.get_or_compile(spec(factor=3))
    else:
        store.put(Artifact("0" * 32, "tiny", b"cubin", 1, 0, 0, 0, "13.0", 0.1))
    store.get_or_compile(spec(factor=4))
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 2
    assert _warnings(caplog) == []


def test_a_folder_that_others_can_write_does_not_take_the_place_of_a_removed_folder(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    store = KernelStore(tmp_path / "cache", sources)
    store.get_or_compile(spec())
    shutil.rmtree(tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda path, **given: (os.mkdir(path), os.chmod(path, 0o777)))
        store.put(Artifact("0" * 32, "tiny", b"cubin", 1, 0, 0, 0, "13.0", 0.1))
    assert list((tmp_path / "cache").iterdir()) == []
    (message,) = _warnings(caplog)
    assert "can be written by others" in message


def test_a_folder_that_cannot_be_synced_keeps_kernels(
    tmp_path: Path, sources: SourceTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    _use(KernelStore(tmp_path / "cache", sources))
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 2
    assert _warnings(caplog) == []


def test_a_process_without_a_home_is_told_that_it_keeps_no_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "settings", lambda: Settings(None, False, False, 1, "strict"))
    store_module.default_store.cache_clear()
    try:
        assert store_module.default_store().root is None
    finally:
        store_module.default_store.cache_clear()
    (message,) = _warnings(caplog)
    assert "kept in memory only; set MOE_FP8_CACHE_DIR" in message
