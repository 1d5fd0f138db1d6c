"""The Python sources of engines, from their wheels on the package index, cached outside of the repository.

    python -m tests.engines.sources      # fetch all of them

A wheel of vLLM has 280 to 400 MB; only its Python files are kept. With ENGINE_SOURCES=skip, the tests that
need the sources are skipped; otherwise a failure to get them is a failure of the tests.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
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
    folder = cache_folder() / engine.name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", engine.platform, "--python-version", engine.python, "-d", temporary]
        done = subprocess.run(
            [*command, f"{engine.package}=={engine.version}"], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"no wheel of {engine.name}: {done.stderr.strip()[-800:]}")
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    archive.extract(name, unpacked)
        try:
            unpacked.rename(folder)
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
