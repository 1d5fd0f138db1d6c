"""Writes kernel bundles atomically: at any time a reader finds no bundle, the old bundle or the new bundle.

A new bundle is written to a temporary folder beside its final place, which is then renamed. A folder that
exists stays where it is, because it may be mounted or in use. It first gets the new kernel files, which no
manifest names yet; a rename then puts the manifest there, or replaces it. A kernel of an existing bundle of
this toolchain keeps its bytes, unless they are damaged. A reader that has opened a bundle before it is
replaced with `force` may miss kernels that the new bundle lacks. The same kernels give the same bytes on
every machine that compiles them with the same patch release of NVRTC.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_fp8.errors import BundleError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.bundle import MANIFEST, Bundle, BundledKernel, Manifest, Toolchain, check_trust
from moe_fp8.jit.files import SUFFIX, encode, locked, publish, sync_folder
from moe_fp8.jit.sources import SourceTree
from moe_fp8.specs import KernelSpec

#: The names of a bundle's files, and of temporary files that a killed process leaves.
_OWN = re.compile(rf"([0-9a-f]{{32}}{re.escape(SUFFIX)}|{re.escape(MANIFEST)})(\.\w+\.tmp)?")

#: A folder that every new ext4 volume has.
_LOST_AND_FOUND = "lost+found"

#: Writing a bundle takes seconds. A temporary folder of this age is nobody's.
_STALE_SECONDS = 3600.0


def existing_bundle(path: Path, *, force: bool = False, sources: SourceTree | None = None) -> Bundle | None:
    """The bundle in `path`, to which kernels can be added; None if there is no bundle or `force` is set.

    What an interrupted build has left in a folder is no bundle, and counts as nothing. Raises BundleError if
    the folder holds something else, if this process cannot write it or other users may, and, without `force`,
    for a bundle that is damaged or that this process may not use.
    """
    try:
        _demand_writable(path)
        if not path.exists():
            return None
        names, status = sorted(entry.name for entry in path.iterdir()), path.stat()
    except OSError as error:
        raise _unwritable(path, error) from error
    others = [name for name in names if not _OWN.fullmatch(name) and name != _LOST_AND_FOUND]
    if MANIFEST not in names and others:
        raise BundleError(
            str(path), "the folder", f"a new or empty folder, or one with a {MANIFEST}",
            f"other files, such as {others[0]}", "choose another folder",
        )  # fmt: skip
    check_trust(path, "the folder", status)
    if MANIFEST not in names or force:
        return None
    try:
        bundle = Bundle.open(path, sources)
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
) -> Bundle:
    """Make the bundle `path` of `kernels`, or add them to an existing bundle; returns the bundle.

    `coverage`: the plan that the kernels serve, as JSON types. `force`: replace an existing bundle instead of
    adding to it. A new folder gets mode 0755, and files get 0644, for a server that runs as another user.
    Raises BundleError as `existing_bundle` does and if the folder cannot be written; ToolchainError. If
    `path` is a link, the bundle is what it leads to.
    """
    toolchain = Toolchain.here(sources)
    entries: dict[BundledKernel, bytes] = {}
    for spec, artifact in kernels.items():
        # The content hash must not depend on fields that differ from build to build.
        data = encode(replace(artifact, compile_seconds=0.0, log=""))
        digest = hashlib.sha256(data).hexdigest()
        entries[BundledKernel(artifact.key, str(spec), artifact.key + SUFFIX, len(data), digest)] = data
    folder = Path(os.path.realpath(path))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Manifest.merged(toolchain, [coverage], entries)
        if folder.exists() or not _make(folder, made, entries):
            with locked(folder):
                old = existing_bundle(path, force=force, sources=sources)
                plans = [coverage] if old is None else [*old.manifest.coverage, coverage]
                keys = {kernel.key for kernel in entries}
                kept = set(_whole(folder, keys, sources) if old is None else old.manifest.kernels)
                # For equal keys the later entry wins: the kernel that the bundle already has.
                _update(folder, Manifest.merged(toolchain, plans, (*entries, *kept)), entries, kept)
    except OSError as error:
        raise _unwritable(path, error) from error
    return Bundle.open(path, sources)


def _make(path: Path, manifest: Manifest, entries: Mapping[BundledKernel, bytes]) -> bool:
    """Make a new bundle; False if another process has made a bundle there in the meantime."""
    _remove_stale(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        for kernel, data in entries.items():
            publish(temporary / kernel.file, data)
        publish(temporary / MANIFEST, _text(manifest))
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


def _remove_stale(path: Path) -> None:
    """Remove the temporary folders beside `path` that killed builds have left."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}.tmp"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _whole(path: Path, keys: Collection[str], sources: SourceTree | None) -> Iterator[BundledKernel]:
    """The kernels of these keys that the bundle in `path` holds whole; none if it is refused.

    Until its manifest is replaced, their files must stay as they are.
    """
    with suppress(BundleError):
        bundle = Bundle.open(path, sources)
        for kernel in bundle.manifest.kernels:
            with suppress(BundleError):
                if kernel.key in keys and bundle.get(kernel.key) is not None:
                    yield kernel


def _update(
    path: Path, manifest: Manifest, entries: Mapping[BundledKernel, bytes], kept: Collection[BundledKernel]
) -> None:
    """Turn the folder `path`, which holds `kept`, into the bundle that `manifest` describes."""
    for kernel in manifest.kernels:
        if kernel not in kept:
            publish(path / kernel.file, entries[kernel])
    sync_folder(path)
    publish(path / MANIFEST, _text(manifest))
    sync_folder(path)
    named = {MANIFEST, *(kernel.file for kernel in manifest.kernels)}
    for file in path.iterdir():
        # This removes kernels of a replaced bundle, and what interrupted builds have left.
        if _OWN.fullmatch(file.name) and file.name not in named:
            file.unlink(missing_ok=True)


def _text(manifest: Manifest) -> bytes:
    return json.dumps(manifest.to_dict(), indent=1, sort_keys=True).encode() + b"\n"


def _demand_writable(path: Path) -> None:
    """Raise OSError unless the folder, or the nearest folder above it that exists, can be written."""
    folder = Path(os.path.realpath(path))
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    # Permissions do not tell all: a disk may take no more files, and root may be refused, too.
    # Some file systems show the file for a moment, so it has a name that another build takes for its own.
    with tempfile.TemporaryFile(prefix=f"{MANIFEST}.", suffix=".tmp", dir=there):
        pass


def _unwritable(path: Path, error: OSError) -> BundleError:
    remedy = "choose a folder on a disk with room that this user can write"
    return BundleError(str(path), "writing", "a folder that can be written", error.strerror or error, remedy)
