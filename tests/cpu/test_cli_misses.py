"""`moe-fp8 explain` and `plan --diff`: why a plan lacks a kernel, and how two plans differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_fp8 import cli
from moe_fp8.errors import ConfigError, JitMissError
from moe_fp8.warmup import PlanOptions, load_model, misses, plan
from moe_fp8.warmup.misses import Difference, explain_miss
from moe_fp8.warmup.options import every
from tests.cpu.cli_runs import SMALL_OPTIONS, Json, no_gpu, run_json

__all__ = ["no_gpu", "run_json"]

CONFIGS = Path(__file__).parent.parent / "configs"

MISSING = (
    "paged_mqa_logits_fp8[block_q=4,chunk_kv=64,head_dim=128,num_heads=64,num_stages=9,out_bf16=0,page_size=64,"
    "num_threads=512,cluster_size=1]"
)
V32 = ["--model", str(CONFIGS / "deepseek_v32.json"), "--max-tokens", "8", "--max-batch", "2"]
# An explanation of a miss makes some dozen plans; these plans are small.
IN_SGLANG = ["--engine", "sglang", "--num-sms", "132"]


def test_a_miss_is_explained_by_the_option_that_plans_it(
    run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = run_json(["explain", MISSING, *V32, *IN_SGLANG])
    assert (code, told["uses"]) == (0, [])
    assert [remedy["options"] for remedy in told["remedies"]] == ["--next-n 8"]
    assert told["nearest"] == "", "a remedy needs no other kernel"
    # The remedy is right: the plan that it names has the kernel.
    code, told = run_json(["explain", MISSING, *V32, "--next-n", "8"])
    assert told["uses"] and not told["remedies"]
    assert cli.main(["explain", MISSING, *V32, "--next-n", "8"]) == 0
    assert "next_n=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "given", "value", "remedy"),
    [
        ("num_sms", 132, 112, "--num-sms 132,112"),
        ("num_sms", (132, 72), 112, "--num-sms 132,72,112"),
        ("block_size", 64, 32, "--block-size 64,32"),
        ("next_n", (1, 2), 4, "--next-n 1,2,4"),
        ("next_n", 1, 8, "--next-n 8"),  # one number stands for all up to it
        ("batch_invariant", False, True, "--batch-invariant on"),
        ("batch_invariant", True, False, "--batch-invariant off"),
        ("redundant_experts", 0, 8, "--redundant-experts 8"),
        ("redundant_experts", 0, 16, "--redundant-experts 16"),
    ],
)
def test_a_remedy_keeps_the_values_that_the_plan_has(
    name: str, given: Any, value: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = "quantize_fp8[factor=2]"

    def planned(model: Any, options: PlanOptions, extra: Any) -> Any:
        has = value in every(getattr(options, name))
        return SimpleNamespace(rows=[SimpleNamespace(spec=kernel, use="a use")] if has else [])

    monkeypatch.setattr(misses, "plan", planned)
    options = PlanOptions(**{"ep": 8, name: given})
    told = explain_miss(kernel, load_model(CONFIGS / "qwen3_30b.json"), options)
    assert told.remedies == ((remedy, "a use"),)


def test_a_remedy_is_an_option_that_plan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(model: Any, options: PlanOptions, extra: Any) -> Any:
        has = 132 in every(options.num_sms)
        return SimpleNamespace(
            rows=[SimpleNamespace(spec="quantize_fp8[factor=2]", use="a use")] if has else []
        )

    monkeypatch.setattr(misses, "plan", planned)
    model = load_model(CONFIGS / "qwen3_30b.json")
    assert explain_miss("quantize_fp8[factor=2]", model, PlanOptions(num_sms=tuple(range(1, 16)))).remedies
    # A plan takes at most 16 numbers of SMs.
    assert not explain_miss(
        "quantize_fp8[factor=2]", model, PlanOptions(num_sms=tuple(range(1, 17)))
    ).remedies


def test_other_ranks_are_proposed_if_no_limit_plans_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = 1 << 20

    def planned(model: Any, options: PlanOptions, extra: Any) -> Any:
        has = options.max_tokens >= enough or (options.tp, options.ep) == (2, 1)
        return SimpleNamespace(
            rows=[SimpleNamespace(spec="quantize_fp8[factor=2]", use="a use")] if has else []
        )

    monkeypatch.setattr(misses, "plan", planned)
    model = load_model(CONFIGS / "qwen3_30b.json")
    told = explain_miss("quantize_fp8[factor=2]", model, PlanOptions())
    assert told.remedies == (("--max-tokens 1048576", "a use"),)
    enough *= 2
    told = explain_miss("quantize_fp8[factor=2]", model, PlanOptions())
    assert told.remedies == (("--tp 2 --ep 1", "a use"),)


def test_the_error_of_a_miss_has_text_that_explain_takes() -> None:
    spec = plan(load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS).specs[0]
    error = JitMissError(spec, "0" * 32)
    assert f"moe-fp8 explain '{spec}' --model PATH" in str(error)
    told = explain_miss(str(spec), load_model(CONFIGS / "qwen3_30b.json"), SMALL_OPTIONS)
    assert told.uses


def test_a_kernel_that_no_call_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["explain", MISSING.replace("num_heads=64", "num_heads=63"), *V32, *IN_SGLANG]) == 0
    said = capsys.readouterr().out
    assert "lacks the kernel" in said
    # The plan has the kernel for other numbers of heads, and for blocks of 1 and 2 queries.
    assert "the nearest kernel of the plan has block_q=" in said
    assert re.search(r"num_heads=64, .*for paged_mqa_logits_fp8 rows ", said)
    monkeypatch.setattr(misses, "_limits", lambda options: ())  # the plan alone says what follows
    monkeypatch.setattr(misses, "_parallelisms", lambda options: ())
    assert cli.main(["explain", "k_grouped_gemm_fp8[num_threads=128]", *V32]) == 0
    assert "nearest" not in capsys.readouterr().out
    assert cli.main(["explain", "gemm", *V32]) == 2
    assert "name[macro=value,...]" in capsys.readouterr().err


def test_the_nearest_kernel_has_the_layout_that_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "_limits", lambda options: ())
    monkeypatch.setattr(misses, "_parallelisms", lambda options: ())
    options = PlanOptions(max_tokens=8, max_batch=2, masked_rows=8)
    model = load_model(CONFIGS / "qwen3_30b.json")
    grouped = next(row.spec for row in plan(model, options).rows if row.config.startswith("64x96"))
    told = explain_miss(re.sub("layout=[1-4]", "layout=0", str(grouped)), model, options)
    assert not told.uses and "layout=" not in told.nearest and "for gemm_fp8 dense" in told.nearest


def test_the_nearest_kernel_differs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        SimpleNamespace(spec=f"quantize_fp8[a={a},b={b},c={c}]", use=f"use {a}{b}{c}")
        for a, b, c in ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1))
    ]
    monkeypatch.setattr(misses, "plan", lambda *_, **__: SimpleNamespace(rows=rows))
    told = explain_miss("quantize_fp8[a=2,b=2,c=2]", load_model(CONFIGS / "qwen3_30b.json"), PlanOptions())
    assert told.nearest == "a=1, for use 122"


@pytest.mark.parametrize(
    "text", ["gemm_fp8", "gemm_fp8[]", "gemm_fp8[block_m=128", "gemm_fp8[block_m=128] was missed"]
)
def test_text_that_is_no_kernel_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kernel: expected name\[macro=value,\.\.\.\]"):
        explain_miss(text, load_model(CONFIGS / "qwen3_30b.json"), PlanOptions())


def test_two_plans_are_compared(tmp_path: Path, run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for options in ([], ["--next-n", "3"]):
        assert cli.main(["plan", *V32, *options, "--json"]) == 0
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(capsys.readouterr().out)
    code, told = run_json(["plan", "--diff", *map(str, files)])
    assert code == 0 and told["options"] == ["next_n: 1 -> 3"] and told["only_first"] == []
    assert {text.partition("[")[0] for text in told["only_second"]} == {"paged_mqa_logits_fp8"}
    assert any(text.startswith(MISSING) for text in told["only_second"])
    assert cli.main(["plan", "--diff", *map(str, files)]) == 0
    assert "+ paged_mqa_logits_fp8[" in capsys.readouterr().out
    assert cli.main(["plan", "--diff", *map(str, files), "--rows"]) == 2
    assert capsys.readouterr().err.startswith("error: --rows: ")
    planned = json.loads(files[0].read_text())
    older = {name: value for name, value in planned["options"].items() if name != "weight_gradients"}
    (change,) = Difference.of({**planned, "options": older}, planned).options
    assert change == "weight_gradients: None -> False", "a version that lacked the option"
    kernels = [{**kernel, "defines": "BLOCK_M=64"} for kernel in planned["kernels"]]
    damages = ({"options": {}}, {**planned, "options": [["tp", 1]]}, {**planned, "kernels": kernels})
    for damaged in damages:
        files[0].write_text(json.dumps(damaged))
        assert cli.main(["plan", "--diff", *map(str, files)]) == 2
        assert capsys.readouterr().err.startswith("error: --diff: expected two files that")


@pytest.mark.parametrize("option", [["--layout", "psum"], ["--experts", "8"], ["--expected-m", "4"]])
def test_options_of_one_gemm_need_one_gemm(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *V32, *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("moe-fp8 ")


def test_a_kernel_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "gemm_fp9[block_m=128]", *V32, *IN_SGLANG]) == 2
    assert re.search("kernel: expected one of gemm_fp8, .*, got 'gemm_fp9'", capsys.readouterr().err)
