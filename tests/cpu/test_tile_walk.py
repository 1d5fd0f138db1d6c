"""The device code that divides a grouped GEMM into tiles, run on the host by tile_walk.cpp."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "moe_fp8" / "kernels"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles device code for the host with g++")
def test_every_row_is_stored_once_under_its_expert(tmp_path: Path) -> None:
    # The host has its own names of integers, and the harness another DEVICE.
    types = (KERNELS / "common" / "types.cuh").read_text()
    types = re.sub(r"^(using u?int\d+_t = .*|#define DEVICE .*)$", "", types, flags=re.M)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "types.cuh").write_text(types)
    program = tmp_path / "tile_walk"
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-w", f"-I{tmp_path}", f"-I{KERNELS}"]
    subprocess.run([*command, str(HERE / "tile_walk.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
