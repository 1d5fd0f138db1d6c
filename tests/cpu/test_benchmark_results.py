"""The benchmarks' stored rows and plans: the results file, derived figures, shapes, rotation of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.results import CLASSES, Ceiling, ResultsFile, Row, device_slug, full_commit, measured
from benchmarks.shapes import CONTIGUOUS, MASKED, PAGED_MQA_LOGITS, aligned_starts, expert_counts
from benchmarks.timing import MOST_SETS, alternate, in_a_row, plan_rotation
from tests.cpu.benchmark_rows import ENVIRONMENT, read_rows


def test_an_unseen_set_needs_a_full_hash() -> None:
    assert full_commit("0123456789" * 4) == "0123456789" * 4
    for wrong in ("unknown", "no-such-commit", "abc-dirty"):
        with pytest.raises(ValueError, match="full hash"):
            full_commit(wrong)


def test_classes_merge_and_each_is_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    first = ResultsFile(path, ENVIRONMENT)
    first.add(Row("masked", {"m": 1}, 10.0))
    first.add(Row("dense", {"m": 1}, 10.0))
    first.add(Row("dense", {"m": 2}, 20.0))
    second = ResultsFile(path, {**ENVIRONMENT, "commit": "def"})
    second.add(Row("dense", {"m": 3}, 30.0))
    assert [(row["class"], row["us"], row["commit"]) for row in read_rows(path)] == [
        ("dense", 30.0, "def"),
        ("masked", 10.0, "abc"),
    ]
    with pytest.raises(ValueError, match="h100"):
        ResultsFile(path, {**ENVIRONMENT, "device": "h100"})
    with pytest.raises(ValueError, match="unknown class"):
        second.add(Row("dens", {}, 1.0))


def test_a_row_has_the_facts_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    ResultsFile(path, {**ENVIRONMENT, "device_name": "NVIDIA H200"}).add(Row("masked", {}, 10.0))
    newer = {**ENVIRONMENT, "device_name": "NVIDIA H200", "driver": "2", "commit": "def", "pdl": True}
    ResultsFile(path, newer).add(Row("dense", {}, 10.0))
    dense, masked = read_rows(path)
    facts = ("driver", "cuda", "torch", "commit", "date", "pdl")
    assert [dense.get(name) for name in facts] == ["2", "13.0", "2", "def", "2026-01-01", True]
    assert [masked.get(name) for name in facts] == ["1", "13.0", "2", "abc", "2026-01-01", None]
    assert not {"device", "device_name"} & (dense.keys() | masked.keys())
    with pytest.raises(ValueError, match="NVIDIA H200, this is NVIDIA H200 NVL"):
        ResultsFile(path, {**newer, "device_name": "NVIDIA H200 NVL"})


def test_runs_are_named_by_dates_and_short_hashes() -> None:
    runs = [("2026-01-02", "0123456789ab"), ("2026-01-01", "fedcba9876" * 4), ("2026-01-02", "0123456")]
    runs += [("2026-01-02", "0000000-dirty"), ("2026-01-02", "unknown")]
    rows = [{"date": date, "commit": commit} for date, commit in runs]
    assert measured(rows) == "2026-01-01 `fedcba9`; 2026-01-02 `0000000-dirty`, `0123456`, `unknown`"


def test_derived_figures() -> None:
    row = Row("dense", {}, 10.0, flops=5e9, nbytes=20e6, peers={"a": 12.0, "b": 11.0}).to_json("h200")
    assert (row["tflops"], row["gbs"], row["ratio"]) == (500, 2000, 1.1)
    assert row["ceiling_share"] == pytest.approx(2000 / 4550, rel=1e-3)
    assert Row("dense", {}, 10.0, nbytes=1.0).to_json("unmeasured")["ceiling_share"] is None
    warm = Row("dense", {}, 10.0, flops=5e9, nbytes=20e6, warm=True).to_json("h200")
    assert (warm["tflops"], warm["gbs"], warm["ceiling_share"]) == (500, None, None)
    assert Ceiling(1, 1) and "dense" in CLASSES


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200")],
)
def test_device_slug(name: str, slug: str) -> None:
    assert device_slug(name) == slug


@pytest.mark.parametrize("skew", ["equal", "spread", "zipf", "routed", "sparse"])
def test_counts_keep_the_mean_and_differ_as_named(skew: Any) -> None:
    counts = expert_counts(32, 4, skew)
    assert len(counts) == 32 and sum(counts) == 128 and min(counts) >= 0
    assert (len(set(counts)) == 1) == (skew == "equal")
    assert skew != "sparse" or counts.count(0) == 8


def test_the_lists_hold_what_they_are_for() -> None:
    assert any(0 in shape.counts() for shape in CONTIGUOUS), "no shape has an empty expert"
    assert {shape.layout for shape in CONTIGUOUS} == {"m_indices", "psum", "offsets"}
    assert {shape.layout for shape in MASKED} == {"masked"}
    assert any(shape.next_n > 1 for shape in PAGED_MQA_LOGITS)
    assert aligned_starts([1, 0, 129]) == [0, 128, 128, 384]


def test_each_contestant_comes_first_in_turn() -> None:
    order: list[int] = []

    class Fake:
        def __init__(self, number: int) -> None:
            self.number = number

        def time_us(self) -> float:
            order.append(self.number)
            return float(self.number)

    contestants: list[Any] = [Fake(number) for number in range(3)]
    assert alternate(contestants, 4, 0.0) == [0.0, 1.0, 2.0]
    assert order == [0, 1, 2, *(0, 1, 2), *(1, 2, 0), *(2, 0, 1), *(0, 1, 2)]


@pytest.mark.parametrize("set_bytes", [1, 2**20, 15 * 2**20, 2**30])
def test_rotation_defeats_the_l2(set_bytes: int) -> None:
    l2 = 60 * 2**20
    sets, calls = plan_rotation(set_bytes, l2)
    assert sets >= 2 and calls >= 8 and calls % sets == 0
    assert sets * set_bytes > 4 * l2 or (set_bytes == 1 and sets == MOST_SETS)


def test_steps_in_a_row_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert in_a_row(lambda: done.append("step"), 2) == 250.0
    assert done == ["step", "record", "step", "step", "record", "wait"]


def test_no_unseen_set_is_drawn_for_files_that_differ_from_their_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"status": " M moe_fp8/specs.py", "rev-parse": "0123456789" * 4}
    monkeypatch.setattr(results, "_git", lambda command, *_: said[command])
    with pytest.raises(ValueError, match="commit the changes"):
        full_commit(None)
    assert full_commit("HEAD") == said["rev-parse"]
    said["status"] = ""
    assert full_commit(None) == said["rev-parse"]


def test_quick_rows_do_not_replace_those_of_whole_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "--class", "plan", "--quick"])
    with pytest.raises(SystemExit):
        benchmarks_main()
    assert "--quick: give --out" in capsys.readouterr().err
