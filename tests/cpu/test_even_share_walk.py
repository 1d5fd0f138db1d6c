"""The device code that shares out work evenly, compiled for the host: every unit is somebody's, once."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "moe_fp8" / "kernels"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles device code for the host with g++")
def test_shares_meet_and_are_even(tmp_path: Path) -> None:
    for folder in ("common", "sched"):
        (tmp_path / folder).mkdir()
    types = (KERNELS / "common" / "types.cuh").read_text()
    types = re.sub(r"^(using u?int\d+_t = .*|#define DEVICE .*)$", "", types, flags=re.M)
    (tmp_path / "common" / "types.cuh").write_text(types)
    for name in ("common/scan.cuh", "sched/even_share.cuh"):
        shutil.copy(KERNELS / name, tmp_path / name)
    shutil.copy(HERE / "cta_host.h", tmp_path / "host.h")
    defines = {"NUM_THREADS": 64, "CLUSTER_SIZE": 1, "SMEM_BYTES": 16, "CASES": 120}
    program = tmp_path / "even_share_walk"
    command = ["g++", "-std=c++20", "-O1", "-w", f"-I{tmp_path}", *(f"-D{k}={v}" for k, v in defines.items())]
    subprocess.run([*command, str(HERE / "even_share_walk.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
