"""`moe-fp8 tune` but for the timing itself: targets, candidates, the table's file, the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fp8 import cli, tune
from moe_fp8.errors import ConfigError, MoeFp8Error, ToolchainError
from moe_fp8.heuristics import gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.jit import driver
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.problems import GemmLayout
from moe_fp8.tune import Target, Timing, run, table
from moe_fp8.tune import timing as timing_module
from moe_fp8.tune.targets import candidates
from moe_fp8.warmup import Parallelism

MODEL = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0))
DENSE, GROUPED = Target("dense", 4096, 7168, 1), Target("psum", 4096, 7168, 8)


def timing(target: Target, rows: int, us: float, above: int = 0) -> Timing:
    return Timing(target, rows, above, "64x128", us, "8x128", 10.0)


def old_row(target: Target, rows: int, above: int = 0) -> dict[str, Any]:
    return timing(target, rows, 5.0, above).to_row()


def test_shapes_as_text() -> None:
    assert tune.parse_target("dense:4096:7168") == tune.parse_target("dense:4096:7168:1") == DENSE
    for layout in ("m_indices", "psum", "offsets", "masked"):
        assert tune.parse_target(f"{layout}:4096:7168:8") == GROUPED, (
            "the times of one layout are those of all"
        )


@pytest.mark.parametrize(
    "text",
    ["", "dense", "dense:4096", "wide:4096:7168:1", "masked:4096:7168", "dense:4096:7168:2", "dense:100:7168",
     "dense:4096:100", "psum:4096:7168:0", "psum:4096:7168:-1", "psum:4096:7168:8:8", "psum:4096:71b8:8"],
)  # fmt: skip
def test_bad_shapes_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--shape"):
        tune.parse_target(text)


def test_targets_of_a_model_are_its_gemms() -> None:
    targets = tune.model_targets(MODEL, Parallelism(ep=8))
    assert {(t.n, t.k) for t in targets if t.layout == "psum" and t.num_experts == 16} == {
        (1536, 2048),
        (2048, 768),
    }
    assert all(target.num_experts == 1 for target in targets if target.layout == "dense")
    assert {target.layout for target in targets} == {"dense", "psum"}


@pytest.mark.parametrize("target", [DENSE, GROUPED])
def test_candidates_begin_with_the_models_choice(target: Target) -> None:
    problem = target.problem(8)
    assert problem.rows == 8
    one, some, all_ = (candidates(problem, factor) for factor in (1.0, 1.6, 1e9))
    assert one[0] == some[0] == all_[0] == gemm_costs.cheapest(problem)
    assert set(one) <= set(some) <= set(all_) == set(gemm_configs(target.layout, target.k))
    assert len(one) < len(all_)
    assert all(len(set(tried)) == len(tried) for tried in (one, some, all_))


@pytest.mark.parametrize(
    "rows, below", [(1, 0), (8, 0), (9, 8), (33, 32), (64, 32), (65, 64), (128, 64), (129, 128), (192, 128)]
)
def test_a_row_does_not_reach_below_its_tile(rows: int, below: int) -> None:
    assert table.rows_below(rows) == below


def test_rows_that_gain_too_little_are_dropped() -> None:
    rows = table.merge([], [timing(DENSE, 1, 9.79), timing(DENSE, 8, 9.81, 1), timing(DENSE, 16, 10.0, 8)])
    assert [(row["rows"], row["us"], row["above"]) for row in rows] == [(1, 9.79, 0)]


def test_merging_keeps_other_problems_and_replaces_what_was_timed_again() -> None:
    old = [old_row(GROUPED, 8), old_row(DENSE, 8), old_row(DENSE, 64, 8), old_row(DENSE, 128, 64)]
    rows = table.merge(old, [timing(DENSE, 8, 10.0), timing(DENSE, 32, 7.0, 8)])
    assert [(row["layout"], row["rows"], row["above"], row["us"]) for row in rows] == [
        ("dense", 32, 8, 7.0),
        ("dense", 64, 32, 5.0),
        ("dense", 128, 64, 5.0),
        ("psum", 8, 0, 5.0),
    ]


def test_a_grouped_timing_replaces_the_row_of_any_layout() -> None:
    old = [{**old_row(GROUPED, 8), "layout": "masked"}, old_row(GROUPED, 4)]
    rows = table.merge(old, [timing(GROUPED, 8, 6.0)])
    assert [(row["rows"], row["us"]) for row in rows] == [(4, 5.0), (8, 6.0)]
    assert [row["rows"] for row in table.merge(old, [timing(GROUPED, 8, 10.0)])] == [4]


def test_a_written_table_reads_the_same_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    assert table.read_rows(path) == []
    for rows in ([], [old_row(DENSE, 8), old_row(GROUPED, 8)]):
        table.write_table(path, {"device": "NVIDIA H200"}, rows)
        assert table.read_rows(path) == rows
        assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    assert [found.name for found in tmp_path.iterdir()] == ["h200.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": 3}'])
def test_what_is_no_table_is_not_merged_with(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no file"):
        table.read_rows(path)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "table.json"):
        with pytest.raises(ConfigError, match="--out"):
            table.check_writable(path)
    table.check_writable(tmp_path / "new" / "table.json")
    assert (tmp_path / "new").is_dir()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Target, int]]:
    """A GPU on which the last config takes 8 us and the model's choice 10; what was timed there."""
    timed: list[tuple[Target, int]] = []

    def fastest(target: Target, rows: int, configs: Sequence[str]) -> tuple[str, float, float]:
        timed.append((target, rows))
        return (configs[-1], 8.0, 10.0) if rows != 16 else (configs[0], 10.0, 10.0)

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda: H200)
    monkeypatch.setattr(run, "preload", lambda specs, jobs, progress: len(specs))
    monkeypatch.setattr(run, "fastest", fastest)
    return timed


def test_tune_writes_what_gains(
    gpu: list[tuple[Target, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    arguments = ["tune", "--shape", "dense:4096:7168", "--rows", "64,40,16,8", "--out", str(out), "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert gpu == [(DENSE, 8), (DENSE, 16), (DENSE, 40), (DENSE, 64)]
    written = json.loads(out.read_text())
    assert told == {"table": str(out), "timed": 4, "rows": written["rows"]}
    assert [(row["rows"], row["above"]) for row in written["rows"]] == [(8, 0), (40, 32), (64, 40)]
    assert set(written) == {"device", "driver", "cuda", "torch", "date", "rows"}
    assert written["device"] == "NVIDIA H200"


def test_a_spent_budget_writes_what_was_timed(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    path, timings = tune.tune([DENSE, GROUPED], [1, 8], tmp_path / "t.json", max_seconds=0, quiet=True)
    assert len(gpu) == len(timings) == len(table.read_rows(path)) == 1


def test_an_error_writes_what_was_timed(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.fastest

    def failing(target: Target, rows: int, configs: Sequence[str]) -> tuple[str, float, float]:
        if rows == 8:
            raise MoeFp8Error("wrong")
        return before(target, rows, configs)

    monkeypatch.setattr(run, "fastest", failing)
    with pytest.raises(MoeFp8Error, match="wrong"):
        tune.tune([DENSE], [1, 8], tmp_path / "t.json", quiet=True)
    assert [row["rows"] for row in table.read_rows(tmp_path / "t.json")] == [1]


def test_a_gpu_without_a_table_needs_out(
    gpu: list[tuple[Target, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(name="NVIDIA H20"))
    with pytest.raises(ConfigError, match="--out"):
        tune.tune([DENSE], [1], quiet=True)
    assert not gpu


def test_tune_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    with pytest.raises(ToolchainError, match="no Hopper GPU"):
        tune.tune([DENSE], [1], tmp_path / "t.json")
    assert cli.main(["tune", "--model", str(MODEL)]) == 3
    assert capsys.readouterr().err.startswith("error: tuning times kernels")
    assert cli.main(["tune"]) == 2
    assert cli.main(["tune", "--shape", "dense:1:1"]) == 2


class _Clock:
    """Instead of a graph: calls of the n-th config take 10 - n us."""

    made: list[str]

    def __init__(self, calls: Sequence[Any], num_calls: int) -> None:
        assert num_calls >= 8 and num_calls % len(calls) == 0
        calls[0]()
        self.us = 10.0 - len(self.made)
        self.made.append(calls[0].args[0])

    def time_us(self) -> float:
        return self.us


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing with the reference instead of kernels."""
    monkeypatch.setattr(timing_module, "_DEVICE", torch.device("cpu"))
    monkeypatch.setattr(timing_module, "l2_bytes", lambda: 2 * 64 * 256)
    monkeypatch.setattr(timing_module, "Replay", _Clock)
    monkeypatch.setattr(_Clock, "made", [], raising=False)
    monkeypatch.setattr(timing_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(timing_module._Sets, "key", None)


@pytest.mark.parametrize("layout", ["dense", "psum"])
@pytest.mark.usefixtures("on_cpu")
def test_what_is_timed(layout: GemmLayout, checked_mode: None) -> None:
    target = Target(layout, 64, 256, 1 if layout == "dense" else 3)
    best = timing_module.fastest(target, 5, ["64x128", "8x128", "32x128"])
    assert best[0] == "32x128"
    # The next graphs are faster: grouped GEMMs are timed twice, and the mean is a geometric one.
    made = ["64x128", "8x128", "32x128"]
    assert _Clock.made == (made if layout == "dense" else 2 * made)
    assert best[1:] == pytest.approx((8.0, 10.0) if layout == "dense" else (40**0.5, 70**0.5))
    sets = timing_module._weights(64, 256, target.num_experts)
    assert sum(values.numel() for values, _ in sets) > 4 * 2 * 64 * 256
    assert sets is timing_module._weights(64, 256, target.num_experts)
    calls = timing_module._Calls.each(target, 5)
    # Shares of 1, 0.7 and 1.3 of the mean, then of 1, 1/2 and 1/3.
    assert [one.valid.numel() for one in calls] == ([5] if layout == "dense" else [5 + 4 + 6, 8 + 4 + 3])
    assert all(one.output("64x128", sets[0]).isfinite().all() for one in calls)


@pytest.mark.usefixtures("on_cpu")
def test_of_skewed_experts_some_are_idle(checked_mode: None) -> None:
    spread, skewed = timing_module._Calls.each(Target("psum", 64, 128, 8), 1)
    assert spread.valid.numel() == 8
    assert skewed.valid.unique().numel() == skewed.valid.numel() == 3 + 1 + 1 + 1 + 1
    assert skewed.output("8x128", timing_module._weights(64, 128, 8)[0]).isfinite().all()


@pytest.mark.parametrize("wrong", [float("nan"), 1.0])
@pytest.mark.usefixtures("on_cpu")
def test_a_config_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    computed = timing_module._Calls.output

    def output(self: Any, config: str, weights: Any) -> torch.Tensor:
        return computed(self, config, weights) * (wrong + 0.1 if config == "8x128" else 1)

    monkeypatch.setattr(timing_module._Calls, "output", output)
    with pytest.raises(MoeFp8Error, match="8x128"):
        timing_module.fastest(Target("dense", 64, 256, 1), 3, ["64x128", "8x128"])
    assert not _Clock.made
