"""Kernel bundles: made whole or not at all, with equal bytes each time, and refused if they do not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import BundleError, ToolchainError
from moe_fp8.jit import bundle as bundle_module
from moe_fp8.jit import bundle_writer, files, toolchain
from moe_fp8.jit import store as store_module
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.bundle_writer import existing_bundle, write_bundle
from moe_fp8.jit.files import decode
from moe_fp8.jit.runtime import JitCounters, KernelRuntime
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]


def told(name: str) -> dict[str, Any]:
    return {"model": {"name": name}, "options": {"tp": 1}}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernels(tmp_path_factory.mktemp("kernels") / "kernels", "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def sources(kernels: Path) -> SourceTree:
    return SourceTree(kernels)


Make = Callable[..., Bundle]


@pytest.fixture
def make(tmp_path: Path, sources: SourceTree, cache: Path) -> Make:
    """make(*factors, name=, folder=, force=) writes a bundle of the tiny kernel with these factors."""

    def make(
        *factors: int, name: str = "m", folder: Path = tmp_path / "bundle", force: bool = False
    ) -> Bundle:
        store = KernelStore(cache, sources)
        specs: list[KernelSpec] = [spec(factor=factor) for factor in factors]
        artifacts = {each: store.get_or_compile(each)[0] for each in specs}
        return write_bundle(folder, artifacts, told(name), force=force, sources=sources)

    return make


def keys(bundle: Bundle) -> set[str]:
    return {kernel.key for kernel in bundle.manifest.kernels}


def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc cannot be loaded; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(bundle_module, "installed_nvrtc", lambda: None)
    monkeypatch.setattr(store_module, "nvrtc", missing)
    monkeypatch.setattr(toolchain, "nvrtc", missing)


def test_what_is_written_is_read(make: Make, sources: SourceTree, cache: Path) -> None:
    bundle = make(2, 3)
    store = KernelStore(cache, sources)
    wanted = {store.key(spec(factor=factor)) for factor in (2, 3)}
    assert keys(bundle) == wanted
    names = {path.name for path in bundle.path.iterdir()}
    assert names == {"manifest.json", *(f"{key}.kernel" for key in wanted)}
    for key in wanted:
        artifact, cached = bundle.get(key), store.get(key)
        assert artifact is not None and cached is not None
        assert (artifact.cubin, artifact.name, artifact.registers) == (cached.cubin, "tiny", cached.registers)
    assert bundle.get("0" * 32) is None
    bundle.verify()
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["coverage"] == [told("m")]
    assert manifest["digest"] == bundle.manifest.digest
    for kernel in manifest["kernels"]:
        data = (bundle.path / kernel["file"]).read_bytes()
        artifact = decode(data)
        assert artifact is not None and (artifact.key, len(data)) == (kernel["key"], kernel["bytes"])


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


def test_another_folder_is_never_written(make: Make, tmp_path: Path, sources: SourceTree) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    make(2, folder=folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    for force in (False, True):
        with pytest.raises(BundleError, match="other files"):
            existing_bundle(folder, force=force, sources=sources)
        with pytest.raises(BundleError, match="other files"):
            make(2, folder=folder, force=force)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
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


def test_an_empty_volume_is_filled(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()

    def busy(path: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    make(2, folder=folder).verify()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_volume_beside_which_nothing_can_be_written_is_filled(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(**place: Any) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    folder = tmp_path / "volume"
    with pytest.raises(BundleError, match=os.strerror(number)):
        make(2, folder=folder)
    folder.mkdir()
    make(2, folder=folder).verify()
    assert len(keys(make(3, folder=folder))) == 2


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


@pytest.mark.parametrize("victim", ["folder", "manifest.json", "kernel"])
def test_what_others_can_write_is_refused(make: Make, sources: SourceTree, victim: str) -> None:
    bundle = make(2)
    (kernel,) = bundle.manifest.kernels
    name = kernel.file if victim == "kernel" else victim
    path = bundle.path if victim == "folder" else bundle.path / name
    path.chmod(path.stat().st_mode | 0o020)
    reason = f"its mode {path.stat().st_mode & 0o777:o} lets its group write"
    with pytest.raises(BundleError, match=f"can be written by others: {reason};") as caught:
        Bundle.open(bundle.path, sources).verify()
    assert caught.value.what == ("the folder" if victim == "folder" else name)
    assert "chmod" in caught.value.remedy


def test_a_bundle_of_a_stranger_is_refused(
    make: Make, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make(2)
    if os.geteuid() == 0:
        os.chown(bundle.path / "manifest.json", 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    reason = r"belongs to user \d+, neither to this user \(\d+\) nor to root;"
    with pytest.raises(BundleError, match=reason):
        Bundle.open(bundle.path, sources)


@pytest.mark.parametrize("victim", ["manifest.json", "kernel"])
def test_a_link_is_refused_as_a_link(make: Make, sources: SourceTree, tmp_path: Path, victim: str) -> None:
    bundle = make(2)
    (kernel,) = bundle.manifest.kernels
    path = bundle.path / (kernel.file if victim == "kernel" else victim)
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    with pytest.raises(BundleError, match="a path that is a symbolic link") as caught:
        Bundle.open(bundle.path, sources).verify()
    assert caught.value.what == path.name and "cp -rL" in caught.value.remedy


def test_read_only_is_fine_and_nothing_is_written(
    make: Make, sources: SourceTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make(2)
    for path in bundle.path.iterdir():
        path.chmod(0o444)
    bundle.path.chmod(0o555)
    before = {path.name: path.stat().st_mtime_ns for path in (bundle.path, *bundle.path.iterdir())}
    store = KernelStore(tmp_path / "cache", sources, bundle=Bundle.open(bundle.path, sources))
    assert store.get_or_compile(spec())[1]
    assert not store.get_or_compile(spec(factor=3))[1]
    assert {path.name: path.stat().st_mtime_ns for path in (bundle.path, *bundle.path.iterdir())} == before
    assert [path.stem for path in (tmp_path / "cache").glob("*.kernel")] == [store.key(spec(factor=3))]
    bundle.path.chmod(0o755)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap", "remove", "link"])
def test_a_damaged_file_is_refused_by_name(make: Make, sources: SourceTree, cache: Path, damage: str) -> None:
    bundle = make(2, 3)
    victim, other = (bundle.path / kernel.file for kernel in bundle.manifest.kernels)
    data = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "truncate":
        victim.write_bytes(data[:100])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "swap":
        victim.write_bytes(other.read_bytes())
    else:
        victim.unlink()
        if damage == "link":
            victim.symlink_to(other)
    # The kernel in the cache is no excuse.
    store = KernelStore(cache, sources, bundle=Bundle.open(bundle.path, sources))
    with pytest.raises(BundleError, match=victim.name) as caught:
        store.get(victim.stem)
    assert caught.value.what == victim.name and "copy the bundle" in caught.value.remedy
    assert store.get(other.stem) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["kernels"].pop(),
        lambda content: content["coverage"].append({}),
        lambda content: content["kernels"][0].update(sha256="0" * 64),
        lambda content: content["toolchain"].update(nvrtc="13.99"),
        lambda content: content.update(digest="0" * 64),
        lambda content: content.update(extra=1),
        lambda content: content.update(format=2),
        lambda content: content.pop("format"),
        lambda content: content.pop("toolchain"),
        lambda content: content.update(kernels=7),
    ],
)
def test_a_changed_manifest_is_refused(
    make: Make, sources: SourceTree, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = make(2).path / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.open(path.parent, sources)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\xff"])
def test_what_is_no_manifest_is_refused(make: Make, sources: SourceTree, text: str) -> None:
    path = make(2).path / "manifest.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.open(path.parent, sources)


def test_files_outside_the_folder_cannot_be_named(make: Make, sources: SourceTree) -> None:
    bundle = make(2)
    (kernel,) = bundle.manifest.kernels
    content = bundle.manifest.to_dict()
    content["kernels"][0]["file"] = f"../{kernel.file}"
    del content["digest"]
    content["digest"] = bundle_module.hashlib.sha256(bundle_module.canonical(content)).hexdigest()
    (bundle.path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match="files named by keys"):
        Bundle.open(bundle.path, sources)


def test_a_missing_bundle_is_an_error(tmp_path: Path, sources: SourceTree) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(BundleError, match=name):
            Bundle.open(tmp_path / name, sources)


def test_other_sources_are_refused(make: Make, tmp_path: Path) -> None:
    folder = make(2).path
    changed = write_kernels(tmp_path / "changed", "tiny")
    (changed / "tiny.cuh").write_text((changed / "tiny.cuh").read_text() + "// changed\n")
    with pytest.raises(BundleError, match="kernel sources") as caught:
        Bundle.open(folder, SourceTree(changed))
    assert "build the bundle again" in caught.value.remedy
    unused = write_kernels(tmp_path / "unused", "tiny", "other")
    with pytest.raises(BundleError, match="kernel sources"):
        Bundle.open(folder, SourceTree(unused))
    same = write_kernels(tmp_path / "same", "tiny")
    assert Bundle.open(folder, SourceTree(same)).manifest.kernels


def test_another_toolchain_is_refused(
    make: Make, sources: SourceTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(2).path
    with pytest.raises(BundleError, match="architecture: expected sm_100a"):
        Bundle.open(folder, sources, "sm_100a")
    for other in ((13, 99), (12, 4)):
        monkeypatch.setattr(bundle_module, "installed_nvrtc", lambda other=other: other)
        with pytest.raises(BundleError, match=rf"NVRTC: expected {other[0]}\.{other[1]}") as caught:
            Bundle.open(folder, sources)
        assert caught.value.what == "NVRTC"


def test_it_serves_without_a_compiler(
    make: Make, sources: SourceTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler = KernelStore(None, sources).key(spec())
    folder = make(2, 3).path
    no_nvrtc(monkeypatch)
    bundle = Bundle.open(folder, sources)
    store = KernelStore(tmp_path / "cache", sources, bundle=bundle)
    assert store.key(spec()) == with_compiler
    runtime = KernelRuntime(store, lambda artifact, smem, threads: artifact.key)  # type: ignore[arg-type,return-value]
    assert runtime.preload([spec(), spec(factor=3)]) == 2
    runtime.freeze("strict")
    assert runtime.get_kernel(spec()) == with_compiler
    assert runtime.counters() == JitCounters(compiles=0, store_hits=2, loads=2, misses=0)
    runtime.unfreeze()
    for ask in (lambda: runtime.preload([spec(factor=9)]), lambda: runtime.get_kernel(spec(factor=9))):
        with pytest.raises(ToolchainError, match="neither in the bundle") as caught:
            ask()
        assert str(folder) in str(caught.value) and "pip install" in str(caught.value)
