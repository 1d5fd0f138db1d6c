"""`moe-fp8 tune`: targets, candidates, the table's rows and file, and how a config is timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fp8 import tune
from moe_fp8.errors import ConfigError, MoeFp8Error
from moe_fp8.heuristics import gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.problems import GemmLayout
from moe_fp8.tune import Target, Timing, table
from moe_fp8.tune import timing as timing_module
from moe_fp8.tune.targets import candidates
from moe_fp8.warmup import Parallelism, load_model

MODEL = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"
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
    dense = [(8, 16), (16, 32), (32, 64), (64, 128)]
    assert spans(rows) == [*(("dense", *span) for span in dense), ("psum", 0, 8)]


def test_merging_keeps_a_row_whose_config_was_not_timed_again() -> None:
    old, others = [row(DENSE, 32, 16, "192x96")], [timing(DENSE, 32, 9.0, "128x96")]
    assert table.merge(old, [], others) == old
    assert table.merge(old, [], [timing(DENSE, 32, 9.0, "192x96")]) == []
    new = [row(DENSE, 32, config="128x96")]
    assert table.merge(old, new, others) == new


def test_merging_keeps_the_neighbours_of_a_row_that_is_timed_again() -> None:
    old = table.table_rows([timing(DENSE, rows, 5.0) for rows in (32, 64, 128)])
    assert spans(old) == [("dense", 16, 128)]
    lost = [timing(DENSE, 128, 10.0)]
    assert spans(table.merge(old, table.table_rows(lost), lost)) == [("dense", 16, 64)]
    same = [timing(DENSE, 128, 5.0)]
    assert spans(table.merge(old, table.table_rows(same), same)) == [("dense", 16, 128)]
    between, again = [timing(DENSE, 64, 10.0)], [timing(DENSE, 64, 5.0)]
    parts = [("dense", 16, 32), ("dense", 64, 128)]
    assert spans(table.merge(old, table.table_rows(between), between)) == parts
    assert spans(table.merge(old, table.table_rows(again), again)) == [("dense", 16, 128)]
    other = [timing(DENSE, 128, 5.0, "64x64")]
    assert spans(table.merge(old, table.table_rows(other), other)) == [("dense", 16, 64), ("dense", 64, 128)]


def test_a_problem_without_a_config_in_all_spreads_has_no_row() -> None:
    target = Target("psum", 4096, 7168, 2)
    tried = (((8, 8), "64x64"), ((4, 12), "64x96"))
    assert table.table_rows([Timing(target, 8, counts, {config: 9.0}) for counts, config in tried]) == []


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"device": "", "rows": [{}]}',
        '{"device": "", "rows": 3}',
        '{"rows": []}',
        '{"device": "", "rows": [[1]]}',
        "[" * 100_000,
        *(
            json.dumps({"device": "", "rows": [row(DENSE, 8) | change]})
            for change in ({"rows": "32"}, {"n": [1]}, {"above": None}, {"num_sms": "132"}, {"config": 3})
        ),
    ],
    ids=range(13),
)
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
