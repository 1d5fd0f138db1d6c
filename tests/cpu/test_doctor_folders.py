"""`moe-fp8 doctor` and folders that cannot be looked at, read or created: each is a finding of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_fp8 import doctor
from tests.cpu.cli_runs import no_gpu

__all__ = ["no_gpu"]

NAMES = ["python", "NVRTC", "kernel sources", "kernel bundle", "kernel store", "rich", "torch", "GPU"]


def cache(folder: Path) -> doctor.Finding:
    """The finding of the kernel store, beside all other findings."""
    found = doctor.diagnose(folder)
    assert [finding.name for finding in found] == NAMES
    return found[NAMES.index("kernel store")]


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path) -> None:
    found = cache(tmp_path / ("x" * 300))
    assert found.status == "warn" and "cannot be looked at (File name too long)" in found.detail


def test_a_link_to_nothing_cannot_become_a_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    assert cache(link).status == "warn" and cache(link).detail == f"{link} is not a folder"
    (tmp_path / "nothing").mkdir(mode=0o700)
    assert cache(link).status == "ok"
    (tmp_path / "file").touch()
    assert cache(tmp_path / "file" / "new").detail == f"{tmp_path / 'file'} is not a folder"


def test_a_folder_may_be_created_where_all_users_can_write(tmp_path: Path) -> None:
    """/tmp is such a place. The new folder is this user's own."""
    tmp_path.chmod(0o777)
    assert cache(tmp_path / "new").detail == f"{tmp_path / 'new'}, to be created"


def test_only_kernels_are_counted(tmp_path: Path) -> None:
    for name in ("a.kernel", "b.kernel", "c.lock"):
        (tmp_path / name).touch()
    assert cache(tmp_path).detail == f"{tmp_path}, 2 kernels"


def test_unreadable_is_not_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # chmod alone does not stop root, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert f"{tmp_path} is read-only" in cache(tmp_path).detail
    assert f"{tmp_path} is read-only" in cache(tmp_path / "new").detail
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    assert cache(tmp_path).detail == f"{tmp_path} cannot be read: it is not used"
    assert f"{tmp_path} is read-only" in cache(tmp_path / "new").detail
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache(tmp_path).detail == f"{tmp_path} cannot be read: it is not used"


def test_any_error_of_the_system_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(doctor, "package_sources", refuse)
    assert cache(tmp_path).status == "ok"
    found = doctor.diagnose(tmp_path)[NAMES.index("kernel sources")]
    assert (found.status, found.detail) == ("fail", "[Errno 13] Permission denied: 'somewhere'")
