"""The server as a process on the reference backend, a client of it, and waiting for what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from server_example.demo import free_port, start_server, stop_server, wait_until_ready


@contextmanager
def server_process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that is ready, and its URL; at the end it is stopped, unless the test has done so."""
    port = free_port()
    process = start_server(folder, port, "--device", "cpu", *arguments)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        stop_server(process)


@contextmanager
def live_server(folder: Path, *arguments: str) -> Iterator[httpx.Client]:
    """A client of a server that must not end before the tests do, and then ends in order."""
    with server_process(folder, "--drain-seconds", "2", *arguments) as (process, url):
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client
        assert process.poll() is None, "the server died"
    assert process.returncode == 0


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}


def children(pid: int) -> dict[int, str]:
    """The direct children of a process, and their command lines."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found: dict[int, str] = {}
    for number in numbers:
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            found[int(number)] = Path(f"/proc/{number}/cmdline").read_text()
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether `condition` becomes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def refused_start(*arguments: str, **variables: str) -> str:
    """The message of a start that fails before the model is looked for."""
    command = [sys.executable, "-m", "server_example", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**variables))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "config.json" not in done.stderr
    return done.stderr
