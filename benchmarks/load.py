"""Class http: the example server under load, from clients that each keep one stream open.

A client asks again as soon as its answer has ended. If it is refused (429), it waits as long as the server
says.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from .compare import Session
    from .peer import DeepGemm

#: Streams of a row, seconds of each, tokens of a prompt and of an answer.
_STREAMS, _SECONDS, _PROMPT, _ANSWER = (1, 8, 64, 256), 10.0, 128, 128


@dataclass
class Load:
    """What the clients saw. Times are in seconds."""

    tokens: int = 0
    answers: int = 0
    refused: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def answer(client: httpx.AsyncClient, body: dict[str, Any], load: Load, pause: float = 0.0) -> None:
    """One streamed completion, read with a `pause` after each event."""
    begun, last = time.monotonic(), 0.0
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 429:
            load.refused += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
            return
        if response.status_code != 200:
            load.errors.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                load.answers += 1
                return
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                load.errors.append(str(chunk["error"]))
                return
            load.tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
            if chunk["choices"]:
                now = time.monotonic()
                if last:
                    load.between.append(now - last)
                else:
                    load.first.append(now - begun)
                last = now
            await asyncio.sleep(pause)
    load.errors.append("a stream ended without [DONE]")


async def hold(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], seconds: float) -> Load:
    """Keep a stream open for each of `bodies`; after `seconds`, the streams that are open end as usual."""
    load = Load()
    end = time.monotonic() + seconds

    async def one(body: dict[str, Any]) -> None:
        while time.monotonic() < end:
            try:
                await answer(client, body, load)
            except Exception as error:
                load.errors.append(f"{type(error).__name__}: {error}")
                return

    await asyncio.gather(*(one(body) for body in bodies))
    return load


def bodies(streams: int, prompt: int = _PROMPT, tokens: int = _ANSWER) -> list[dict[str, Any]]:
    """A request for each stream, whose prompts differ."""
    sizes = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [{"prompt": [(7 * i + j) % 250 for j in range(prompt)], **sizes} for i in range(streams)]


def run_http(session: Session, peer: DeepGemm | None, step: int) -> None:
    """`us` is the median time between two tokens of a stream; `peer` has no server."""
    import httpx

    from server_example.cache import PAGE_TOKENS
    from server_example.demo import free_port, start_server, stop_server, wait_until_ready
    from server_example.make_demo_model import make_demo_model

    from .results import Row, four_digits

    most = max(_STREAMS)
    pages = 1 + most * (2 + (_PROMPT + _ANSWER) // PAGE_TOKENS)
    options = ("--max-batch", str(most), "--cache-pages", str(pages), "--max-waiting", str(most))
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "demo"
        make_demo_model(folder)
        process = start_server(folder, port, *options)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            for streams in _STREAMS[::step]:
                load = asyncio.run(_measure(f"http://127.0.0.1:{port}", streams))
                if load.errors:
                    session.failures.append(f"http, {streams} streams: {load.errors[0]}")
                    continue
                health = httpx.get(f"http://127.0.0.1:{port}/health").json()
                row = Row("http", {"model": "demo", "streams": streams, "prompt": _PROMPT}, 0.0)
                row.us = 1e6 * statistics.median(load.between)
                row.notes = {
                    "tokens/s": four_digits(load.tokens / _SECONDS),
                    **_percentiles("first token", load.first),
                    **_percentiles("between tokens", load.between),
                    "refused": load.refused,
                    "misses": health["jit"]["misses"],
                }
                session.store(row)
        finally:
            stop_server(process)


async def _measure(url: str, streams: int) -> Load:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await hold(client, bodies(streams, tokens=8), 1.0)
        return await hold(client, bodies(streams), _SECONDS)


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    from .results import four_digits

    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return {f"{name}, p50 ms": four_digits(1e3 * cuts[49]), f"{name}, p99 ms": four_digits(1e3 * cuts[98])}
