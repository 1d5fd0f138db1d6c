"""`moe-fp8 plan --explain` says what the selector does with one GEMM, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_fp8 import cli
from moe_fp8.errors import ConfigError
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.key import kernel_key
from moe_fp8.problems import GemmLayout, GemmProblem
from moe_fp8.specs import GEMM_LAYOUTS, kernel_spec
from moe_fp8.warmup.explain import explain
from tests.cpu.cli_runs import QWEN, Json, no_gpu, run_json

__all__ = ["no_gpu", "run_json"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["64", "7168", "2048"], GemmProblem("dense", 64, 7168, 2048)),
        (["65", "512", "4096"], GemmProblem("dense", 65, 512, 4096)),
        (
            ["256", "4096", "7168", "--layout", "masked", "--experts", "32", "--expected-m", "20"],
            GemmProblem("masked", 256, 4096, 7168, 32, 20),
        ),
        (
            ["1000", "4096", "7168", "--layout", "offsets", "--experts", "8"],
            GemmProblem("offsets", 1000, 4096, 7168, 8),
        ),
        (
            ["9", "2048", "1536", "--batch-invariant"],
            GemmProblem("dense", 9, 2048, 1536, batch_invariant=True),
        ),
    ],
)
def test_explain_says_what_the_selector_does(argv: list[str], problem: GemmProblem, run_json: Json) -> None:
    code, told = run_json(["plan", "--explain", *argv, "--num-sms", "132"])
    assert code == 0
    assert told["rows"] == problem.rows
    assert [choice["device"] for choice in told["choices"]] == list(gemm_table.devices())
    keys = {one["config"]: one["key"] for one in told["candidates"]}
    for choice in told["choices"]:
        spec = kernel_spec(replace(problem, device=choice["device"]))
        assert keys[choice["config"]] == kernel_key(spec)
        assert choice["reason"].startswith("least predicted cost")
        assert ("batch-invariant results use no table" in choice["reason"]) == problem.batch_invariant
    for config, key in keys.items():
        assert key == kernel_key(kernel_spec(replace(problem, config=config)))
    costs = [one["microseconds"] for one in told["candidates"]]
    assert costs == sorted(costs) and costs[0] > 0
    assert told["choices"][0]["config"] == told["candidates"][0]["config"]
    for one in told["candidates"]:
        assert 1 <= one["grid"] <= 132 and one["tiles"] >= 1 and one["rounds"] > 0
        assert 0 < one["smem_bytes"] <= 232_448 and one["cached"] in (True, False)


def test_explain_looks_into_the_store_that_is_named(tmp_path: Path, run_json: Json) -> None:
    explained = ["plan", "--explain", "64", "7168", "2048", "--num-sms", "132"]
    code, told = run_json([*explained, "--cache-dir", str(tmp_path)])
    assert code == 0 and {one["cached"] for one in told["candidates"]} == {False}


def test_explain_names_the_row_of_a_table(
    put_table: Callable[..., None], run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"layout": "dense", "n": 512, "k": 4096, "num_experts": 1, "rows": 4096, "above": 8}
    put_table([{**row, "config": "8x128"}])
    argv = ["plan", "--explain", "4000", "512", "4096", "--num-sms", "132"]
    _, told = run_json(argv)
    (other, here) = told["choices"]
    assert (here["device"], here["config"]) == ("h200", "8x128")
    assert "9 to 4096 rows" in here["reason"]
    assert other["config"] != "8x128" and "least predicted cost" in other["reason"]
    # The cost model would not try a tile of 8 tokens for 4000 rows, but the chosen tile is listed anyway.
    considered = gemm_costs.ranked(GemmProblem("dense", 4000, 512, 4096))
    assert "8x128" not in {str(config) for config, _ in considered}
    assert "8x128" in {one["config"] for one in told["candidates"]}
    capsys.readouterr()
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert re.search(r"^8x128 .* h200", table, re.M)
    assert all(len(line) <= 100 for line in table.splitlines()) and "…" not in table


@pytest.mark.parametrize(
    "argv",
    [
        ["64", "100", "2048"],
        ["64", "128", "100"],
        ["64", "128", "128", "--experts", "2"],
        ["64", "128", "128", "--expected-m", "2"],
        ["64", "128", "128", "--layout", "masked", "--experts", "1025"],
        [str(2**31), "128", "128"],
        ["64", str(2**31), "128"],
        ["64", "128", str(2**31)],
        ["9" * 400, "128", "128"],
        ["64", "9" * 400 + "00", "9" * 400 + "00"],
        ["64", "128", "128", "--layout", "masked", "--experts", "8", "--expected-m", str(2**31)],
        ["64", "128", "128", "--num-sms", "1025"],
        ["64", "128", "128", "--num-sms", "9" * 400],
    ],
)
def test_explain_refuses_what_no_op_takes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--explain", *argv]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_explain_refuses_an_unknown_layout() -> None:
    with pytest.raises(ConfigError, match="layout"):
        explain("rows", 64, 128, 128, num_sms=132)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
def test_the_largest_sizes_have_an_explanation(layout: GemmLayout) -> None:
    for num_sms in (1, 1024):
        told = explain(layout, 2**31 - 1, 2**31 - 64, 2**31 - 128, num_sms=num_sms)
        assert all(0 < one.prediction.microseconds < math.inf for one in told.candidates)
        assert told.candidates and all(1 <= one.grid <= num_sms for one in told.candidates)


def test_a_plan_is_of_a_model_or_of_a_gemm() -> None:
    for argv in (
        ["plan", "--model", str(QWEN), "--explain", "1", "128", "128"],
        ["plan", "--explain", "1", "128"],
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 2
