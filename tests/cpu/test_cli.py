"""Runs `moe-fp8` and `python -m moe_fp8.warmup` as a user does, on a machine without a GPU."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_fp8 import cli
from moe_fp8.errors import CompileError, ConfigError, DriverError, MoeFp8Error, ToolchainError
from moe_fp8.jit import driver, runtime
from moe_fp8.jit.build import BuildReport, BuildRow
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup import PlanOptions, build_plan, load_model, load_plan, plan
from moe_fp8.warmup import __main__ as startup
from moe_fp8.warmup.arguments import exit_code
from moe_fp8.warmup.tables import plan_table
from tests.cpu.cli_runs import SMALL, SMALL_OPTIONS, Json, built, no_gpu, run_json, with_a_closed_pipe

__all__ = ["built", "no_gpu", "run_json"]

CONFIGS = Path(__file__).parent.parent / "configs"
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0))


def test_plan_prints_every_distinct_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(CONFIGS / "deepseek_v32.json"), "--tp", "8", "--ep", "8"]
    assert cli.main(["plan", *arguments]) == 0
    table = capsys.readouterr().out
    assert all(len(line) <= 100 for line in table.splitlines())
    assert "…" not in table, "a column is cut off"
    expected = plan(load_model(CONFIGS / "deepseek_v32.json"), PlanOptions(tp=8, ep=8))
    assert f"{len(expected.specs)} kernels" in table
    for spec, key in expected.keys().items():
        assert spec.name in table
        assert key[:12] in table
    assert "q_a+kv_a" not in table
    assert cli.main(["plan", *arguments, "--rows"]) == 0
    uses = capsys.readouterr().out
    assert "q_a+kv_a" in uses
    assert all(len(line) <= 100 for line in uses.splitlines())
    assert "…" not in uses


def test_plan_as_json(run_json: Json) -> None:
    code, told = run_json(["plan", *SMALL])
    expected = plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS)
    assert code == 0
    assert [kernel["key"] for kernel in told["kernels"]] == list(expected.keys().values())
    assert told["options"]["max_tokens"] == 1


def test_plan_of_weight_gradients(run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run_json(["plan", *SMALL, "--weight-gradients"])
    assert code == 0 and told["options"]["weight_gradients"] is True
    rows = [row for row in told["rows"] if row["op"] == "k_grouped_gemm_fp8"]
    assert (2048, 768, 128) in {(row["n"], row["k"], row["num_experts"]) for row in rows}
    assert cli.main(["plan", *SMALL, "--weight-gradients", "--rows"]) == 0
    table = capsys.readouterr().out
    assert "k_grouped_gemm_fp8" in table and "128 x 2048 x 768" in table
    assert all(len(line) <= 100 for line in table.splitlines())


def test_plan_tells_what_is_built(built: Path, run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["plan", *SMALL[:2], "--max-tokens", "128", "--max-batch", "1", "--cache-dir", str(built)]
    code, told = run_json(more)
    assert code == 0
    there = {path.stem for path in built.glob("*.kernel")}
    assert {kernel["cached"] for kernel in told["kernels"]} == {True, False}
    for kernel in told["kernels"]:
        assert kernel["cached"] == (kernel["key"] in there)
    for row in told["rows"]:
        kernel = told["kernels"][row["kernel"]]
        assert (row["key"], row["cached"]) == (kernel["key"], kernel["cached"])
        assert row["config"] and row["op"] and row["rows"]
    dense = next(row for row in told["rows"] if row["layout"] == "dense")
    assert re.match(r"\d+x\d+", dense["config"])
    assert cli.main([*more, "--rows"]) == 0
    shown = capsys.readouterr().out
    for row in told["rows"]:
        if row["layout"] is not None:
            line = rf"^ *({row['num_experts']} x )?{row['n']} x {row['k']} .* {re.escape(row['config'])} +"
            line += rf"{row['key'][:12]} +{'yes' if row['cached'] else 'no'} "
            assert re.search(line, shown, re.M), line


def test_planning_needs_neither_torch_nor_a_compiler() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "sys.modules['cuda.bindings'] = None\n"
        "from moe_fp8.cli import main\n"
        f"sys.exit(main(['plan', *{SMALL!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gemm_fp8" in done.stdout
    assert "no keys are shown" in done.stderr


def test_build_fills_the_store_once(built: Path, run_json: Json) -> None:
    expected = plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS)
    code, told = run_json(["build", *SMALL, "--cache-dir", str(built), "--quiet"])
    assert code == 0
    assert (told["compiled"], told["cached"]) == (0, len(expected.specs))
    assert {kernel["key"] for kernel in told["kernels"]} == set(expected.keys().values())
    assert {path.stem for path in built.glob("*.kernel")} == set(expected.keys().values())
    assert all(kernel["spill_bytes"] == 0 for kernel in told["kernels"])


def test_build_prints_what_ptxas_said(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", *SMALL, "--cache-dir", str(built), "--quiet"]) == 0
    table = capsys.readouterr().out
    assert "compiled, " in table
    for heading in ("regs", "spill", "local"):
        assert heading in table
    assert all(len(line) <= 100 for line in table.splitlines())
    assert "…" not in table


def test_build_tells_what_the_compiler_reports(
    tmp_path: Path, run_json: Json, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = KernelSpec("good", (), 128, 0), KernelSpec("bad", (), 128, 0)
    rows = (
        BuildRow(good, "0" * 32, True, 0.0, 40, 0, 0, ()),
        BuildRow(bad, "1" * 32, True, 0.0, 168, 8, 16, ("unused variable",)),
    )
    monkeypatch.setattr(cli, "build_plan", lambda *given, **named: BuildReport(rows, 1.5))
    build = ["build", *SMALL, "--cache-dir", str(tmp_path), "--quiet"]
    code, told = run_json(build)
    assert code == 0 and (told["seconds"], told["bundle"]) == (1.5, None)
    assert told["kernels"][1] == {
        "kernel": str(bad),
        "key": "1" * 32,
        "cached": True,
        "seconds": 0.0,
        "registers": 168,
        "spill_bytes": 8,
        "local_bytes": 16,
        "warnings": ["unused variable"],
    }
    assert cli.main(build) == 0
    assert capsys.readouterr().err == f"warning: {bad} spills 8 bytes of registers\n"


def test_build_hands_on_jobs_and_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_json: Json
) -> None:
    asked: list[object] = []

    def noted(*given: object, jobs: int | None, progress: bool | None) -> BuildReport:
        asked.append((jobs, progress))
        return BuildReport((), 0.0)

    monkeypatch.setattr(cli, "build_plan", noted)
    for options in ([], ["--jobs", "3", "--quiet"]):
        assert run_json(["build", *SMALL, "--cache-dir", str(tmp_path), *options])[0] == 0
    assert asked == [(None, None), (3, False)]


def test_check_without_any_folder_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "store_from", lambda arguments: KernelStore(None))
    assert cli.main(["check", *SMALL]) == 1
    assert "kernels are in no folder, since neither MOE_FP8_CACHE_DIR nor HOME" in capsys.readouterr().out


def test_check_passes_on_a_full_store(built: Path, run_json: Json) -> None:
    code, told = run_json(["check", *SMALL, "--cache-dir", str(built)])
    assert (code, told["ok"], told["missing"]) == (0, True, [])


@pytest.mark.parametrize("damage", ["removed", "truncated", "altered"])
def test_check_names_the_kernel_that_is_not_whole(
    built: Path, tmp_path: Path, damage: str, run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = sorted(built.glob("*.kernel"))
    for path in copied:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / copied[0].name
    whole = victim.read_bytes()
    if damage == "removed":
        victim.unlink()
    else:
        victim.write_bytes(whole[:-1] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    code, told = run_json(["check", *SMALL, "--cache-dir", str(tmp_path)])
    assert (code, told["ok"]) == (1, False)
    assert [missing["key"] for missing in told["missing"]] == [victim.stem]
    assert cli.main(["check", *SMALL, "--cache-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert victim.stem in said.out
    assert "moe-fp8 build" in said.err


def test_check_fails_for_a_bigger_plan(built: Path, run_json: Json) -> None:
    bigger = ["check", "--model", str(CONFIGS / "deepseek_v32.json"), "--cache-dir", str(built)]
    code, told = run_json(bigger)
    assert code == 1
    assert any("mqa_logits_fp8" in missing["kernel"] for missing in told["missing"])


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--model", "/nowhere/config.json"],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--tp", "4", "--strict"],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--gemm", "dense:100:128"],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--block-size", "16"],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--max-tokens", "0"],
        ["check", "--model", str(CONFIGS / "qwen3_30b.json"), "--ep", "7"],
        ["check", "--model", "a name that is too long" * 20],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--gemm", "masked:4096:7168:1025"],
        ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--redundant-experts", "1048576"],
    ],
)
def test_bad_requests_exit_2_with_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [[], ["plan"], ["fly"], ["build", *SMALL, "--jobs", "0"], ["explain", "gemm", *SMALL, "--strict"]]
)
def test_bad_usage_exits_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("tp", "1", 2), 2),
        (ToolchainError("no NVRTC"), 3),
        (CompileError("gemm_fp8", "log"), 4),
        (DriverError("cuLibraryLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU"), 5),
    ],
)
def test_errors_have_their_exit_code(error: MoeFp8Error, code: int) -> None:
    assert exit_code(error) == code


def test_a_closed_pipe_is_no_error() -> None:
    code, complaint = with_a_closed_pipe(["plan", "--json", *SMALL])
    assert code == 0, complaint
    assert "Traceback" not in complaint and "BrokenPipe" not in complaint


def test_startup_script_builds_and_says_so_in_one_line(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(built.glob("*.kernel"))[1:]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    capsys.readouterr()
    assert startup.main([*SMALL, "--cache-dir", str(tmp_path), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    told = json.loads(out)
    assert told["ok"] is True
    assert (told["compiled"], told["cached"]) == (1, told["kernels"] - 1)
    assert (told["device"], told["loaded"], told["spilling"]) == (None, 0, 0)


def test_startup_script_loads_where_there_is_a_hopper(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def preload(self: runtime.KernelRuntime, specs: Any) -> int:
        assert self.store.root == built
        loaded.extend(specs)
        return len(loaded)

    monkeypatch.setattr(runtime.KernelRuntime, "preload", preload)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda: H200)
    assert startup.main([*SMALL, "--cache-dir", str(built), "--quiet", "--require-gpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["loaded"]) == ("NVIDIA H200", told["kernels"])
    assert loaded == list(plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS).specs)


def test_startup_script_can_insist_on_a_gpu(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main([*SMALL, "--cache-dir", str(built), "--quiet", "--require-gpu"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["error"]) == (False, "ToolchainError")


def test_startup_script_reports_a_bad_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["--model", "/nowhere"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["error"] == "ModelError"
    assert said.err.startswith("error: ")


def test_sms_come_from_a_hopper_gpu_only(run_json: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plan", "--model", str(CONFIGS / "qwen3_30b.json"), "--max-tokens", "16"]
    assert run_json(arguments)[1]["options"]["num_sms"] == 132
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(num_sms=78))
    assert run_json(arguments)[1]["options"]["num_sms"] == 78
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(num_sms=108, cc=(8, 0)))
    assert run_json(arguments)[1]["options"]["num_sms"] == 132


def test_load_plan_preloads_exactly_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def preload(specs: Any, jobs: int | None, progress: Any) -> int:
        seen.extend(specs)
        return 3

    monkeypatch.setattr(runtime, "preload", preload)
    planned = plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS)
    assert load_plan(planned) == 3
    assert seen == list(planned.specs)


def test_build_plan_reports_each_kernel_as_it_is_ready(built: Path) -> None:
    from moe_fp8.jit.store import KernelStore

    planned = plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS)
    done: list[tuple[int, int]] = []
    build_plan(planned, KernelStore(built), progress=lambda ready, total, row: done.append((ready, total)))
    assert done == [(number, len(planned.specs)) for number in range(1, len(planned.specs) + 1)]


def test_bench_hands_its_arguments_to_the_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe-fp8"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m benchmarks" in said and "--set" in said
    assert cli.main(["bench", "--class", "nonsense"]) == 2
    assert "unknown class nonsense" in capsys.readouterr().err


def test_serve_is_the_example_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe-fp8"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["serve", "--help"]) == 0
    assert "--max-batch" in capsys.readouterr().out
    assert cli.main(["serve", "--port", "99999", "--model", "nowhere"]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left", "code", "said"),
    [("SystemExit(3)", 3, ""), ("SystemExit()", 0, ""), ("SystemExit('no GPU')", 1, "no GPU\n")],
)
def test_bench_ends_as_the_benchmarks_do(
    left: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkout is another one, whose benchmarks only print their arguments and leave."""
    monkeypatch.setitem(cli._IN_A_CHECKOUT, "bench", ("stand_in_benchmarks", ""))
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "moe_fp8" / "cli.py"))
    monkeypatch.setattr(sys, "argv", ["moe-fp8"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "stand_in_benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(f"import sys\nprint(sys.argv[1:])\nraise {left}\n")
    assert cli.main(["bench", "--quick"]) == 1, "without pyproject.toml it is no checkout"
    assert "source checkout" in capsys.readouterr().err
    (tmp_path / "pyproject.toml").touch()
    assert cli.main(["bench", "--quick"]) == code
    told = capsys.readouterr()
    assert (told.out, told.err) == ("['--quick']\n", said)
    for name in ("stand_in_benchmarks", "stand_in_benchmarks.__main__"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("command", ["bench", "serve"])
def test_what_the_wheel_lacks_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "moe_fp8" / "cli.py"))
    assert cli.main([command, "--quick"]) == 1
    assert "source checkout" in capsys.readouterr().err


def test_a_kernel_is_shown_with_the_rows_of_all_its_uses() -> None:
    planned = plan(load_model(CONFIGS / "qwen3_30b.json"), PlanOptions(max_tokens=64, max_batch=4))
    shown = io.StringIO()
    Console(file=shown, width=400, force_terminal=False).print(plan_table(planned, None, None))
    names = list(dict.fromkeys(spec.name for spec in planned.specs))
    expected = []
    for spec in sorted(planned.specs, key=lambda spec: names.index(spec.name)):
        ranges = [pair for row in planned.rows if row.spec == spec for pair in row.rows]
        first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
        expected.append(f"{first}-{last}" if first < last else str(first))
    assert re.findall(r"(\S+) +- +- *$", shown.getvalue(), re.MULTILINE) == expected
