"""The allowed imports: between the package's parts in Python, and between its folders in device code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moe_fp8"
KERNELS = PACKAGE / "kernels"

#: Part of the package -> the other parts that it may import.
ALLOWED = {
    "errors": set(),
    "limits": set(),
    "problems": set(),
    "settings": {"errors"},
    "heuristics": {"errors", "limits", "problems"},
    "specs": {"heuristics", "limits", "problems"},
    # Device code must agree with these numbers.
    "params": {"heuristics", "limits", "problems", "specs"},
    "kernels": set(),
    "jit": {"errors", "settings", "specs", "params", "kernels"},
    # A launch computes its grid from the tile that the spec was built with.
    "ops": {"errors", "settings", "limits", "problems", "heuristics", "specs", "params", "jit"},
    "graph": {"errors", "ops"},
    # The planner asks which devices have a table of measured tiles.
    "warmup": {"errors", "settings", "limits", "problems", "heuristics", "specs", "jit"},
    "tune": {"errors", "settings", "limits", "problems", "heuristics", "specs", "jit", "ops", "warmup"},
    # Plug-ins stand above everything that an engine needs, and only engines import them. The command line
    # may import what is known of an engine without importing it: `integrations/supported.py`.
    "integrations": {"errors", "settings", "limits", "problems", "jit", "ops", "warmup"},
    "doctor": {"errors", "settings", "jit", "integrations"},
    "cli_tune": {"errors", "warmup", "tune"},
    "cli": {"errors", "settings", "problems", "specs", "jit", "warmup", "doctor", "cli_tune", "integrations"},
    # The names of `__init__` load on first use; their modules are imported only for type checkers.
    "__init__": {"errors", "graph", "jit", "ops", "warmup"},
}

MAY_IMPORT_TORCH = {"ops", "graph", "tune", "integrations"}

#: Code outside the package may use only these modules, and only their public names.
PUBLIC_MODULES = {"moe_fp8", "moe_fp8.errors", "moe_fp8.graph", "moe_fp8.jit", "moe_fp8.warmup"}

#: Benchmarks may use these modules too: they time the compiler and other choices of the selector, with the
#: clock of `moe-fp8 tune`.
MEASURED_MODULES = {"moe_fp8.jit.compiler", "moe_fp8.heuristics", "moe_fp8.problems", "moe_fp8.tune.replay"}

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of a file: moe_fp8/jit/store.py -> jit; moe_fp8/cli.py -> cli."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import anywhere in a file; name is None for `import module`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *(node.module or "").split("."))).strip(".")
            for alias in node.names:
                yield module, alias.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield ast.unparse(node.args[0]).strip("'"), None


def imported_parts(path: Path) -> Iterator[str]:
    for module, name in imports(path):
        if module == "moe_fp8" and name is not None:
            # `from moe_fp8 import heuristics` names a part; a public name belongs to `__init__`.
            is_part = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
            yield name if is_part else "__init__"
        elif module.startswith("moe_fp8."):
            yield module.split(".")[1]
        elif module == "moe_fp8":
            yield "__init__"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_part_imports_only_what_is_below_it(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part} is a new part of the package: say here what it may import"
    above = set(imported_parts(path)) - ALLOWED[part] - {part}
    if part in ("graph", "cli", "integrations"):
        above.discard("__init__")  # public names, which any user may import
    assert not above, f"{part} may not import {sorted(above)}"


@pytest.mark.parametrize("part", ["doctor", "cli"])
def test_the_command_line_imports_no_plug_in(part: str) -> None:
    named = {
        module for module, _ in imports(PACKAGE / f"{part}.py") if module.startswith("moe_fp8.integrations")
    }
    assert named == {"moe_fp8.integrations.supported"}


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_and_cuda_stay_in_their_places(path: Path) -> None:
    part = part_of(path)
    modules = {name for module, name in imports(path) for name in (module, f"{module}.{name}")}
    roots = {module.split(".")[0] for module in modules}
    if part not in MAY_IMPORT_TORCH:
        assert "torch" not in roots
    if part != "jit":
        assert "cuda" not in roots
    if path != PACKAGE / "jit" / "driver.py":
        assert "cuda.bindings.driver" not in modules
    if path != PACKAGE / "ops" / "registry.py":
        assert "torch.library" not in path.read_text(), "ops/registry.py is its only user"
    if part in ("problems", "heuristics", "specs", "params"):
        foreign = roots - set(sys.stdlib_module_names) - {"moe_fp8"}
        assert not foreign, f"standard library only, not {sorted(foreign)}"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_settings_is_the_only_reader_of_the_packages_variables(path: Path) -> None:
    if path == PACKAGE / "settings.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call | ast.Subscript) and "environ" in ast.unparse(node):
            assert "MOE_FP8" not in ast.unparse(node), f"line {node.lineno} reads the environment"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getenv"):
            assert "MOE_FP8" not in ast.unparse(node), f"line {node.lineno} reads the environment"


@pytest.mark.parametrize("folder", ["server_example", "benchmarks"])
def test_outside_code_uses_public_names(folder: str) -> None:
    # Benchmarks time the compiler too.
    allowed = PUBLIC_MODULES | (MEASURED_MODULES if folder == "benchmarks" else set())
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    for path in paths:
        for module, name in imports(path):
            if module.split(".")[0] != "moe_fp8":
                continue
            where = f"{path.relative_to(ROOT)}: {module}.{name}"
            assert f"{module}.{name}" in PUBLIC_MODULES or module in allowed, where
            if module in PUBLIC_MODULES and name is not None and f"{module}.{name}" not in PUBLIC_MODULES:
                assert name in public_names(module), f"{where} is not public"


@pytest.mark.parametrize("folder", ["moe_fp8", "server_example", "benchmarks"])
def test_no_imports_run_in_a_circle(folder: str) -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / folder).rglob("*.py")
        # A package's __init__ gathers the names of its modules, which may use each other.
        if path.name != "__init__.py"
    }
    below: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = {name for base, one in imports(path) for name in (base, f"{base}.{one}")}
        below[module] = named & set(modules) - {module}

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join((*above, module))}"
        for other in below.pop(module, ()):
            walk(other, (*above, module))

    for module in modules:
        walk(module, ())


def public_names(module: str) -> set[str]:
    """The names in a module's `__all__`, or its public classes and functions if it has no `__all__`."""
    loaded = __import__(module, fromlist=["*"])
    return set(getattr(loaded, "__all__", [name for name in vars(loaded) if not name.startswith("_")]))


@pytest.mark.parametrize(
    "modules",
    [
        "moe_fp8, moe_fp8.warmup, moe_fp8.cli, moe_fp8.jit.runtime, moe_fp8.jit.build",
        "server_example.serve",  # the process with HTTP, which starts that of the engine
    ],
)
def test_what_needs_neither_torch_nor_the_driver_does_not_import_them(modules: str) -> None:
    program = (
        f"import sys, {modules}\n"
        "print([name for name in ('torch', 'cuda.bindings.driver') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


#: Folder of device code -> folders that its files may include. "" stands for the entry files.
DEVICE_LAYERS = {
    "": {"gemm", "mqa", "topk", "sched", "mma", "ptx", "common"},
    "gemm": {"gemm", "sched", "mma", "ptx", "common"},
    "mqa": {"mqa", "sched", "mma", "ptx", "common"},
    "topk": {"topk", "ptx", "common"},
    "sched": {"sched", "ptx", "common"},
    "mma": {"mma", "ptx", "common"},
    "ptx": {"ptx", "common"},
    "common": {"common"},
}


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.cuh")), ids=lambda path: str(path.relative_to(KERNELS))
)
def test_device_code_includes_only_what_is_below_it(path: Path) -> None:
    (*folder, _) = path.relative_to(KERNELS).parts
    layer = folder[0] if folder else ""
    assert layer in DEVICE_LAYERS
    text = path.read_text()
    assert not re.findall(r"^\s*#\s*include\s+<", text, re.M), "only files of kernels/ may be included"
    for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        assert (KERNELS / included).exists(), f"{included}: includes are relative to kernels/"
        assert Path(included).parent.as_posix() in DEVICE_LAYERS[layer], (
            f"{included} is not below {layer or 'entries'}"
        )
