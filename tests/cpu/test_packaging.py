"""The wheel is built, inspected and installed in a fresh environment, which then compiles a kernel."""

from __future__ import annotations

import ast
import email
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import moe_fp8

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_make_says_that_the_installation_takes_long(tmp_path: Path) -> None:
    command = ["make", "-n", "demo", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said, install, demo = map(done.stdout.find, ("about a minute", "pip install", "server_example.demo"))
    assert -1 < said < install < demo


def requirements(wheel: Path) -> list[str]:
    """`Requires-Dist` without the extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [line for line in lines if "extra ==" not in line]


def test_one_pure_python_wheel_with_every_source(wheel: Path) -> None:
    assert wheel.name == f"moe_fp8-{moe_fp8.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moe_fp8").rglob("*")
        if path.suffix in (".py", ".cuh", ".json") or path.name == "py.typed"
    }
    assert any(source.endswith(".cuh") for source in sources)
    packaged = {name for name in names if not re.match(r"moe_fp8-[^/]+\.dist-info/", name)}
    assert packaged == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def declared(section: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ;\[]", line)[0] for line in section}


@pytest.mark.parametrize(
    ("folder", "extra", "loaded_by_others"),
    [
        # cuda.bindings loads NVRTC's library, and torch loads numpy.
        ("moe_fp8", None, {"nvidia-cuda-nvrtc", "numpy"}),
        ("server_example", "server", set()),
    ],
)
def test_what_is_imported_is_declared(folder: str, extra: str | None, loaded_by_others: set[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = declared(project["dependencies"])
    own = base if extra is None else declared(project["optional-dependencies"][extra])
    distributions = metadata.packages_distributions()
    imported = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
                name = node.args[0]
                begin = name.values[0] if isinstance(name, ast.JoinedStr) else name
                modules = [str(begin.value)] if isinstance(begin, ast.Constant) else []
            for root in {module.split(".")[0] for module in modules}:
                if root not in sys.stdlib_module_names and not (ROOT / root).is_dir():
                    names = {name.lower().replace("_", "-") for name in distributions.get(root, [root])}
                    # A namespace package belongs to several distributions.
                    imported.add(next(iter(names & (base | own)), root))
    # Plug-ins run inside an engine.
    assert imported - base - own - {"vllm", "sglang"} == set(), "imported but not declared"
    assert own - imported - loaded_by_others == set(), "declared but not imported"


def test_an_archive_chooses_and_compiles_as_a_folder_does(wheel: Path) -> None:
    program = (
        "import json, moe_fp8\n"
        "from moe_fp8.heuristics.gemm import table\n"
        "from moe_fp8.jit.key import kernel_key\n"
        "from moe_fp8.problems import GemmProblem\n"
        "from moe_fp8.specs import kernel_spec\n"
        "specs = {kernel_spec(GemmProblem('dense', 64, 4096, 7168, device=d)) for d in table.devices()}\n"
        "keys = sorted(map(kernel_key, specs))\n"
        "print(json.dumps([moe_fp8.__file__, table.devices(), keys]))\n"
    )

    def run(place: Path) -> list[Any]:
        command = [sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(command, env=environment, cwd=place.parent, capture_output=True, check=True)
        found: list[Any] = json.loads(done.stdout)
        assert found.pop(0).startswith(f"{place}{os.sep}")
        return found

    assert run(wheel) == run(ROOT)  # a wheel is a zip archive, from which Python can import


def test_a_fresh_environment_compiles_a_kernel(wheel: Path, tmp_path: Path) -> None:
    # README names these for planning and compiling. The others are torch, and numpy for torch.
    wanted = requirements(wheel)
    assert declared(wanted) == {"torch", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "rich"}
    without_torch = ["cuda-bindings", "nvidia-cuda-nvrtc", "rich"]
    assert f"pip install -c constraints.txt {' '.join(without_torch)}`" in (ROOT / "README.md").read_text()

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

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    imported = Path(run(home / "bin/python", "-c", program).strip())
    assert imported.is_relative_to(home), "the clone was imported, not the wheel"
    config = ROOT / "tests" / "configs" / "qwen3_30b.json"
    assert "gemm_fp8" in run(home / "bin/moe-fp8", "plan", "--model", config)
    # What needs torch says so in one line.
    for command in (
        ["bin/moe-fp8", "tune", "--model", config],
        ["bin/python", "-c", "import moe_fp8; moe_fp8.gemm_fp8"],
    ):
        failed = subprocess.run(
            [home / command[0], *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert failed.returncode and "PyTorch is not installed" in failed.stderr.splitlines()[-1]
        assert command[1] == "-c" or len(failed.stderr.splitlines()) == 1
