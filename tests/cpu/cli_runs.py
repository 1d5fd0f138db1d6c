"""Shared parts of the command line's tests: no GPU, a plan that is quick to build, and a command's output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_fp8 import cli
from moe_fp8.jit import driver
from moe_fp8.warmup import PlanOptions

QWEN = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"

#: A plan that is quick to build: the smallest plan of the smallest config, for the engine that calls least.
SMALL = [
    "--model",
    str(QWEN),
    "--engine",
    "sglang",
    "--max-tokens",
    "1",
    "--max-batch",
    "1",
    "--num-sms",
    "132",
]
SMALL_OPTIONS = PlanOptions(engine="sglang", max_tokens=1, max_batch=1)


def with_a_closed_pipe(argv: list[str]) -> tuple[int, str]:
    """Run the command in a process whose output nobody reads; returns the exit code and stderr."""
    code = "import sys; from moe_fp8.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read()
    return process.wait(), complaint


Json = Callable[[list[str]], tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_count", lambda: 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the small plan."""
    folder = tmp_path_factory.mktemp("store")
    assert cli.main(["build", *SMALL, "--cache-dir", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Json:
    """A function that runs a command with --json; it returns the exit code and the parsed output."""

    def run(argv: list[str]) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main([*argv, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
