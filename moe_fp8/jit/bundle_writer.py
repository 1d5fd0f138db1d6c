"""Writes kernel bundles: whoever looks at the folder finds no bundle, the old one or the new one.

A new bundle is made in a folder next to its place and renamed. A bundle that exists gets new files first,
which no manifest names yet, and then its manifest by a rename. The same kernels make the same bytes on every
machine.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_fp8.errors import BundleError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.bundle import MANIFEST, Bundle, BundledKernel, Manifest, Toolchain
from moe_fp8.jit.files import SUFFIX, encode, sync_folder, write_synced
from moe_fp8.jit.key import ARCH
from moe_fp8.jit.sources import SourceTree
from moe_fp8.specs import KernelSpec


def existing_bundle(
    path: Path, *, force: bool = False, sources: SourceTree | None = None, arch: str = ARCH
) -> Bundle | None:
    """The bundle in `path` that can be added to; None where there is none, or with `force` is to be none.

    Raises BundleError where the folder holds something else, or, without `force`, a bundle that is damaged
    or that this process may not use.
    """
    try:
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    except OSError as error:
        raise _unwritable(path, error) from error
    if not names:
        return None
    if MANIFEST not in names:
        raise BundleError(
            str(path), "the folder", f"a new or empty folder, or one with a {MANIFEST}",
            f"{len(names)} other files", "choose another folder",
        )  # fmt: skip
    if force:
        return None
    try:
        bundle = Bundle.open(path, sources, arch)
        bundle.verify()
    except BundleError as error:
        remedy = "build into another folder, or pass --force to replace the bundle"
        raise BundleError(error.bundle, error.what, error.expected, error.got, remedy) from error
    return bundle


def write_bundle(
    path: Path,
    kernels: Mapping[KernelSpec, Artifact],
    coverage: Mapping[str, Any],
    *,
    force: bool = False,
    sources: SourceTree | None = None,
    arch: str = ARCH,
) -> Bundle:
    """Make the bundle `path` of `kernels`, or add them to the one that is there; the bundle.

    `coverage`: what the kernels are for, as JSON types. `force`: replace a bundle that is there instead of
    adding to it. Folders get mode 0755 and files 0644, for a server that runs as another user. Raises
    BundleError as `existing_bundle` does and where the folder cannot be written; ToolchainError.
    """
    toolchain = Toolchain.here(sources, arch)
    entries: dict[BundledKernel, bytes] = {}
    for spec, artifact in kernels.items():
        # What differs from build to build has no place in a content hash.
        data = encode(replace(artifact, compile_seconds=0.0, log=""))
        digest = hashlib.sha256(data).hexdigest()
        entries[BundledKernel(artifact.key, str(spec), artifact.key + SUFFIX, len(data), digest)] = data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Manifest.merged(toolchain, [coverage], entries)
        if (path / MANIFEST).exists() or not _make(path, made, entries):
            with _locked(path):
                old = existing_bundle(path, force=force, sources=sources, arch=arch)
                plans = [coverage] if old is None else [*old.manifest.coverage, coverage]
                there = () if old is None else old.manifest.kernels
                # Where keys are equal, the later entry stays: it is the kernel that the bundle already has.
                _update(path, Manifest.merged(toolchain, plans, (*entries, *there)), entries)
    except OSError as error:
        raise _unwritable(path, error) from error
    return Bundle.open(path, sources, arch)


def _make(path: Path, manifest: Manifest, entries: Mapping[BundledKernel, bytes]) -> bool:
    """Make a bundle where there is none; False where there is one by now."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        for kernel, data in entries.items():
            _publish(temporary / kernel.file, data)
        _publish(temporary / MANIFEST, _text(manifest))
        temporary.chmod(0o755)
        sync_folder(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_folder(path.parent)
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _update(path: Path, manifest: Manifest, entries: Mapping[BundledKernel, bytes]) -> None:
    """Turn the bundle in `path` into that of `manifest`."""
    for kernel in manifest.kernels:
        if kernel in entries and not _holds(path, kernel):
            _publish(path / kernel.file, entries[kernel])
    sync_folder(path)
    _publish(path / MANIFEST, _text(manifest))
    sync_folder(path)
    named = {kernel.file for kernel in manifest.kernels}
    for file in path.iterdir():
        # Kernels of a bundle that was replaced, and what a killed process left.
        if file.suffix in (SUFFIX, ".tmp") and file.name not in named:
            file.unlink()


def _holds(path: Path, kernel: BundledKernel) -> bool:
    with suppress(OSError):
        return hashlib.sha256((path / kernel.file).read_bytes()).hexdigest() == kernel.sha256
    return False


def _text(manifest: Manifest) -> bytes:
    return json.dumps(manifest.to_dict(), indent=1, sort_keys=True).encode() + b"\n"


def _publish(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        # Whatever the umask: readable for a server of another user, writable for nobody else.
        os.fchmod(descriptor, 0o644)
        write_synced(descriptor, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock among builders; the kernel drops it when its holder dies."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> BundleError:
    remedy = "choose a folder on a disk with room that this user can write"
    return BundleError(str(path), "writing", "a folder that can be written", error.strerror or error, remedy)
