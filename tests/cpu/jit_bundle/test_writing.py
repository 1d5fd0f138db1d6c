"""Kernel bundles: made whole or not at all, with equal bytes each time."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_fp8.errors import BundleError
from moe_fp8.jit import bundle_writer, files
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.bundle_writer import existing_bundle, write_bundle
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.bundles import Make, keys, told
from tests.cpu.jit_kernels import spec

_ROOT = Path(__file__).parents[3]


def test_equal_builds_are_equal_bytes_wherever_they_are_made(
    make: Make, tmp_path: Path, sources: SourceTree
) -> None:
    first = make(2, 3)
    fresh = {each: KernelStore(None, sources).get_or_compile(each)[0] for each in (spec(), spec(factor=3))}
    second = write_bundle(tmp_path / "deep" / "er" / "bundle", fresh, told("m"), sources=sources)
    assert first.manifest.digest == second.manifest.digest
    for path in first.path.iterdir():
        assert path.read_bytes() == (second.path / path.name).read_bytes()


def test_it_can_be_moved_and_read_by_others(make: Make, tmp_path: Path, sources: SourceTree) -> None:
    bundle = make(2)
    assert stat.S_IMODE(bundle.path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.path.iterdir()} == {0o644}
    moved = tmp_path / "moved"
    shutil.move(bundle.path, moved)
    Bundle.open(moved, sources).verify()


def test_building_again_adds_in_any_order(make: Make, tmp_path: Path) -> None:
    make(2, 3, name="one")
    one = make(3, 4, name="two")
    assert len(one.manifest.kernels) == 3 and len(one.manifest.coverage) == 2
    make(4, 3, name="two", folder=tmp_path / "other")
    other = make(3, 2, name="one", folder=tmp_path / "other")
    assert other.manifest.digest == one.manifest.digest
    assert make(2, name="one").manifest == make(2, 3, name="one").manifest == one.manifest
    one.verify()


def test_force_replaces(make: Make) -> None:
    make(2, 3, name="one")
    (after,) = make(4, name="two", force=True).manifest.kernels
    bundle = make(4, name="two")
    assert {path.name for path in bundle.path.iterdir()} == {after.file, "manifest.json"}
    assert bundle.manifest.coverage == (told("two"),)


def test_a_damaged_bundle_is_added_to_by_force_only(make: Make, sources: SourceTree) -> None:
    bundle = make(2, 3)
    victim = bundle.path / bundle.manifest.kernels[0].file
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(BundleError, match="--force") as caught:
        make(4)
    assert caught.value.what == victim.name
    make(2, 3, force=True).verify()


@pytest.mark.parametrize("name", ["thesis.tex", "thesis.tmp", "linux.kernel"])
def test_another_folder_is_never_written(make: Make, tmp_path: Path, sources: SourceTree, name: str) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    make(2, folder=folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / name).write_text("all of it")
    for force in (False, True):
        with pytest.raises(BundleError, match=f"other files, such as {name}; choose another folder"):
            existing_bundle(folder, force=force, sources=sources)
        with pytest.raises(BundleError, match="other files"):
            make(2, folder=folder, force=force)
    assert [path.name for path in folder.iterdir()] == [name]
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BundleError):
        make(2, folder=file)


@pytest.mark.parametrize("empty", [False, True], ids=["to nothing", "to an empty folder"])
def test_a_link_to_the_folder_stays(make: Make, tmp_path: Path, empty: bool) -> None:
    target, link = tmp_path / "elsewhere" / "bundle", tmp_path / "link"
    link.symlink_to(target)
    if empty:
        target.mkdir(parents=True)
    assert len(keys(make(2, folder=link))) == 1
    assert len(keys(make(3, folder=link))) == 2
    assert link.is_symlink() and (target / "manifest.json").is_file()


@pytest.mark.parametrize("there", [(), ("lost+found",)], ids=["empty", "new volume"])
def test_a_folder_that_exists_is_filled_where_it_is(
    make: Make, tmp_path: Path, there: tuple[str, ...]
) -> None:
    """It may be a mounted volume, or the working folder of a shell."""
    folder = tmp_path / "place" / "volume"
    folder.mkdir(parents=True)
    for name in there:
        (folder / name).mkdir()
    folder.chmod(0o750)
    before = folder.stat()
    make(2, folder=folder).verify()
    assert len(keys(make(3, folder=folder))) == 2
    now = folder.stat()
    assert (now.st_ino, now.st_mode) == (before.st_ino, before.st_mode)
    assert {*there} < {path.name for path in folder.iterdir()}
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("bundle", ["bundle", "bundle[2]"])
def test_what_a_killed_build_left_beside_the_bundle_is_removed(
    make: Make, tmp_path: Path, bundle: str
) -> None:
    """Only if it is old, since another build may be at work."""
    names = [f".{bundle}.old_____.tmp", f".{bundle}.young___.tmp", ".bundle2.old_____.tmp"]
    names.append(f".{bundle}.old-a.tmp")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.kernel").touch()
        if "old" in name:
            os.utime(tmp_path / name, (0, 0))
    make(2, folder=tmp_path / bundle)
    assert {path.name for path in tmp_path.iterdir()} & {*names} == {*names[1:]}


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_build_into_a_volume_is_begun_again(
    make: Make, tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()

    def killed(path: Path, data: bytes) -> None:
        files.publish(path, data)
        if len(list(folder.iterdir())) == 2:
            (folder / f"{path.name}.ab_12cd3.tmp").write_bytes(b"half")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bundle_writer, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            make(2, 3, 4, folder=folder)
    assert len(list(folder.iterdir())) == 3
    bundle = make(5, folder=folder, force=force)
    bundle.verify()
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        *(kernel.file for kernel in bundle.manifest.kernels),
    }


@pytest.mark.parametrize("bundled", [False, True])
def test_a_folder_that_others_can_write_is_not_filled(make: Make, tmp_path: Path, bundled: bool) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    if bundled:
        make(2, folder=folder)
    folder.chmod(0o775)
    before = sorted(folder.iterdir())
    with pytest.raises(BundleError, match="can be written by others"):
        make(3, folder=folder, force=True)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["", "new", "new/er"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert existing_bundle(place / name) is None
    assert [*place.iterdir()] == []

    def full(*, prefix: str, suffix: str, dir: Path) -> None:
        assert dir == place and bundle_writer._OWN.fullmatch(f"{prefix}abc{suffix}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(bundle_writer.tempfile, "TemporaryFile", full)
        with pytest.raises(BundleError, match="a folder that can be written, got No space left on device"):
            existing_bundle(place / name)
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="Not a directory"):
        existing_bundle(tmp_path / "file" / name)


def test_only_own_files_are_removed(make: Make) -> None:
    bundle = make(2)
    others = ("notes.tmp", "manifest.json.bak", f"{bundle.manifest.kernels[0].file}.orig")
    for name in others:
        (bundle.path / name).write_text("keep")
    make(3, force=True)
    assert [(bundle.path / name).read_text() for name in others] == ["keep"] * 3


def test_a_forced_build_that_is_killed_leaves_the_old_bundle_whole(
    make: Make, sources: SourceTree, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernel may have other bytes, for example by another patch version of NVRTC."""
    before = make(2, 3)
    artifact, _ = KernelStore(cache, sources).get_or_compile(spec())
    other = {spec(): replace(artifact, registers=artifact.registers + 1)}

    def killed(path: Path, data: bytes) -> None:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        files.publish(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(bundle_writer, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(before.path, other, told("m"), force=True, sources=sources)
    now = Bundle.open(before.path, sources)
    now.verify()
    assert now.manifest == before.manifest
    after = write_bundle(before.path, other, told("m"), force=True, sources=sources)
    assert after.get(artifact.key) == before.get(artifact.key)
    assert {path.stem for path in after.path.glob("*.kernel")} == {artifact.key}
    # A damaged file is no loss.
    (after.path / f"{artifact.key}.kernel").write_bytes(b"damaged")
    found = write_bundle(before.path, other, told("m"), force=True, sources=sources).get(artifact.key)
    assert found is not None and found.registers == artifact.registers + 1


def test_force_puts_a_file_in_the_place_of_a_link(make: Make, tmp_path: Path) -> None:
    bundle = make(2)
    path = bundle.path / bundle.manifest.kernels[0].file
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    make(2, force=True).verify()


@pytest.mark.parametrize("when", ["new", "there"])
def test_no_half_made_bundle_appears(
    make: Make, tmp_path: Path, sources: SourceTree, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    folder = tmp_path / "place" / "bundle"
    folder.parent.mkdir()
    before = make(2, folder=folder).manifest if when == "there" else None
    real = files.write_synced
    written: list[int] = []

    def full(descriptor: int, data: bytes) -> None:
        written.append(len(data))
        if len(written) == 2:
            os.close(descriptor)
            raise OSError(28, "No space left on device")
        real(descriptor, data)

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(BundleError, match="No space left") as caught:
        make(3, 4, folder=folder)
    assert caught.value.what == "writing"
    if before is None:
        assert list(folder.parent.iterdir()) == []
    else:
        now = Bundle.open(folder, sources)
        now.verify()
        assert now.manifest == before
        assert not list(folder.glob("*.tmp"))
        monkeypatch.undo()
        make(5, folder=folder)
        assert len(list(folder.glob("*.kernel"))) == 2, "what the failed build left is gone"


def test_a_bundle_that_appears_in_the_meantime_is_added_to(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_stale = bundle_writer._remove_stale

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(bundle_writer, "_remove_stale", remove_stale)
        make(2)

    monkeypatch.setattr(bundle_writer, "_remove_stale", meanwhile)
    bundle = make(3)
    assert len(keys(bundle)) == 2 and [*bundle.path.parent.glob(".bundle.*")] == []


_BUILD = """
import json, sys
from pathlib import Path
from moe_fp8.jit.bundle_writer import write_bundle
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec
folder, kernels, cache, factor = sys.argv[1:]
sources = SourceTree(Path(kernels))
one = spec(factor=int(factor))
artifact, _ = KernelStore(cache, sources).get_or_compile(one)
write_bundle(Path(folder), {one: artifact}, {"model": {"name": factor}}, sources=sources)
"""


def test_builders_at_once_lose_nothing(
    tmp_path: Path, kernels: Path, cache: Path, sources: SourceTree
) -> None:
    folder = tmp_path / "bundle"
    started = [
        subprocess.Popen([sys.executable, "-c", _BUILD, folder, kernels, cache, str(factor)], cwd=_ROOT)
        for factor in range(2, 8)
    ]
    assert [process.wait(120) for process in started] == [0] * 6
    bundle = Bundle.open(folder, sources)
    bundle.verify()
    assert len(bundle.manifest.kernels) == len(bundle.manifest.coverage) == 6
