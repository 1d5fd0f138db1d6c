"""Many clients at once for a minute: no error, no page that is lost, no memory that grows."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import httpx

from benchmarks.load import Load, answer, bodies, hold
from tests.demo_model import demo_folder
from tests.live_server import server_process

__all__ = ["demo_folder"]

STREAMS, SECONDS, PAGES = 64, 60, 160


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process has no memory")


async def _vanish(client: httpx.AsyncClient, end: float) -> int:
    """Begin streams and close the connection after the first event."""
    count = 0
    while time.monotonic() < end:
        body = {**bodies(1, 20, 200)[0], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            with contextlib.suppress(StopAsyncIteration):
                await anext(response.aiter_lines())
        count += 1
        await asyncio.sleep(0.5)
    return count


async def _load(url: str, pid: int) -> tuple[Load, Load, int, list[float]]:
    memory: list[float] = []

    async def watch() -> None:
        for _ in range(3):
            await asyncio.sleep(SECONDS / 3)
            memory.append(_resident_mib(pid))

    limits = httpx.Limits(max_connections=None)
    slow = Load()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        load, vanished, *_ = await asyncio.gather(
            hold(client, bodies(STREAMS, 20, 24), SECONDS),
            _vanish(client, time.monotonic() + SECONDS),
            watch(),
            *(answer(client, body, slow, pause=0.4) for body in bodies(4, 30, 60)),
        )
    return load, slow, vanished, memory


def test_a_minute_of_load(demo_folder: Path) -> None:
    options = ("--max-batch", "48", "--cache-pages", str(PAGES + 1), "--max-waiting", "12")
    with server_process(demo_folder, *options) as (process, url):
        load, slow, vanished, memory = asyncio.run(_load(url, process.pid))
        assert not load.errors and not slow.errors
        # There are more clients than places, so some are told to come back; everyone else is answered.
        assert load.refused > 0 and load.answers > STREAMS and load.tokens == 24 * load.answers
        assert slow.answers + slow.refused == 4 and vanished > 10
        # Two thirds of the time pass between the first and the last reading.
        assert memory[2] - memory[0] < 20, f"resident memory grew: {memory} MiB"
        end = time.monotonic() + 20
        while (health := httpx.get(f"{url}/health").json())["free_pages"] != PAGES and time.monotonic() < end:
            time.sleep(0.2)
        assert (health["free_pages"], health["running"], health["waiting"]) == (PAGES, 0, 0)
        metrics = httpx.get(f"{url}/metrics").text
        assert 'server_requests_total{reason="error"}' not in metrics
