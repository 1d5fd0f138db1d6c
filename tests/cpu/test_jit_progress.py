from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest

from moe_fp8.jit.progress import BuildRow, lossy_output, open_progress, show_time
from tests.cpu.jit_kernels import spec


class _Full(io.StringIO):
    """A log on a full disk."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class _FullTerminal(_Full):
    terminal = True


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [_Full(), _FullTerminal(), None, _closed()])
def test_a_lost_log_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with show_time("planning", after=0.01), open_progress(None, 1) as report:
        report(1, 1, BuildRow(spec(), "0" * 32, False, 1.0, 1, 0, 0, ()))
        time.sleep(0.1)


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
    assert re.fullmatch(r"(\rplanning: \d s)+\r\x1b\[K" if shown else "", said.err)


def test_short_work_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(ValueError, match="on purpose"), show_time("planning"):
        raise ValueError("on purpose")
    assert capsys.readouterr().err == ""


def test_work_without_a_thread_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with show_time("planning", after=0.01):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_callers_streams_come_back() -> None:
    given = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="on purpose"), lossy_output():
        raise ValueError("on purpose")
    assert (sys.stdout, sys.stderr) == given
