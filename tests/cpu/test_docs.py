"""README and docs say what is there: their code runs, their names, links and settings exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_fp8
from moe_fp8 import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]


def test_the_first_example_of_the_readme_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    # The example's widths are a real model's; narrower ones keep its meaning.
    small = code.replace("7168", "512").replace("4096", "192")
    check = "\nassert y.shape == (64, 192) and y.dtype == torch.bfloat16"
    check += "\nexact = x.float() @ w.float().t()\nassert (y - exact).norm() / exact.norm() < 0.06"
    done = subprocess.run([sys.executable, "-c", small + check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\bmoe_fp8\.([a-z_0-9]+)\(", text):
        assert name in moe_fp8.__all__, f"moe_fp8.{name} is not public"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{target} does not exist"
    for command in re.findall(r"^make (\w+)", text, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), (
            f"make {command} does not exist"
        )


def test_every_op_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    ops = [name for name in moe_fp8.__all__ if "fp8" in name or name.startswith("paged")]
    assert len(ops) >= 8
    assert [name for name in ops if f"`{name}`" not in text] == []


def test_every_setting_is_documented() -> None:
    documented = set(re.findall(r"^\| `(MOE_FP8_\w+)`", (ROOT / "docs" / "warmup.md").read_text(), re.M))
    assert documented == set(settings._PARSERS)


def test_every_commands_help_matches_the_docs() -> None:
    text = (ROOT / "docs" / "warmup.md").read_text()
    for command in sorted(set(re.findall(r"^moe-fp8 (\w+)", text, re.M))):
        program = f"from moe_fp8.cli import main; main([{command!r}, '--help'])"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"moe-fp8 {command}: {done.stderr}"
        for option in ("--rows",) if command == "plan" else ():
            assert option in done.stdout
