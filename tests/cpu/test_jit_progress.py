from __future__ import annotations

import sys
import time

import pytest

from moe_fp8.jit.progress import show_time


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_work_that_takes_long_shows_its_time_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    quiet: bool,
    shown: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with show_time("planning", quiet, after=0.05):
        time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("\rplanning: 0 s\r\x1b[K" if shown else "")


def test_short_work_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(ValueError, match="on purpose"), show_time("planning"):
        raise ValueError("on purpose")
    assert capsys.readouterr().err == ""
