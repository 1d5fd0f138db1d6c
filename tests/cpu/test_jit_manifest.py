"""A bundle's manifest with a right digest and wrong fields is refused, and the doctor reports it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_fp8 import doctor
from moe_fp8.errors import BundleError
from moe_fp8.jit import bundle as bundle_module
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.bundle import MANIFEST, Bundle, canonical
from moe_fp8.jit.bundle_writer import write_bundle
from moe_fp8.jit.files import decode, encode
from moe_fp8.jit.key import kernel_key
from tests.cpu.bundles import told
from tests.cpu.cli_runs import no_gpu
from tests.cpu.jit_kernels import spec

__all__ = ["no_gpu"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of this package's sources with one kernel, whose cubin is a stand-in."""
    kernel = spec("quantize_fp8")
    artifact = Artifact(kernel_key(kernel), kernel.name, b"cubin", 32, 0, 0, 0, "13.0", 1.0)
    return write_bundle(tmp_path / "bundle", {kernel: artifact}, told("m")).path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it the digest of the changed content."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["digest"]
    change(content)
    content["digest"] = hashlib.sha256(canonical(content)).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content))


def refused(folder: Path) -> BundleError:
    """The error of opening the bundle, which the doctor reports too."""
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    (found,) = (each for each in doctor.diagnose(bundle=folder) if each.name == "kernel bundle")
    assert (found.status, found.detail) == ("fail", str(caught.value))
    return caught.value


def test_an_unchanged_manifest_is_accepted(folder: Path) -> None:
    rewrite(folder, lambda content: None)
    Bundle.open(folder).verify()


@pytest.mark.parametrize("value", [None, 7.5, True, [], {}, "another kind"], ids=str)
@pytest.mark.parametrize("field", ["key", "spec", "file", "bytes", "sha256"])
def test_a_field_of_a_kernel_has_its_type(folder: Path, field: str, value: object) -> None:
    if value == "another kind":
        value = "7" if field == "bytes" else 7
    rewrite(folder, lambda content: content["kernels"][0].update({field: value}))
    assert refused(folder).what == MANIFEST


@pytest.mark.parametrize(
    "version", [13.0, None, [], "13", "13.x", "13.0\n", "1" * 5000 + ".0"], ids=lambda value: str(value)[:8]
)
def test_a_version_is_a_version(folder: Path, version: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without NVRTC a bundle of any version is accepted.
    monkeypatch.setattr(bundle_module, "installed_nvrtc", lambda: None)
    rewrite(folder, lambda content: content["toolchain"].update(nvrtc=version))
    assert refused(folder).what == MANIFEST


@pytest.mark.parametrize("plan", [None, 7, "m", [], {}, {"model": "m"}, {"model": {"name": 7}}], ids=str)
def test_a_plan_names_its_model(folder: Path, plan: object) -> None:
    rewrite(folder, lambda content: content["coverage"].append(plan))
    assert refused(folder).what == MANIFEST


@pytest.mark.parametrize("format", [0, 2])
def test_a_bundle_of_another_format_must_be_built_again(folder: Path, format: int) -> None:
    rewrite(folder, lambda content: content.update(format=format))
    assert "build the bundle again" in refused(folder).remedy


@pytest.mark.parametrize("damage", ["another kernel", "another format"])
def test_a_whole_file_must_hold_the_kernel_that_it_is_named_after(folder: Path, damage: str) -> None:
    """The manifest has the file's right digest."""
    (file,) = folder.glob("*.kernel")
    artifact = decode(file.read_bytes())
    assert artifact is not None
    data = encode(replace(artifact, key="0" * 32)) if damage == "another kernel" else b"of another version"
    file.write_bytes(data)
    fields = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, lambda content: content["kernels"][0].update(fields))
    with pytest.raises(BundleError, match="another kernel or format") as caught:
        Bundle.open(folder).verify()
    assert caught.value.what == file.name and "build the bundle again" in caught.value.remedy


def test_a_deeply_nested_manifest_is_no_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)
    assert "RecursionError" in str(refused(folder))


@pytest.mark.parametrize("victim", [MANIFEST, "kernel"])
def test_a_pipe_in_the_place_of_a_file_is_damage(folder: Path, victim: str) -> None:
    """Nobody writes to the pipe, so a reader that waits for a writer never returns."""
    path = folder / MANIFEST if victim == MANIFEST else next(folder.glob("*.kernel"))
    path.unlink()
    os.mkfifo(path, 0o644)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder).verify()
    assert caught.value.what == path.name and "copy the bundle" in caught.value.remedy
