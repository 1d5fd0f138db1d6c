"""Exit codes of `moe-fp8` where an output, a folder or an argument is unfit: one line, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_fp8 import cli
from tests.cpu.cli_runs import QWEN, SMALL, no_gpu, with_a_closed_pipe

__all__ = ["no_gpu"]


def test_check_fails_though_nobody_reads_what_is_missing(tmp_path: Path) -> None:
    code, complaint = with_a_closed_pipe(["check", *SMALL, "--cache-dir", str(tmp_path)])
    assert code == 1 and "Traceback" not in complaint


def test_a_full_output_is_one_line() -> None:
    command = [sys.executable, "-m", "moe_fp8.cli", "plan", "--explain", "64", "2048", "4096"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_build_fails_if_the_store_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # the store keeps nothing where others can write
    assert cli.main(["build", *SMALL, "--cache-dir", str(shared), "--quiet"]) == 1
    assert f"not kept: they cannot be written to {shared}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--explain", "64", "2048", "4096", "--num-sms", "132,78"],
        ["plan", "--explain", "64", "2048", "4096", "--batch-invariant", "both"],
        ["plan", "--explain", "64", "2048", "4096", "--tp", "8"],
        ["plan", "--explain", "64", "2048", "4096", "--strict"],
        ["plan", "--diff", "a.json", "b.json", "--rows"],
        ["check", *SMALL, "--bundle", "nowhere", "--cache-dir", "elsewhere"],
        ["tune", "--table", "--out", "~nosuchuser/x", "--timings", "nowhere.gz"],
        ["tune", "--table", "--timings", "nowhere.gz", "--shape", "dense:4096:7168"],
        ["tune", "--fit", "--table", "--timings", "nowhere.gz"],
        ["tune", "--fit", "--timings", "nowhere.gz", "--json"],
    ],
)
def test_arguments_that_do_not_fit_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["plan", "--model", str(QWEN), "--cache-dir", "~nosuchuser/x"], ["tune", "--sample", "-5"]]
)
def test_arguments_that_cannot_be_parsed(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2


def test_a_remedy_keeps_the_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(QWEN.with_name("deepseek_v3.json"))
    argv = ["plan", "--model", config, "--tp", "2", "--ep", "2", "--redundant-experts", "3"]
    assert cli.main(argv) == 2
    assert "tp=2 ep=2" not in capsys.readouterr().err
