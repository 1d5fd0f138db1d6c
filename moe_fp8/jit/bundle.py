"""A kernel bundle: a folder of compiled kernels, with a manifest of the kernels and the plans they serve.

A bundle is relocatable and can be made on any machine (`moe_fp8.jit.bundle_writer`); this module only reads
it. A bundle is a promise, unlike the cache: any fault in it is an error, and no kernel is compiled instead.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from moe_fp8.errors import BundleError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.files import SUFFIX, decode, distrust, read_file
from moe_fp8.jit.key import ARCH
from moe_fp8.jit.sources import SourceTree, package_sources
from moe_fp8.jit.toolchain import installed_nvrtc, nvrtc_version
from moe_fp8.settings import settings

#: Increase this number when the meaning of the manifest's fields changes.
FORMAT = 1

MANIFEST = "manifest.json"

_BUILD_AGAIN = "build the bundle again with `moe-fp8 build --bundle` and this version of the package"
_COPY_AGAIN = "copy the bundle here again, or build it again with `moe-fp8 build --bundle --force`"
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Toolchain:
    """The inputs common to all kernels: architecture, "major.minor" of NVRTC, digest of all device code.

    Patch releases of NVRTC are not told apart, as in the kernels' keys (`moe_fp8.jit.key`).
    """

    arch: str
    nvrtc: str
    sources: str

    @classmethod
    def here(cls, sources: SourceTree | None = None) -> Toolchain:
        """The toolchain of this process; raises ToolchainError if there is no NVRTC."""
        major, minor = nvrtc_version()
        return cls(ARCH, f"{major}.{minor}", (sources or package_sources()).digest())


@dataclass(frozen=True)
class BundledKernel:
    """One kernel of a bundle: its key, the spec as text, and the file that holds it."""

    key: str
    spec: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a bundle. `coverage`: a JSON object for each plan in it, with its model's name."""

    toolchain: Toolchain
    coverage: tuple[Mapping[str, Any], ...]
    kernels: tuple[BundledKernel, ...]

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over all other fields."""
        return hashlib.sha256(canonical(self._content())).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON types, with the digest."""
        return {**self._content(), "digest": self.digest}

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "toolchain": asdict(self.toolchain),
            "coverage": list(self.coverage),
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }

    @classmethod
    def merged(
        cls,
        toolchain: Toolchain,
        coverage: Iterable[Mapping[str, Any]],
        kernels: Iterable[BundledKernel],
    ) -> Manifest:
        """The sorted manifest of all `coverage` and `kernels`; of kernels with equal keys the last stays."""
        plans = {canonical(plan): plan for plan in coverage}
        by_key = {kernel.key: kernel for kernel in kernels}
        return cls(
            toolchain,
            tuple(plans[text] for text in sorted(plans)),
            tuple(by_key[key] for key in sorted(by_key)),
        )


def canonical(value: Mapping[str, Any]) -> bytes:
    """The canonical text of a JSON object."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Bundle:
    """A bundle that this process may use, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._kernels = {kernel.key: kernel for kernel in manifest.kernels}

    @classmethod
    def open(cls, path: Path, sources: SourceTree | None = None) -> Bundle:
        """The bundle in the folder `path`; this process would compile `sources`.

        Raises BundleError if the folder is no bundle, if another user may write it, if the manifest is
        damaged, and if the kernels were compiled from other sources, for another architecture or by NVRTC of
        another major or minor version than the installed NVRTC. Without an installed NVRTC, any version is
        accepted.
        """
        try:
            status = path.stat()
            data, of_manifest = read_file(path / MANIFEST)
        except OSError as error:
            remedy = "set MOE_FP8_BUNDLE (or --bundle) to a folder that `moe-fp8 build --bundle` made"
            raise BundleError(
                str(path), "the folder", f"a readable folder with a {MANIFEST}", error.strerror, remedy
            ) from error
        check_trust(path, "the folder", status)
        check_trust(path, MANIFEST, of_manifest)
        manifest = _parse(path, data)
        _check_toolchain(path, manifest.toolchain, (sources or package_sources()).digest())
        return cls(path, manifest)

    @property
    def nvrtc(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC that compiled the kernels."""
        major, minor = self.manifest.toolchain.nvrtc.split(".")
        return int(major), int(minor)

    def get(self, key: str) -> Artifact | None:
        """The artifact of `key`, or None if the manifest does not name it; BundleError if it is damaged."""
        kernel = self._kernels.get(key)
        if kernel is None:
            return None
        try:
            data, status = read_file(self.path / kernel.file)
        except OSError as error:
            raise BundleError(
                str(self.path), kernel.file, "a readable file", error.strerror, _COPY_AGAIN
            ) from error
        check_trust(self.path, kernel.file, status)
        found = hashlib.sha256(data).hexdigest()
        if found != kernel.sha256:
            expected = f"{kernel.bytes} bytes of SHA-256 {kernel.sha256}"
            _refuse(self.path, kernel.file, expected, f"{len(data)} bytes of {found}", _COPY_AGAIN)
        artifact = decode(data)
        if artifact is None or artifact.key != key:
            _refuse(self.path, kernel.file, f"the kernel {key}", "another kernel or format", _BUILD_AGAIN)
        return artifact

    def to_dict(self) -> dict[str, Any]:
        """A summary of the bundle's place and contents, as JSON types."""
        kernels = self.manifest.kernels
        return {
            "path": str(self.path),
            "digest": self.manifest.digest,
            "toolchain": asdict(self.manifest.toolchain),
            "kernels": len(kernels),
            "bytes": sum(kernel.bytes for kernel in kernels),
            "models": sorted({plan["model"]["name"] for plan in self.manifest.coverage}),
        }

    def summary(self) -> str:
        """A summary of the bundle's contents in one line."""
        told = self.to_dict()
        size, models, digest = told["bytes"] / 1e6, ", ".join(told["models"]), told["digest"][:12]
        version = self.manifest.toolchain.nvrtc
        return f"{told['kernels']} kernels, {size:.1f} MB, NVRTC {version}, for {models}; digest {digest}"

    def verify(self) -> None:
        """Read every kernel; raises BundleError for the first kernel that differs from the manifest."""
        for key in self._kernels:
            self.get(key)


@cache
def bundle_in_use() -> Bundle | None:
    """The bundle that `settings().bundle` names, or None if it names none; raises BundleError."""
    path = settings().bundle
    return None if path is None else Bundle.open(path)


def _refuse(path: Path, what: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise BundleError(str(path), what, expected, got, remedy)


def check_trust(path: Path, what: str, status: Any) -> None:
    """Raise BundleError if other users can write `what` of the bundle `path`, a file or the folder."""
    if problem := distrust(status):
        remedy = "make this user or root its owner and `chmod -R go-w` it: its contents are executed"
        if stat.S_ISLNK(status.st_mode):
            remedy = "copy the bundle with files in place of links (`cp -rL`)"
        _refuse(path, what, "a path that only this user or root can write", f"a path that {problem}", remedy)


def _check_toolchain(path: Path, built: Toolchain, sources: str) -> None:
    installed = installed_nvrtc()
    # Without NVRTC this process compiles nothing, so the keys use the bundle's version.
    nvrtc = built.nvrtc if installed is None else f"{installed[0]}.{installed[1]}"
    for what, ours, theirs in (
        ("architecture", ARCH, built.arch),
        ("NVRTC", nvrtc, built.nvrtc),
        ("digest of the kernel sources", sources, built.sources),
    ):
        if ours != theirs:
            _refuse(path, what, f"{ours}, with which this process compiles", theirs, _BUILD_AGAIN)


def _parse(path: Path, data: bytes) -> Manifest:
    """The manifest in `data`, after checking its digest and fields; raises BundleError."""
    try:
        content = json.loads(data)
        found = content["format"]
        if found != FORMAT:
            _refuse(path, f"format of {MANIFEST}", str(FORMAT), found, _BUILD_AGAIN)
        manifest = Manifest(
            Toolchain(**content["toolchain"]),
            tuple(content["coverage"]),
            tuple(BundledKernel(**kernel) for kernel in content["kernels"]),
        )
        if content != manifest.to_dict():
            _refuse(
                path, MANIFEST, f"content of digest {manifest.digest}", content.get("digest"), _COPY_AGAIN
            )
        whole = _whole(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(
            str(path), MANIFEST, "a bundle's manifest", f"{type(error).__name__}: {error}", _COPY_AGAIN
        ) from error
    if not whole:
        _refuse(
            path,
            MANIFEST,
            "fields of the right types, models' names, NVRTC's version, and files named by keys",
            "other values",
            _COPY_AGAIN,
        )
    return manifest


def _whole(manifest: Manifest) -> bool:
    """Whether all fields have their types and forms, which a right digest does not ensure.

    It may raise KeyError or TypeError if a plan is no object with a model.
    """
    records = (manifest.toolchain, *manifest.kernels)
    return (
        all(
            type(value) is (int if name == "bytes" else str)
            for record in records
            for name, value in vars(record).items()
        )
        and _VERSION.fullmatch(manifest.toolchain.nvrtc) is not None
        and all(
            _KEY.fullmatch(kernel.key) and kernel.file == kernel.key + SUFFIX for kernel in manifest.kernels
        )
        and all(isinstance(plan["model"]["name"], str) for plan in manifest.coverage)
    )
