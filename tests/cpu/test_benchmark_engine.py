"""Class engine with engines that answer from a table: which rows come out, and what counts as equal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine
from benchmarks.compare import Session
from benchmarks.results import ResultsFile
from tests.cpu.benchmark_rows import ENVIRONMENT, read_rows


class Answers:
    """An engine whose steps take 100 us a request with the plug-in and 150 us without it.

    Reading a token takes 1 us and 2 us. Every prompt that was read is in `read`.
    """

    alive: int = 0
    loaded: bool = True
    stray: bool = False

    def __init__(self, model: str, experts: str, ours: bool, *others: Any) -> None:
        self.name, self.ours, self.seconds = model, ours, {"engine": 10.0 if ours else 20.0}
        self.batch = 0
        self.read: list[int] = []
        Answers.alive += 1

    def wait_ready(self) -> None:
        pass

    def run_on(self, core: int) -> None:
        assert core in os.sched_getaffinity(0)

    def ask(self, request: str, **options: Any) -> Any:
        if request in ("tokens", "begin"):
            self.batch = options["batch"]
        if "lengths" in options:
            return self._prefill(**options)
        us = self.batch * (100.0 if self.ours else 150.0)
        tokens = [5, 6, 7 if self.ours else 8]
        return {
            "tokens": {"tokens": [tokens] * self.batch, "logprobs": [[-1.0] * 3] * self.batch},
            "decode": {"wall_us": 2 * us},
            "profile": {"gpu_us": us, "kernels_us": {"gemm": us}},
            "counters": {"misses": 0, "loads": 57 * (self.ours or Answers.stray)} if self.loaded else None,
        }.get(request)

    def _prefill(self, lengths: list[int]) -> dict[str, Any]:
        assert not set(lengths) & set(self.read), "all prompts differ in length"
        self.read += lengths
        us = lengths[0] * (1.0 if self.ours else 2.0)
        return {"wall_us": 3 * us, "gpu_us": us, "kernels_us": {"gemm": us}}

    def close(self) -> None:
        Answers.alive -= 1

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_each_contestant_gives_rows(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "alive", 0)
    monkeypatch.setattr(engine, "Engine", Answers)
    path = tmp_path / "h200.json"
    session = Session(ResultsFile(path, ENVIRONMENT), replays=1, failures=[])
    engine.run_engine(session, ["qwen3_30b"], ("deep_gemm", "triton"), 2, (1, 8), (300,), processes)
    rows = read_rows(path)
    steps = [row for row in rows if "batch" in row["shape"]]
    assert len(steps) == 2 * 2 * 2
    assert {row["ratio"] for row in steps} == {1.5}
    assert {row["us"] for row in steps if row["shape"]["time"] == "gpu"} == {100.0, 800.0}
    gpu = [row for row in steps if row["shape"]["time"] == "gpu"]
    assert {row["notes"]["equal tokens"] for row in gpu} == {0.6667}
    assert {row["notes"]["theirs again: equal tokens"] for row in gpu} == {1.0}
    prefill = [row for row in rows if "prompt" in row["shape"]]
    assert {(row["shape"]["experts"], row["shape"]["time"]) for row in prefill} == {
        (experts, time) for experts in ("deep_gemm", "triton") for time in ("gpu", "wall")
    }
    for row in prefill:
        assert row["shape"]["prompt"] == 300 and row["ratio"] == 2
        assert 0.9 * 300 < row["us"] / (3 if row["shape"]["time"] == "wall" else 1) <= 300
    starts = [row for row in rows if "start" in row["shape"]]
    assert [row["shape"]["start"] for row in starts] == ["cold", "warm"]
    assert {row["shape"]["experts"] for row in starts} == {"deep_gemm"}
    assert Answers.alive == 0, "every engine is closed"


@pytest.mark.parametrize(("attribute", "value"), [("loaded", False), ("stray", True)])
def test_an_engine_without_the_plug_in_is_not_measured_as_ours(
    attribute: str, value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, attribute, value)
    monkeypatch.setattr(engine, "Engine", Answers)
    path = tmp_path / "h200.json"
    session = Session(ResultsFile(path, ENVIRONMENT), replays=1, failures=[])
    engine.run_engine(session, ["qwen3_30b"], batches=(1,))
    assert "kernels of this package loaded" in session.failures[0]
    assert not path.exists() or not read_rows(path)


def test_a_model_whose_engine_ends_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("exit code 1")

    monkeypatch.setattr(engine, "Engine", Answers)
    monkeypatch.setattr(Answers, "wait_ready", fails)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    engine.run_engine(session, ["qwen3_30b", "minimax_m2"])
    assert len(session.failures) == 2 and "exit code 1" in session.failures[0]
