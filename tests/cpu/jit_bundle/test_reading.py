"""Kernel bundles: read as they were written, and refused if they do not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import BundleError, ToolchainError
from moe_fp8.jit import bundle as bundle_module
from moe_fp8.jit import key as key_module
from moe_fp8.jit import store as store_module
from moe_fp8.jit import toolchain
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.files import decode
from moe_fp8.jit.runtime import JitCounters, KernelRuntime
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.settings import settings
from tests.cpu.bundles import Make, keys, told
from tests.cpu.jit_kernels import spec, write_kernels


def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc cannot be loaded; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(bundle_module, "installed_nvrtc", lambda: None)
    monkeypatch.setattr(store_module, "nvrtc", missing)
    monkeypatch.setattr(toolchain, "nvrtc", missing)
    monkeypatch.setattr(key_module, "nvrtc_version", missing)


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


@pytest.mark.parametrize("key", ["", "../{}", "{}/../../{}"])
def test_files_outside_the_folder_cannot_be_named(make: Make, sources: SourceTree, key: str) -> None:
    bundle = make(2)
    (kernel,) = bundle.manifest.kernels
    content = bundle.manifest.to_dict()
    if key:
        named = key.format(kernel.key, kernel.key)
        content["kernels"][0].update(key=named, file=f"{named}.kernel")
    else:
        content["kernels"][0]["file"] = f"../{kernel.file}"
    del content["digest"]
    content["digest"] = bundle_module.hashlib.sha256(bundle_module.canonical(content)).hexdigest()
    (bundle.path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match="files named by keys"):
        Bundle.open(bundle.path, sources)


def test_a_missing_bundle_is_an_error(tmp_path: Path, sources: SourceTree) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o666)  # That others can write it does not matter: it is no folder.
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(BundleError, match=f"{name}: the folder: expected a readable folder with"):
            Bundle.open(tmp_path / name, sources)


def test_a_bundle_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server must not go on to compile instead."""
    chosen = replace(settings(), bundle=tmp_path / "nowhere")
    monkeypatch.setattr(bundle_module, "settings", lambda: chosen)
    bundle_module.bundle_in_use.cache_clear()
    try:
        with pytest.raises(BundleError, match="nowhere: the folder: expected a readable folder with"):
            bundle_module.bundle_in_use()
    finally:
        bundle_module.bundle_in_use.cache_clear()


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
    with monkeypatch.context() as other, pytest.raises(BundleError, match="architecture: expected sm_100a"):
        other.setattr(bundle_module, "ARCH", "sm_100a")
        Bundle.open(folder, sources)
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
