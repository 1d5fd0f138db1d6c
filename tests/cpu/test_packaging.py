"""The wheel: built, looked into, installed in a fresh environment, and a kernel compiled from there."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def requirements(wheel: Path) -> list[str]:
    """`Requires-Dist` without the extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [line for line in lines if "extra ==" not in line]


def test_one_pure_python_wheel_with_every_source(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moe_fp8").rglob("*")
        if path.suffix in (".py", ".cuh") or path.name == "py.typed"
    }
    assert any(source.endswith(".cuh") for source in sources)
    packaged = {name for name in names if not re.match(r"moe_fp8-[^/]+\.dist-info/", name)}
    assert packaged == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_fresh_environment_compiles_a_kernel(wheel: Path, tmp_path: Path) -> None:
    # All requirements but torch: planning and compiling do without it, and it is by far the largest.
    wanted = requirements(wheel)
    names = {re.split(r"[<>=!~ ;\[]", line)[0] for line in wanted}
    assert names == {"torch", "cuda-bindings", "nvidia-cuda-nvrtc", "pydantic", "rich"}
    without_torch = [line for line in wanted if not line.startswith("torch")]

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    install = [home / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", *without_torch], check=True)
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)

    program = (
        "import moe_fp8, sys\n"
        "from moe_fp8.jit.compiler import compile_kernel\n"
        "from moe_fp8.problems import GemmProblem\n"
        "from moe_fp8.specs import kernel_spec\n"
        "artifact = compile_kernel(kernel_spec(GemmProblem('dense', 64, 4096, 7168)))\n"
        "assert artifact.cubin.startswith(b'\\x7fELF') and artifact.spill_bytes == 0\n"
        "assert 'torch' not in sys.modules\n"
        "print(moe_fp8.__file__)\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOE_FP8"))
    }
    run = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
    done = subprocess.run([home / "bin/python", "-c", program], **run)
    assert Path(done.stdout.strip()).is_relative_to(home), "the clone was imported, not the wheel"

    config = ROOT / "tests" / "configs" / "qwen3_30b.json"
    done = subprocess.run([home / "bin/moe-fp8", "plan", "--model", config], **run)
    assert "gemm_fp8" in done.stdout
