"""The comparison of two commits: times of both passes, and shapes on which a commit fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as measured
from benchmarks import commits, engine

#: Microseconds by commit and shape; None is a shape that fails.
TIMES: dict[str, dict[str, float | None]] = {
    "old": {"dense m=1": 4.0, "dense m=2": 3.0, "topk rows=1": 8.0},
    "new": {"dense m=1": 2.0, "dense m=2": None, "topk rows=1": 8.0},
}


class Tree:
    """The process of a commit that answers from `TIMES`."""

    def __init__(self, folder: Path, options: Any) -> None:
        self.shapes = iter(TIMES[folder.name].items())

    def read(self) -> dict[str, Any] | None:
        name, self.us = next(self.shapes, (None, None))
        if name is None:
            return None
        return {"shape": name} | ({"failed": "WrongResult: m=2"} if self.us is None else {"rel_error": 0.0})

    def ask(self, word: str) -> None:
        assert word == "next"

    def time_us(self) -> float:
        assert self.us is not None
        return self.us

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_shape_that_fails_is_stored_and_gives_exit_code_1(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not fails:
        monkeypatch.setitem(TIMES["new"], "dense m=2", 3.0)
    monkeypatch.setattr(commits, "_Tree", Tree)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = tmp_path / "comparison.json"
    monkeypatch.setattr("sys.argv", ["commits", "old", "new", "--names", "a", "b", "--out", str(path)])
    assert commits.main() == int(fails)
    written = json.loads(path.read_text())
    expected = [{"shape": "dense m=2", "errors": ["new: WrongResult: m=2"]}] if fails else []
    assert written["failed"] == expected
    first, *others = written["rows"]
    assert first == {"shape": "dense m=1", "old_us": 4.0, "new_us": 2.0, "ratio": 2.0}
    assert [row["shape"] for row in others] == ["dense m=2"] * (not fails) + ["topk rows=1"]
    assert written["geometric_mean"] == {"dense": 2.0 if fails else 1.4142, "topk": 1.0}


@pytest.mark.parametrize(
    ("program", "arguments"), [(commits, ["old", "new"]), (engine, []), (measured, [])], ids=lambda _: ""
)
def test_a_machine_without_a_gpu_is_told_so(
    program: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as done:
        program.main()
    assert done.value.code == 2
    assert "no CUDA device: benchmarks run on a Hopper GPU" in capsys.readouterr().err
