"""Kernel text: the entry file of a kernel and every header it includes, as bytes in memory.

The key digests exactly the text that NVRTC compiles. The compiler gets no include path, so no text from
outside the kernels folder can get into a cubin unnoticed. The text of an entry file ends with the assertions
of `params.py` about the kernel's parameters and constants.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from moe_fp8.errors import CompileError
from moe_fp8.params import assertions

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

# Includes in angle brackets are NVRTC's built-in headers; the NVRTC version in the key covers them.
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class SourceClosure:
    """A kernel's entry file and all files that it includes, directly or indirectly.

    `files` holds (name relative to the kernels folder, text), sorted by name. The entry file is among them,
    with its assertions. `digest` is a SHA-256 over names and texts: equal digests compile to equal code.
    """

    entry: str
    files: tuple[tuple[str, bytes], ...]
    digest: str

    @property
    def text(self) -> bytes:
        """The entry file's text, with the assertions."""
        return dict(self.files)[self.entry]

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """The included files: (name as it is written in `#include "name"`, text)."""
        return tuple(item for item in self.files if item[0] != self.entry)


class SourceTree:
    """A folder of device code. Includes are written relative to it: `#include "ptx/tma.cuh"`.

    What was first read of a file is kept, so that a process never mixes two versions of a header. Threads may
    read a file side by side; no lock is needed.
    """

    def __init__(self, root: Traversable) -> None:
        self._root = root
        self._texts: dict[str, bytes] = {}
        self._closures: dict[str, SourceClosure] = {}
        self._whole: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder as a path, or None if it is not on disk (for example inside an archive)."""
        return self._root if isinstance(self._root, Path) else None

    def kernels(self) -> list[str]:
        """The names of all kernels: each has an entry file in the folder itself."""
        return sorted(name.removesuffix(".cuh") for name in _device_code(self._root) if "/" not in name)

    def closure(self, kernel: str) -> SourceClosure:
        """The sources of `<kernel>.cuh`; raises CompileError if a file is missing."""
        closure = self._closures.get(kernel)
        if closure is None:
            closure = self._closures[kernel] = self._collect(kernel)
        return closure

    def digest(self) -> str:
        """A SHA-256 over all device code in the folder; raises CompileError if a file cannot be read."""
        if self._whole is None:
            try:
                names = sorted(_device_code(self._root))
            except OSError as error:
                raise CompileError("all kernels", f"the folder cannot be read ({error})") from error
            read = [(name, self._read(name, name, "the folder")) for name in names]
            asserted = [(name, assertions(name.removesuffix(".cuh")).encode()) for name in names]
            self._whole = _digest([*read, *asserted])
        return self._whole

    def _collect(self, kernel: str) -> SourceClosure:
        entry = f"{kernel}.cuh"
        pending = [(entry, "the kernel spec")]
        found: dict[str, bytes] = {}
        while pending:
            name, wanted_by = pending.pop()
            if name in found:
                continue
            text = self._read(kernel, name, wanted_by)
            found[name] = text + assertions(kernel).encode() if name == entry else text
            pending += [(match.decode("utf-8", "replace"), name) for match in _INCLUDE.findall(text)]
        files = tuple(sorted(found.items()))
        return SourceClosure(entry, files, _digest(files))

    def _read(self, kernel: str, name: str, wanted_by: str) -> bytes:
        text = self._texts.get(name)
        if text is not None:
            return text
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise CompileError(
                kernel, f'{wanted_by}: include "{name}" must be a plain path relative to the kernels folder'
            )
        try:
            node = self._root
            for part in parts:
                node = node.joinpath(part)
            text = node.read_bytes()
        except OSError as error:
            raise CompileError(
                kernel, f'{wanted_by}: "{name}" is not in the kernels folder ({error})'
            ) from error
        return self._texts.setdefault(name, text)


def _device_code(folder: Traversable, prefix: str = "") -> Iterator[str]:
    """Names of the .cuh files in a folder and in its subfolders."""
    for node in folder.iterdir():
        if node.is_dir():
            yield from _device_code(node, f"{prefix}{node.name}/")
        elif node.name.endswith(".cuh"):
            yield f"{prefix}{node.name}"


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, text in files:
        # The lengths make the encoding injective: moving a byte from a name to a text changes the digest.
        digest.update(b"%d %d\n" % (len(name.encode()), len(text)))
        digest.update(name.encode())
        digest.update(text)
    return digest.hexdigest()


@cache
def package_sources() -> SourceTree:
    """The kernels that are installed with the package."""
    return SourceTree(resources.files("moe_fp8").joinpath("kernels"))
