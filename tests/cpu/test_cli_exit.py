"""Exit codes of `moe-fp8` where an output, a folder or an argument is unfit: one line, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_fp8 import cli
from moe_fp8.errors import CompileError, MoeFp8Error
from moe_fp8.jit import driver
from moe_fp8.jit import store as store_module
from moe_fp8.jit.build import build
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.jit.runtime import KernelRuntime
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.warmup import __main__ as startup
from moe_fp8.warmup import run as run_module
from moe_fp8.warmup.arguments import EXIT_FAILED
from moe_fp8.warmup.run import demand_kept
from tests.cpu.cli_runs import QWEN, SMALL, built, no_gpu, with_a_closed_pipe
from tests.cpu.jit_kernels import spec, write_kernels

__all__ = ["built", "no_gpu"]

CLI = [sys.executable, "-m", "moe_fp8.cli"]
WARMUP = [sys.executable, "-m", "moe_fp8.warmup"]


def shell(redirections: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command with the shell's redirections."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *command], capture_output=True, text=True
    )


def without_a_reader(command: list[str]) -> tuple[int, str]:
    """Run the command in a process whose stderr nobody reads; returns the exit code and stdout."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stderr.close()
    printed = process.stdout.read()
    process.stdout.close()
    return process.wait(), printed


@pytest.fixture
def begun(built: Path, tmp_path: Path) -> Path:
    """A store that lacks three kernels of the small plan."""
    folder = Path(shutil.copytree(built, tmp_path / "begun"))
    for path in sorted(folder.glob("*.kernel"))[:3]:
        path.unlink()
    return folder


@pytest.mark.parametrize("command", [[*CLI, "build", "--json"], WARMUP], ids=["build", "warmup"])
def test_a_log_that_nobody_reads_does_not_end_the_work(command: list[str], begun: Path) -> None:
    code, printed = without_a_reader([*command, *SMALL, "--cache-dir", str(begun), "--jobs", "1"])
    assert code == 0 and json.loads(printed)["compiled"] == 3
    assert cli.main(["check", *SMALL, "--cache-dir", str(begun)]) == 0


@pytest.mark.parametrize("redirections", ["2>/dev/full", "<&- 2>&-"])
def test_a_build_without_a_log(redirections: str, begun: Path) -> None:
    # Compiler processes inherit the streams.
    done = shell(redirections, [*CLI, "build", "--json", *SMALL, "--cache-dir", str(begun), "--jobs", "2"])
    assert done.returncode == 0 and json.loads(done.stdout)["compiled"] == 3


@pytest.mark.parametrize("redirections", ["2>&-", ">&- 2>&-"])
def test_check_tells_the_truth_without_streams(redirections: str, built: Path, tmp_path: Path) -> None:
    for folder, code in ((built, 0), (tmp_path, 1)):
        done = shell(redirections, [*CLI, "check", *SMALL, "--cache-dir", str(folder)])
        assert done.returncode == code and "Traceback" not in done.stderr
        assert ("kernels are in" in done.stdout) == (redirections == "2>&-")


def test_the_startup_script_without_streams(built: Path) -> None:
    command = [*WARMUP, *SMALL, "--cache-dir", str(built), "--quiet"]
    done = shell("2>&-", command)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True
    done = shell(">&-", command)
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(">/dev/full", command)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_build_is_judged_though_nobody_reads_its_table(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    code, complaint = with_a_closed_pipe(["build", *SMALL, "--cache-dir", str(shared), "--quiet"])
    assert code == 1 and "not kept" in complaint


def test_check_fails_though_nobody_reads_what_is_missing(tmp_path: Path) -> None:
    code, complaint = with_a_closed_pipe(["check", *SMALL, "--cache-dir", str(tmp_path)])
    assert code == 1 and "Traceback" not in complaint


def test_a_full_output_is_one_line() -> None:
    command = [sys.executable, "-m", "moe_fp8.cli", "plan", "--explain", "64", "2048", "4096"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_ctrl_c_ends_a_build_with_one_line(tmp_path: Path) -> None:
    """A terminal sends the signal to the compiler processes, too."""
    command = [*CLI, "build", *SMALL, "--cache-dir", str(tmp_path), "--quiet", "--jobs", "2"]
    build = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*.kernel")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(build.pid, signal.SIGINT)
    out, err = build.communicate(timeout=120)
    assert (build.returncode, out) == (130, "")
    assert err == f"interrupted: finished kernels are kept in {tmp_path}\n"
    assert list(tmp_path.glob("*.kernel"))


def test_the_startup_script_tells_why_a_kernel_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Any, summary: dict[str, Any]) -> None:
        raise CompileError("tiny", "NVRTC failed to compile it:\ntiny.cuh(3): error: no such name")

    monkeypatch.setattr(startup, "_warm", fail)
    assert startup.main([*SMALL, "--quiet"]) != 0
    assert "error: no such name" in json.loads(capsys.readouterr().out)["message"]


def test_the_startup_script_says_on_stdout_that_the_progress_bar_lacks_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Any, summary: dict[str, Any]) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")  # as on a terminal

    monkeypatch.setattr(startup, "_warm", fail)
    assert startup.main(SMALL) == EXIT_FAILED
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"] and told["message"].startswith("rich is not installed")


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_startup_script_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "build", interrupted)
    tmp_path.chmod(0o755 if kept else 0o777)
    assert startup.main([*SMALL, "--cache-dir", str(tmp_path), "--quiet"]) == 130
    said = capsys.readouterr()
    message = f"finished kernels are kept in {tmp_path}" if kept else "kernels are not kept"
    assert said.err == f"interrupted: {message}\n"
    told = json.loads(said.out)
    assert (told["ok"], told["error"], told["message"]) == (False, "KeyboardInterrupt", message)


def test_a_plan_may_be_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "plan_from", interrupted)
    assert cli.main(["plan", *SMALL]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("encoding", "name", "printed"),
    [("ascii", b"m\xc3\xb6", "m\\xf6: "), ("utf-8:strict", b"m\xff", "m\\udcff: ")],
)
def test_a_name_that_the_output_cannot_encode(
    tmp_path: Path, encoding: str, name: bytes, printed: str
) -> None:
    folder = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(folder)
    shutil.copy(os.fsencode(QWEN), folder + b"/config.json")
    command = [*map(os.fsencode, CLI), b"plan", b"--model", folder, *map(os.fsencode, SMALL[2:])]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(printed)


def test_build_fails_if_the_store_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # the store keeps nothing where others can write
    assert cli.main(["build", *SMALL, "--cache-dir", str(shared), "--quiet"]) == 1
    assert f"not kept: they cannot be written to {shared}" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [0, 1])
def test_the_startup_script_fails_if_the_store_keeps_nothing(
    begun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """The kernels that it has loaded end with it, so that a server must compile them again."""

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "publish", full)
    monkeypatch.setattr(driver, "device_count", lambda: devices)
    monkeypatch.setattr(driver, "device_info", lambda: DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0)))
    monkeypatch.setattr(KernelRuntime, "preload", lambda self, specs: len(specs))
    capsys.readouterr()
    assert startup.main([*SMALL, "--cache-dir", str(begun), "--quiet", "--jobs", "1"]) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert (told["ok"], told["compiled"], told["loaded"]) == (False, 3, told["kernels"] * devices)
    lost = f"3 of {told['kernels']} kernels are compiled but not kept"
    assert told["message"] == f"{lost}: they cannot be written to {begun}"
    assert f"error: {told['message']}" in said.err


def test_only_what_was_compiled_now_can_be_lost(tmp_path: Path) -> None:
    sources = SourceTree(write_kernels(tmp_path / "kernels", "tiny"))
    specs = [spec(factor=factor) for factor in (2, 3)]
    build(specs[:1], KernelStore(tmp_path / "cache", sources), 1, False)
    store = KernelStore(tmp_path / "cache", sources)
    demand_kept(build(specs, store, 1, False), store)
    (tmp_path / "cache").chmod(0o777)
    demand_kept(build(specs, store, 1, False), store)
    store = KernelStore(None, sources)
    with pytest.raises(MoeFp8Error, match=r"2 of 2 kernels .* no folder for them; set MOE_FP8_CACHE_DIR"):
        demand_kept(build(specs, store, 1, False), store)


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
    "argv",
    [
        ["plan", "--model", str(QWEN), "--cache-dir", "~nosuchuser/x"],
        ["check", *SMALL, "--cache-dir", ""],
        ["check", *SMALL, "--bundle", ""],
        ["tune", "--sample", "-5"],
    ],
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
