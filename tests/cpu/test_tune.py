"""`moe-fp8 tune` without the timing itself: targets, candidates, the table's file, the command."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
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
from moe_fp8.tune import Target, Timing, read_timings, run, table
from moe_fp8.tune import timing as timing_module
from moe_fp8.tune.targets import candidates
from moe_fp8.warmup import Parallelism, load_model

MODEL = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0))
DENSE, GROUPED = Target("dense", 4096, 7168, 1), Target("psum", 4096, 7168, 8)
TINY = Target("psum", 64, 256, 3)


def timing(target: Target, rows: int, us: float, config: str = "64x96") -> Timing:
    """The model's choice takes 10 us, and `config` takes `us`."""
    model = str(gemm_costs.cheapest(target.problem(rows)))
    return Timing(target, rows, (rows,) * target.num_experts, {model: 10.0, config: us})


def row(target: Target, rows: int, above: int = 0, config: str = "64x96") -> dict[str, Any]:
    return {**target._asdict(), "rows": rows, "above": above, "config": config, "gain": 0.5}


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
    targets = tune.model_targets(load_model(MODEL), Parallelism(ep=8))
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


def spans(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(found["layout"], found["above"], found["rows"]) for found in rows]


def test_a_row_gains_a_twentieth() -> None:
    timings = [timing(DENSE, 1, 9.49), timing(DENSE, 8, 9.51), timing(DENSE, 16, 10.0)]
    (found,) = table.table_rows(timings)
    assert found == {**DENSE._asdict(), "rows": 1, "above": 0, "config": "64x96", "gain": 0.051}


def test_a_problem_whose_choice_was_not_timed_has_no_row() -> None:
    assert table.table_rows([Timing(DENSE, 8, (8,), {"64x96": 1.0, "64x64": 2.0})]) == []


def test_spreads_of_experts_count_as_a_geometric_mean() -> None:
    model = str(gemm_costs.cheapest(GROUPED.problem(8)))
    even, skewed = ({model: 10.0, "64x96": 2.0, "64x64": 1.0}, {model: 10.0, "64x96": 8.0})
    timings = [Timing(GROUPED, 8, (8,) * 8, even), Timing(GROUPED, 8, (64, *(0,) * 7), skewed)]
    assert table.mean_times(timings)[GROUPED, 8] == pytest.approx({model: 10.0, "64x96": 4.0})
    assert table.table_rows(timings)[0]["gain"] == 0.6


def test_equal_neighbours_are_one_row() -> None:
    timings = [timing(DENSE, rows, 5.0 + rows / 100) for rows in (8, 16, 32)]
    (found,) = table.table_rows(timings)
    assert (found["above"], found["rows"], found["gain"]) == (0, 32, 0.468)
    timings[1] = timing(DENSE, 16, 5.0, "64x64")
    assert spans(table.table_rows(timings)) == [("dense", 0, 8), ("dense", 8, 16), ("dense", 16, 32)]


def test_rows_do_not_meet_over_numbers_that_nobody_timed() -> None:
    timings = [timing(DENSE, rows, 5.0) for rows in (8, 32)]
    assert spans(table.table_rows(timings)) == [("dense", 0, 8), ("dense", 16, 32)]


def test_merging_keeps_other_problems_and_replaces_what_was_timed_again() -> None:
    old = [row(GROUPED, 8), row(DENSE, 8), row(DENSE, 64, 8, "64x64"), row(DENSE, 128, 64, "128x128")]
    timings = [timing(DENSE, 8, 10.0), timing(DENSE, 32, 7.0)]
    rows = table.merge(old, table.table_rows(timings), timings)
    assert spans(rows) == [("dense", 16, 32), ("dense", 32, 64), ("dense", 64, 128), ("psum", 0, 8)]


def test_a_grouped_timing_replaces_the_row_of_any_layout() -> None:
    old = [{**row(GROUPED, 8), "layout": "masked"}, row(GROUPED, 4, 0, "64x64")]
    timed = [timing(GROUPED, 8, 6.0)]
    assert spans(table.merge(old, table.table_rows(timed), timed)) == [("psum", 0, 4), ("psum", 0, 8)]
    timed = [timing(GROUPED, 8, 10.0)]
    assert spans(table.merge(old, table.table_rows(timed), timed)) == [("psum", 0, 4)]


def test_a_written_table_reads_the_same_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    assert table.read_rows(path) == []
    for rows in ([], [row(DENSE, 8), row(GROUPED, 8)]):
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
    """A GPU on which the last config takes 8 us and all others take 10."""
    timed: list[tuple[Target, int]] = []

    def time_configs(
        target: Target, rows: int, counts: Sequence[int], configs: Sequence[str], replays: int
    ) -> dict[str, float]:
        assert len(counts) == target.num_experts and sum(counts) == rows * target.num_experts
        timed.append((target, rows))
        return {config: 8.0 if config == configs[-1] and rows != 16 else 10.0 for config in configs}

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda: H200)
    monkeypatch.setattr(run, "preload", lambda specs, jobs, progress: len(specs))
    monkeypatch.setattr(run, "time_configs", time_configs)
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
    assert told == {"file": str(out), "timed": 4, "rows": written["rows"]}
    assert {found["gain"] for found in written["rows"]} == {0.2}
    assert [(found["rows"], found["above"]) for found in written["rows"]] in (
        [(8, 0), (40, 32), (64, 40)],
        [(8, 0), (64, 32)],
    )
    assert set(written) == {"device", "driver", "cuda", "torch", "date", "rows"}
    assert written["device"] == "NVIDIA H200"


def test_timings_are_kept_without_a_table(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    file = tmp_path / "timings.gz"
    assert cli.main(["tune", "--sample", "6", "--seed", "5", "--timings", str(file), "--quiet"]) == 0
    machine, first = read_timings(file)
    assert machine["device"] == "NVIDIA H200" and {(one.target, one.rows) for one in first} == set(gpu)
    assert [path.name for path in tmp_path.iterdir()] == ["timings.gz"]
    before = file.read_bytes()
    assert cli.main(["tune", "--sample", "6", "--seed", "5", "--timings", str(file), "--quiet"]) == 0
    assert file.read_bytes() == before, "equal problems replace each other"
    assert (
        cli.main(["tune", "--shape", "dense:64:128", "--rows", "3", "--timings", str(file), "--quiet"]) == 0
    )
    assert len(read_timings(file)[1]) == len(first) + 1
    assert cli.main(["tune", "--sample", "6"]) == 2, "nowhere to put them"


def test_a_spent_budget_writes_what_was_timed(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    problems = [(DENSE, 1), (DENSE, 8), (GROUPED, 1)]
    path, timings = tune.tune(problems, tmp_path / "t.json", max_seconds=0, quiet=True)
    assert len(gpu) == len(timings) == len(table.read_rows(path)) == 1


def test_an_error_writes_what_was_timed(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.time_configs

    def failing(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        if rows == 8:
            raise MoeFp8Error("wrong")
        return before(target, rows, *rest)

    monkeypatch.setattr(run, "time_configs", failing)
    with pytest.raises(MoeFp8Error, match="wrong"):
        tune.tune([(DENSE, 1), (DENSE, 8)], tmp_path / "t.json", quiet=True)
    assert [found["rows"] for found in table.read_rows(tmp_path / "t.json")] == [1]


def test_sigterm_writes_what_was_timed(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, handler = run.time_configs, signal.getsignal(signal.SIGTERM)

    def ended(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        if rows == 8:
            signal.raise_signal(signal.SIGTERM)
        return before(target, rows, *rest)

    monkeypatch.setattr(run, "time_configs", ended)
    file = tmp_path / "timings.gz"
    with pytest.raises(SystemExit) as left:
        cli.main(["tune", "--shape", "dense:4096:7168", "--rows", "1,8", "--timings", str(file), "--quiet"])
    assert left.value.code == 128 + signal.SIGTERM
    assert [timing.rows for timing in read_timings(file)[1]] == [1]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_timings_that_came_in_the_meantime_are_kept(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before = tmp_path / "timings.gz", run.time_configs

    def another(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        monkeypatch.setattr(run, "time_configs", before)
        tune.tune([(DENSE, 8)], timings_file=file, quiet=True)
        return before(target, rows, *rest)

    monkeypatch.setattr(run, "time_configs", another)
    tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    assert [timing.rows for timing in read_timings(file)[1]] == [1, 8]


@pytest.mark.parametrize("merging", ["merge_timings", "merge"])
def test_two_that_write_at_once_keep_both_timings(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merging: str
) -> None:
    """The second begins while the first is between reading a file and writing it."""
    file, out, merged = tmp_path / "timings.gz", tmp_path / "table.json", getattr(run, merging)
    second = Thread(target=lambda: tune.tune([(DENSE, 8)], out, timings_file=file, quiet=True))

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(run, merging, merged)
        second.start()
        second.join(1)
        return merged(*arguments)

    monkeypatch.setattr(run, merging, slow)
    tune.tune([(DENSE, 1)], out, timings_file=file, quiet=True)
    second.join()
    assert [timing.rows for timing in read_timings(file)[1]] == [1, 8]
    assert [found["rows"] for found in table.read_rows(out)] in ([1, 8], [8])


def test_a_file_system_without_locks_takes_timings(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    file = tmp_path / "timings.gz"
    tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    assert [timing.rows for timing in read_timings(file)[1]] == [1]


def test_a_gpu_without_a_table_needs_out(
    gpu: list[tuple[Target, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(name="NVIDIA H20"))
    with pytest.raises(ConfigError, match="--out"):
        tune.tune([(DENSE, 1)], quiet=True)
    assert not gpu


def test_tune_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    with pytest.raises(ToolchainError, match="no Hopper GPU"):
        tune.tune([(DENSE, 1)], tmp_path / "t.json")
    assert cli.main(["tune", "--model", str(MODEL)]) == 3
    assert capsys.readouterr().err.startswith("error: tuning times kernels")
    assert cli.main(["tune"]) == 2
    assert cli.main(["tune", "--shape", "dense:1:1"]) == 2


class _Clock:
    """A stand-in for a graph: calls of the n-th config take 10 - n us."""

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
    target, counts = (Target(layout, 64, 256, 1), (5,)) if layout == "dense" else (TINY, (5, 0, 10))
    us = timing_module.time_configs(target, 5, counts, ["64x96", "8x128", "32x128"], 3)
    assert us == {"64x96": 10.0, "8x128": 9.0, "32x128": 8.0}
    sets = timing_module._weights(64, 256, target.num_experts)
    assert sum(values.numel() for values, _ in sets) > 4 * 2 * 64 * 256
    assert sets is timing_module._weights(64, 256, target.num_experts)
    calls = timing_module._Calls.of(target, 5, counts)
    assert calls.valid.unique().numel() == calls.valid.numel() == sum(counts)
    assert calls.output("64x96", sets[0]).isfinite().all()


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
        timing_module.time_configs(Target("dense", 64, 256, 1), 3, (3,), ["64x96", "8x128"], 3)
    assert not _Clock.made
