"""README and docs are true: their code runs, and their names, links and settings exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_fp8
from moe_fp8 import cli, settings
from moe_fp8.warmup import __main__ as startup
from server_example.metrics import Metrics
from server_example.protocol import ChatRequest, CompletionRequest
from server_example.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]


def test_the_first_example_of_the_readme_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    # The widths in the example come from a real model; narrower widths keep its meaning.
    small = code.replace("7168", "512").replace("4096", "192")
    check = "\nassert y.shape == (64, 192) and y.dtype == torch.bfloat16"
    check += "\nexact = x.float() @ w.float().t()\nassert (y - exact).norm() / exact.norm() < 0.06"
    done = subprocess.run([sys.executable, "-c", small + check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _blocks_of_ops() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ops.md").read_text(), re.S)


def test_the_example_of_the_indexer_runs() -> None:
    (code,) = [block for block in _blocks_of_ops() if "indexer_select" in block]
    q, k, weights = torch.randn(40, 8, 128), torch.randn(40, 128), torch.rand(40, 8)
    names = {"torch": torch, "moe_fp8": moe_fp8, "q": q, "k": k, "weights": weights}
    exec(code.replace("2048", "5"), names)
    exact = torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q, k).relu(), weights)
    best = exact.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).argmax(1)
    found = (names["chosen"] == best[:, None].int()).any(1)
    assert found.float().mean() > 0.95  # rounding may let another key win


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\bmoe_fp8\.([a-z_0-9]+)\(", text):
        assert name in moe_fp8.__all__, f"moe_fp8.{name} is not public"
    for name in re.findall(r"\bmoe_fp8\.jit\.([a-z_0-9]+)\(", text):
        assert name in moe_fp8.jit.__all__, f"moe_fp8.jit.{name} is not public"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{target} does not exist"
    for command in re.findall(r"^make (\w+)", text, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), (
            f"make {command} does not exist"
        )


def test_every_op_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "ops.md").read_text()
    ops = [name for name in moe_fp8.__all__ if "fp8" in name or name.startswith("paged")]
    assert len(ops) >= 8
    assert [name for name in ops if f"`{name}`" not in text] == []


def test_every_setting_is_documented() -> None:
    documented = set(re.findall(r"^\| `(MOE_FP8_\w+)`", (ROOT / "docs" / "warmup.md").read_text(), re.M))
    assert documented == set(settings._PARSERS)


def test_the_dockerfile_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "examples" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
    assert copied
    for sources in copied:
        for source in sources.split():
            assert (ROOT / source).exists(), source
    commands = re.findall(r"^(?:RUN| &&) moe-fp8 (\w+) (.*)$", text, re.M)
    assert [name for name, _ in commands] == ["build", "check"]
    for name, rest in commands:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        known = capsys.readouterr().out
        plan = re.findall(r'^ARG PLAN="(.*)"', text, re.M)[0]
        for option in re.findall(r"--[a-z-]+", f"{rest} {plan}"):
            assert f"{option} " in known or f"{option}\n" in known, option
    for variable in re.findall(r"^ENV (MOE_FP8_\w+)", text, re.M):
        assert variable in settings._PARSERS
    (packages,) = re.findall(r"constraints.txt (cuda-bindings .*)$", text, re.M)
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{package}==" in f"\n{pinned}" for package in packages.split())


def test_the_example_of_graphs_runs() -> None:
    code, _on_a_gpu = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "graphs.md").read_text(), re.S)
    check = "\nassert torch.equal(hidden, table[[7, 8, 9]])\nassert 4 in runner.buckets"
    done = subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_of_weight_gradients_runs() -> None:
    (code,) = [block for block in _blocks_of_ops() if "k_grouped_gemm_fp8" in block]
    check = "\nexact = torch.stack([dy[:256].T @ x[:256], 0 * gradient[1].bfloat16(), dy[256:].T @ x[256:]])"
    check += "\nassert (gradient / 2 - exact).norm() / exact.norm() < 0.06"
    done = subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_the_examples_work(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"(from|import) ", line)]
    for line in lines:
        exec(line, {})


def test_the_commands_of_the_docs_take_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line parses with the options in the text and the options in its comment."""
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/tuning.md", "docs/warmup.md"))
    lines = re.findall(r"^(moe-fp8 \w+|python -m moe_fp8\.warmup)(.*)$", text, re.M)
    assert len(lines) >= 7
    for program, rest in lines:
        command = program.split()[1:] if program.startswith("moe-fp8") else []
        main = cli.main if command else startup.main
        with pytest.raises(SystemExit) as done:
            main([*command, "--help"])
        assert done.value.code == 0
        known = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", rest):
            assert f"{option} " in known or f"{option}\n" in known, f"{program} has no {option}"
    in_prose = re.findall(r"`(--[a-z-]+)`", (ROOT / "docs" / "warmup.md").read_text())
    # `known` is now the help of the last command, the start-up script.
    assert in_prose and [option for option in in_prose if option not in known] == []


def test_the_servers_options_parameters_and_metrics_are_documented() -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert set(re.findall(r"`(--[a-z-]+)`", text)) == options
    for name in {*CompletionRequest.model_fields, *ChatRequest.model_fields}:
        assert f"`{name}`" in text or f"`{name}." in text, name
    for family in Metrics({}).registry.collect():
        assert re.search(rf"`{family.name}(_total)?[`{{]", text), family.name
