"""Compiles device code for the host with g++, and runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "moe_fp8" / "kernels"

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiles device code for the host with g++"
)


def copy_headers(folder: Path, *names: str) -> None:
    """Copy the named headers of the kernels, and cta_host.h as `host.h`.

    The copy of `common/types.cuh` lacks the names of integers and DEVICE, and `ptx/sync.cuh` is empty,
    because the host defines these itself.
    """
    types = (KERNELS / "common" / "types.cuh").read_text()
    types = re.sub(r"^(using u?int\d+_t = .*|#define DEVICE .*)$", "", types, flags=re.M)
    (folder / "common").mkdir()
    (folder / "common" / "types.cuh").write_text(types)
    (folder / "ptx").mkdir()
    (folder / "ptx" / "sync.cuh").write_text("#pragma once\n")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(KERNELS / name, folder / name)
    shutil.copy(HERE / "cta_host.h", folder / "host.h")


def entry(name: str, count: int) -> str:
    """The entry file of kernel `name`, with its static shared memory in the host's memory of the CTA.

    count: the number of its static shared variables.
    """
    found: list[str] = []

    def on_host(statement: re.Match[str]) -> str:
        named = re.findall(r"(\w+)((?:\[[^]]+\])*)(?:, |$)", statement[2])
        found.extend(variable for variable, _ in named)
        return " ".join(
            f"auto& {variable} = *reinterpret_cast<{statement[1]}(*){size}>(fixed);"
            f" fixed += (sizeof({variable}) + 15) / 16 * 16;"
            for variable, size in named
        )

    text = (KERNELS / f"{name}.cuh").read_text()
    text = re.sub(r"(?<!extern )__shared__ (\w+) (\w+[^;()]*);", on_host, text)
    assert len(found) == count, found
    opened = "using namespace moe_fp8;\n"
    assert text.count(opened) == 1
    return text.replace(opened, f"{opened}    char* fixed = host::static_memory[host::cta];\n")


def build(name: str, folder: Path, defines: Mapping[str, int]) -> Path:
    """Compile `name`.cpp of this folder with the headers in `folder`, and return the program."""
    program = folder / name
    given = [f"-D{key}={value}" for key, value in defines.items()]
    # (Fortified, `longjmp` would take the stack of another fiber for an error.)
    command = ["g++", "-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{folder}", *given]
    subprocess.run([*command, str(HERE / f"{name}.cpp"), "-o", str(program)], check=True)
    return program


def execute(program: Path, *arguments: Path) -> None:
    """Run a program, whose exit code reports a fault."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def run(name: str, folder: Path, defines: Mapping[str, int]) -> None:
    """Build a program and execute it."""
    execute(build(name, folder, defines))
