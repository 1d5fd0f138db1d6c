"""Many clients at once for a minute: no error, no page that is lost, no memory that grows."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks import http
from benchmarks.compare import Session
from benchmarks.load import Load, Seen
from benchmarks.results import ResultsFile
from tests.cpu.benchmark_rows import ENVIRONMENT, read_rows
from tests.demo_model import demo_folder
from tests.live_server import server_process

__all__ = ["demo_folder"]

STREAMS, MORE, SECONDS = 64, 16, 60.0
#: A server that kept 200 KiB of each request grew by 2.6 MiB and more, on idle and on busy cores. One without
#: a leak grew by 0.6 MiB at most once it was warm. It warms up by 40 MiB: on idle cores in the first 40
#: seconds, on busy ones in more than a minute. So a load that shows growth is repeated, twice at most.
MOST_MIB, LOADS = 1.5, 3


def test_a_minute_of_load(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has places for 68 clients, so 12 of 80 are refused by turns, and pages for fewer than 64, so
    it preempts. 8 clients leave midway, and 8 read slowly."""
    # By default the allocator keeps freed blocks, and the more of them the longer it runs.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    options = ("--max-batch", str(STREAMS), "--max-waiting", "4", "--max-context", "192")
    with server_process(demo_folder, *options, "--cache-pages", "90") as (process, url):
        load = Load(
            "127.0.0.1", int(url.rsplit(":", 1)[1]), STREAMS + MORE, SECONDS, prompt_tokens=24,
            max_tokens=80, leaving=8, slow=8, pid=process.pid,
        )  # fmt: skip
        seen = http.measure(load)
        assert seen.errors == []
        # `client` gives up after an error, so every client went on to the end.
        assert seen.finished > STREAMS and seen.refused > MORE and seen.left > 8
        assert seen.grew("server_batch_size_sum") / seen.grew("server_batch_size_count") > STREAMS / 2
        assert seen.grew("server_preemptions_total") > 0
        assert 'server_requests_total{reason="error"}' not in seen.after
        loads = [seen]
        while loads[-1].memory_grew / 2**20 >= MOST_MIB:
            assert len(loads) < LOADS, [[held >> 10 for held in each.memory] for each in loads]
            loads.append(http.measure(load))
            assert loads[-1].errors == []
    assert process.returncode == 0


def test_a_leak_is_told_from_a_warm_up() -> None:
    warm_up = [600, 612, 612, 615, 619, 621, 621, 621]
    leak = [600 + 3 * eighth for eighth in range(8)]
    both = [one + other for one, other in zip(warm_up, leak, strict=True)]
    for held, grew in ((warm_up, 0), (leak, 3), (both, 3)):
        # At each eighth's first and last second, a step holds 9 more for a moment.
        memory = [each + moment for each in held for moment in (9, 0, 9)]
        assert Seen(memory=memory).memory_grew == grew


def test_the_command_measures_a_server(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_process(demo_folder, "--decode", "eager", "--drain-seconds", "1") as (_, url):
        arguments = ["--url", url, "--streams", "1,4", "--seconds", "2", "--max-tokens", "8"]
        monkeypatch.setattr("sys.argv", ["benchmarks.http", *arguments])
        assert http.main() == 0
        one, four = capsys.readouterr().out.splitlines()
        assert '"streams": 1' in one and '"streams": 4' in four and '"tokens/s"' in four


@pytest.mark.parametrize("addresses", [0, 1, 2])
def test_the_command_says_that_no_server_answers(
    addresses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        if addresses == 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        hosts = ("127.0.0.1", "127.0.0.2")[:addresses]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in hosts]

    # Nothing listens on a port that was just given back.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://some-host:{taken.getsockname()[1]}"
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("sys.argv", ["http", "--url", url, "--streams", "1", "--seconds", "0.1"])
    assert http.main() == 1
    assert f"FAILED cannot load {url}: " in capsys.readouterr().err


def test_what_goes_wrong_is_an_error(demo_folder: Path) -> None:
    """A refusal that says when to come back is none; every other one is."""
    with server_process(demo_folder, "--max-context", "64", "--drain-seconds", "0") as (_, url):
        load = Load("127.0.0.1", int(url.rsplit(":", 1)[1]), 2, 1.0, prompt_tokens=100)
        seen: Seen = http.measure(load)
        assert len(seen.errors) == 2 and all(error.startswith("400: ") for error in seen.errors)


def test_class_http_compares_graphs_with_eager_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http, "_LOADS", ((2, 16),))
    monkeypatch.setattr(http, "_SECONDS", 4.0)
    monkeypatch.setattr("benchmarks.serve._STEPS", 3)
    monkeypatch.setenv("SERVER_EXAMPLE_DEVICE", "cpu")
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    http.run_http(session, None, 1)
    assert session.failures == []
    (row,) = read_rows(tmp_path / "h200.json")
    assert row["shape"]["streams"] == 2 and row["us"] > 0 and row["peers"]["eager"] > 0
    assert row["notes"]["tokens/s"] > 0 and row["notes"]["eager"]["misses"] == 0
    added = row["us"] / row["notes"]["replay, us"] - 1
    assert row["notes"]["replay, us"] > 0 and row["notes"]["added"] == pytest.approx(
        added, rel=0.01, abs=0.001
    )
    alone = row["notes"]["without HTTP"]
    assert alone["batch"] > 1 and alone["tokens/s"] > 0 and alone["decode step, us"] > 0
