"""The Python sources of engines, from their wheels on the package index, cached outside of the repository.

    python -m tests.engines.sources      # fetch all of them

A wheel of vLLM has 280 to 400 MB; only its Python files are kept. The cache also has a Triton of its own.
With ENGINE_SOURCES=skip, the tests that need the sources are skipped; otherwise a failure to get them is a
failure of the tests.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Engine:
    """A release of an engine, and the tags with which the index has a wheel of it for any machine here."""

    package: str
    version: str
    platform: str
    python: str

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"


ENGINES = (
    Engine("vllm", "0.24.0", "manylinux_2_28_x86_64", "3.12"),
    Engine("vllm", "0.33.0", "manylinux_2_28_x86_64", "3.12"),
    Engine("sglang", "0.5.23", "manylinux_2_34_x86_64", "3.11"),
)

_TRITON = "3.9.0"


def skipped() -> bool:
    """Whether the caller wants to go without the sources."""
    return os.environ.get("ENGINE_SOURCES") == "skip"


def cache_folder() -> Path:
    """The folder that keeps the sources between runs."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "moe_fp8_tests"


@cache
def fetch(engine: Engine) -> Path:
    """The folder with the engine's package; downloads the wheel if no earlier run has."""

    def unpack(temporary: Path) -> None:
        options = ["--platform", engine.platform, "--python-version", engine.python, "-d", str(temporary)]
        _pip("download", *options, f"{engine.package}=={engine.version}")
        (wheel,) = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    archive.extract(name, temporary / "kept")

    return _cached(engine.name, unpack)


@cache
def triton() -> Path:
    """A folder with Triton for this Python, whose interpreter runs the engines' kernels on the CPU.

    It is not torch's: a torch for the CPU has none, and the interpreter of older ones fails with new numpys.
    """

    def install(temporary: Path) -> None:
        _pip("install", "--target", str(temporary / "kept"), f"triton=={_TRITON}")

    return _cached(f"triton-{_TRITON}-{sys.implementation.cache_tag}", install)


def _pip(action: str, *options: str) -> None:
    command = [sys.executable, "-m", "pip", action, "-q", "--no-deps", "--only-binary=:all:", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"no wheel of {options[-1]}: {done.stderr.strip()[-800:]}")


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache. If there is none, it is what `make` leaves in a subfolder kept/."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        make(Path(temporary))
        try:
            Path(temporary, "kept").rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def files(engine: Engine, word: str) -> list[Path]:
    """The engine's own files that have `word` in them, without its vendored packages."""
    package = fetch(engine) / engine.package
    return [
        path
        for path in sorted(package.rglob("*.py"))
        if "third_party" not in path.parts and word in path.read_text(encoding="utf-8")
    ]


if __name__ == "__main__":
    for wanted in ENGINES:
        print(fetch(wanted))
    print(triton())
