"""A kernel bundle: a folder of compiled kernels and a manifest of what they are and what they cover.

It is relocatable, made on any machine (`moe_fp8.jit.bundle_writer`) and only read here. Unlike the cache it
is a promise: what is wrong with it is an error and never a reason to go on without.
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

#: Raise it when the manifest's fields come to mean something else.
FORMAT = 1

MANIFEST = "manifest.json"

_BUILD_AGAIN = "build the bundle again with `moe-fp8 build --bundle` and this version of the package"
_COPY_AGAIN = "copy the bundle here again, or build it again with `moe-fp8 build --bundle --force`"
_VERSION = re.compile(r"(\d+)\.(\d+)")
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Toolchain:
    """What compiled the kernels: architecture, "major.minor" of NVRTC, digest of all device code."""

    arch: str
    nvrtc: str
    sources: str

    @classmethod
    def here(cls, sources: SourceTree | None = None, arch: str = ARCH) -> Toolchain:
        """What this process compiles with; raises ToolchainError where there is no NVRTC."""
        major, minor = nvrtc_version()
        return cls(arch, f"{major}.{minor}", (sources or package_sources()).digest())


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
    """What a bundle holds. `coverage`: a JSON object for each plan in it, with its model's name."""

    toolchain: Toolchain
    coverage: tuple[Mapping[str, Any], ...]
    kernels: tuple[BundledKernel, ...]

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over all the rest."""
        return hashlib.sha256(canonical(self._content())).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with the digest."""
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
        """The manifest of all `coverage` and `kernels`, whatever their order."""
        plans = {canonical(plan): plan for plan in coverage}
        by_key = {kernel.key: kernel for kernel in kernels}
        return cls(
            toolchain,
            tuple(plans[text] for text in sorted(plans)),
            tuple(by_key[key] for key in sorted(by_key)),
        )


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one text of a JSON object."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Bundle:
    """A bundle that this process may use, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._kernels = {kernel.key: kernel for kernel in manifest.kernels}

    @classmethod
    def open(cls, path: Path, sources: SourceTree | None = None, arch: str = ARCH) -> Bundle:
        """The bundle in the folder `path`; `sources` and `arch`: what this process compiles.

        Raises BundleError where it is none, where another user may write it, where the manifest is damaged,
        and where its kernels are those of other sources, another architecture or another NVRTC than the one
        that is installed, if one is.
        """
        try:
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                _refuse(path, "the folder", "a folder with a manifest.json", "a file", _COPY_AGAIN)
            _check_trust(path, "the folder", status)
            data, status = read_file(path / MANIFEST)
        except OSError as error:
            remedy = "set MOE_FP8_BUNDLE (or --bundle) to a folder that `moe-fp8 build --bundle` made"
            raise BundleError(
                str(path), "the folder", f"a readable folder with a {MANIFEST}", error.strerror, remedy
            ) from error
        _check_trust(path, MANIFEST, status)
        manifest = _parse(path, data)
        _check_toolchain(path, manifest.toolchain, (sources or package_sources()).digest(), arch)
        return cls(path, manifest)

    @property
    def nvrtc(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC that compiled the kernels."""
        major, minor = self.manifest.toolchain.nvrtc.split(".")
        return int(major), int(minor)

    def get(self, key: str) -> Artifact | None:
        """The artifact of `key`, or None where the manifest names none; BundleError where it is damaged."""
        kernel = self._kernels.get(key)
        if kernel is None:
            return None
        try:
            data, status = read_file(self.path / kernel.file)
        except OSError as error:
            raise BundleError(
                str(self.path), kernel.file, "a readable file", error.strerror, _COPY_AGAIN
            ) from error
        _check_trust(self.path, kernel.file, status)
        found = hashlib.sha256(data).hexdigest()
        if found != kernel.sha256:
            expected = f"{kernel.bytes} bytes of SHA-256 {kernel.sha256}"
            _refuse(self.path, kernel.file, expected, f"{len(data)} bytes of {found}", _COPY_AGAIN)
        artifact = decode(data)
        if artifact is None or artifact.key != key:
            _refuse(self.path, kernel.file, f"the kernel {key}", "another kernel or format", _BUILD_AGAIN)
        return artifact

    def to_dict(self) -> dict[str, Any]:
        """Where it is and what it holds, in short, as JSON types."""
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
        """What it holds, in a line."""
        told = self.to_dict()
        size, models, digest = told["bytes"] / 1e6, ", ".join(told["models"]), told["digest"][:12]
        version = self.manifest.toolchain.nvrtc
        return f"{told['kernels']} kernels, {size:.1f} MB, NVRTC {version}, for {models}; digest {digest}"

    def verify(self) -> None:
        """Read every kernel; raises BundleError for the first that is not what the manifest says."""
        for key in self._kernels:
            self.get(key)


@cache
def bundle_in_use() -> Bundle | None:
    """The bundle of `settings().bundle`, None where there is to be none; raises BundleError."""
    path = settings().bundle
    return None if path is None else Bundle.open(path)


def _refuse(path: Path, what: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise BundleError(str(path), what, expected, got, remedy)


def _check_trust(path: Path, what: str, status: Any) -> None:
    if problem := distrust(status):
        remedy = "make this user or root its owner and `chmod -R go-w` it: what is in it is executed"
        _refuse(path, what, "what only this user or root can write", f"one that {problem}", remedy)


def _check_toolchain(path: Path, built: Toolchain, sources: str, arch: str) -> None:
    installed = installed_nvrtc()
    # Without NVRTC nothing is compiled, so that the version in the keys is the bundle's to say.
    nvrtc = built.nvrtc if installed is None else f"{installed[0]}.{installed[1]}"
    for what, ours, theirs in (
        ("architecture", arch, built.arch),
        ("NVRTC", nvrtc, built.nvrtc),
        ("digest of the kernel sources", sources, built.sources),
    ):
        if ours != theirs:
            _refuse(path, what, f"{ours}, as this process would compile with", theirs, _BUILD_AGAIN)


def _parse(path: Path, data: bytes) -> Manifest:
    """The manifest in `data`, whose digest and fields are as they must be."""
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
        named = all(isinstance(plan["model"]["name"], str) for plan in manifest.coverage)
        whole = (
            named
            and _VERSION.fullmatch(manifest.toolchain.nvrtc)
            and all(
                _KEY.fullmatch(kernel.key) and kernel.file == kernel.key + SUFFIX
                for kernel in manifest.kernels
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            str(path), MANIFEST, "a bundle's manifest", f"{type(error).__name__}: {error}", _COPY_AGAIN
        ) from error
    if not whole:
        _refuse(
            path, MANIFEST, "models' names, NVRTC's version, and files named by keys", "others", _COPY_AGAIN
        )
    return manifest
