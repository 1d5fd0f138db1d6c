"""The commands of docs/warmup.md, "From `config.json` to a frozen server", print what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_fp8.jit import driver
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.key import kernel_key
from moe_fp8.jit.store import KernelStore
from moe_fp8.warmup import load_model, plan
from tests.cpu.cli_runs import QWEN

ROOT = Path(__file__).parents[2]
MODEL = "Qwen3-30B-A3B-FP8"

#: The programs of the commands, run by this interpreter.
PROGRAMS = """
python() { "$PYTHON" "$@"; }
moe-fp8() { python -m moe_fp8.cli "$@"; }
"""


def shown() -> list[tuple[str, list[str]]]:
    """The page's commands, each with the lines that it prints."""
    text = (ROOT / "docs" / "warmup.md").read_text()
    (block,) = re.findall(r"^## From `config.json` .*?^```\n(.*?)^```", text, re.M | re.S)
    commands = [part.splitlines() for part in block.removeprefix("$ ").split("\n$ ")]
    return [(command, "\n".join(lines).rstrip().splitlines()) for command, *lines in commands]


def matches(line: str, printed: str) -> bool:
    """Whether `printed` is the page's line, in which "..." stands for any text and the spaces behind it."""
    first, *rest = line.split("...")
    pattern = ".+".join(re.escape(part) for part in (first, *(part.lstrip(" ") for part in rest)))
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.skipif(driver.device_count() > 0, reason="the page shows a machine without a GPU")
def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    folder, home = tmp_path / MODEL, tmp_path / "home"
    folder.mkdir()
    shutil.copy(QWEN, folder / "config.json")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MOE_FP8_", "XDG_"))
    }
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    commands = shown()
    assert len(commands) == 5
    for command, lines in commands:
        if "build" in command:
            # Compiling would take a minute, and no command runs the kernels.
            store = KernelStore(home / ".cache" / "moe_fp8")
            for spec in plan(load_model(folder)).specs:
                store.put(Artifact(kernel_key(spec), spec.name, b"a stand-in", 32, 0, 0, 0, "13.0", 1.0))
        script = PROGRAMS + command.replace("/srv", str(tmp_path))
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        printed = [line.rstrip() for line in done.stdout.replace(str(tmp_path), "/srv").splitlines()]
        assert len(printed) == len(lines), f"{command}\n{done.stdout}{done.stderr}"
        for line, found in zip(lines, printed, strict=True):
            assert matches(line, found), f"{command}\nthe page shows {line}\nit prints     {found}"
