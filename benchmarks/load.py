"""Clients that each keep one stream of a completion open on the example server, and what they see.

A client asks again as soon as its answer has ended. If it is refused (429), it waits as long as the server
says. This module needs only the standard library: with hundreds of streams, a general HTTP client takes
longer for an event than the server does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The longest wait for any piece of an answer.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Load:
    """`streams` clients, each with one request after the other for `seconds`.

    The first `leaving` clients close each of their connections before the answer ends. The next `slow` ones
    wait `pause` seconds between events. `settle` seconds pass before anything is measured. `pid` is the
    server's process, if its memory is to be watched.
    """

    host: str
    port: int
    streams: int
    seconds: float = 60.0
    settle: float = 5.0
    prompt_tokens: int = 128
    max_tokens: int = 128
    leaving: int = 0
    slow: int = 0
    pause: float = 0.1
    key: str | None = None
    pid: int | None = None
    seed: int = 0


@dataclass
class Seen:
    """What the clients saw in `seconds`; times in seconds.

    `first_token` and `gaps` have an entry for each request and for each pair of neighbouring events of the
    clients that neither leave nor wait. `tokens` is the server's own count, of all clients. `memory` has the
    server's resident bytes at each second, if its process is known.
    """

    seconds: float = 0.0
    finished: int = 0
    refused: int = 0
    left: int = 0
    tokens: float = 0.0
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def grew(self, metric: str) -> float:
        """By how much a metric of the server grew while the clients measured."""
        return self.after.get(metric, 0.0) - self.before.get(metric, 0.0)

    @property
    def memory_grew(self) -> int:
        """How many bytes the memory grew from an eighth of the time to the next: the second least.

        A leak grows in every eighth. A server that warms up, or an allocator that takes a new arena, grows in
        some. The least of each eighth counts, so that what a step holds for a moment does not.
        """
        eighth = len(self.memory) // 8
        least = [min(self.memory[first : first + eighth]) for first in range(0, 8 * eighth, eighth)]
        return sorted(after - before for before, after in itertools.pairwise(least))[1]


class Answer(Exception):
    """An answer that is not a stream."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')[:300]}")
        self.status = status
        self.headers = headers
        self.body = body


async def hold(load: Load) -> Seen:
    """Run the clients. Requests that are under way at the end are finished, outside the measurement."""
    clients = _Clients(load)
    end = time.monotonic() + load.seconds
    tasks = [asyncio.create_task(clients.client(number, end)) for number in range(load.streams)]
    watcher = asyncio.create_task(clients.watch_memory())
    try:
        await asyncio.sleep(min(load.settle, load.seconds / 2))
        clients.seen.before, start = await metrics(load), time.monotonic()
        clients.measures = True
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        clients.measures = False
        clients.seen.after, clients.seen.seconds = await metrics(load), time.monotonic() - start
        clients.seen.tokens = clients.seen.grew("server_generated_tokens_total")
        await asyncio.gather(*tasks)
    finally:
        for task in (watcher, *tasks):
            task.cancel()
    return clients.seen


async def metrics(load: Load) -> dict[str, float]:
    """Every sample of the server's metrics by its name and labels."""
    return samples(await _get(load, "/metrics"))


def samples(text: str) -> dict[str, float]:
    """The samples in the text of a page of metrics."""
    lines = [line for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def health(load: Load) -> dict[str, Any]:
    return dict(json.loads(await _get(load, "/health")))


async def idle(load: Load, seconds: float = 30.0) -> dict[str, Any]:
    """The state of /health once no request runs or waits; the last state if that takes longer."""
    end = time.monotonic() + seconds
    while (state := await health(load))["running"] or state["waiting"]:
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    return state


class _Clients:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.seen = Seen()
        self.measures = False

    async def client(self, number: int, end: float) -> None:
        """One request after the other until `end`. A refused request is sent again when the server says."""
        draw = random.Random(self.load.seed * 1_000_003 + number)
        while time.monotonic() < end:
            try:
                await self._request(number, draw)
            except Answer as answer:
                wait = answer.headers.get("retry-after", "")
                if answer.status != 429 or not wait.isdigit():
                    self.seen.errors.append(str(answer))
                    return
                self.seen.refused += 1
                await asyncio.sleep(min(float(wait), max(0.0, end - time.monotonic())))
            except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
                self.seen.errors.append(f"{type(error).__name__}: {error}")
                return

    async def _request(self, number: int, draw: random.Random) -> None:
        """One stream. Raises `Answer` if it is refused, and `ValueError` if it is not whole."""
        load, seen = self.load, self.seen
        leaves, waits = number < load.leaving, load.leaving <= number < load.leaving + load.slow
        events_to_read = draw.randrange(load.max_tokens) if leaves else None
        tokens, ending, last = 0, b"", time.monotonic()
        async with aclosing(self._events(_body(load, draw), small_buffer=waits)) as events:
            while events_to_read is None or events_to_read > 0:
                event = await asyncio.wait_for(anext(events, None), _PATIENCE)
                if event is None:
                    break
                now = time.monotonic()
                if event.startswith(b'{"error"'):
                    raise ValueError(f"an error in a stream: {event.decode()}")
                if b'"choices":[]' in event:
                    tokens = json.loads(event)["usage"]["completion_tokens"]
                elif self.measures and not (leaves or waits or event == b"[DONE]"):
                    (seen.gaps if ending else seen.first_token).append(now - last)
                ending, last = event, now
                if events_to_read is not None:
                    events_to_read -= 1
                elif waits:
                    await asyncio.sleep(load.pause)
        if events_to_read is not None:
            seen.left += 1
        elif (ending, tokens) != (b"[DONE]", load.max_tokens):
            raise ValueError(f"a stream of {load.max_tokens} tokens had {tokens} and ended with {ending!r}")
        else:
            seen.finished += 1

    async def _events(self, body: bytes, *, small_buffer: bool) -> AsyncGenerator[bytes, None]:
        """The data of each event. The server must send whole lines in each chunk, and it does."""
        load = self.load
        sock = socket.socket(socket.AF_INET6 if ":" in load.host else socket.AF_INET)
        sock.setblocking(False)
        if small_buffer:  # otherwise the kernel reads for the slow client
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, (load.host, load.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096 if small_buffer else 1 << 16)
        try:
            writer.write(_head(load, "POST /v1/completions", len(body)) + body)
            await _accepted(reader)
            while size := int(await reader.readline(), 16):
                for line in (await reader.readexactly(size + 2)).splitlines():
                    if line.startswith(b"data: "):
                        yield line[6:]
        finally:
            writer.close()

    async def watch_memory(self) -> None:
        while self.load.pid is not None:
            self.seen.memory.append(resident_bytes(self.load.pid))
            await asyncio.sleep(1)


def _body(load: Load, draw: random.Random) -> bytes:
    body = {
        "prompt": [draw.randrange(1, 256) for _ in range(load.prompt_tokens)],
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _head(load: Load, request: str, length: int = 0) -> bytes:
    lines = [f"{request} HTTP/1.1", f"host: {load.host}", "connection: close"]
    lines += [f"authorization: Bearer {load.key}"] if load.key else []
    lines += ["content-type: application/json", f"content-length: {length}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode()


async def _accepted(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of an answer with status 200; raises `Answer` for another."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE)).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    if (status := int(first.split()[1])) != 200:
        raise Answer(status, headers, await reader.read())
    return headers


async def _get(load: Load, path: str) -> str:
    reader, writer = await asyncio.open_connection(load.host, load.port)
    try:
        writer.write(_head(load, f"GET {path}"))
        headers = await _accepted(reader)
        return (await reader.readexactly(int(headers["content-length"]))).decode()
    finally:
        writer.close()


def resident_bytes(pid: int) -> int:
    """The memory that a process and its children hold, as Linux tells it."""
    with open(f"/proc/{pid}/statm") as file:
        own = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(resident_bytes(int(child)) for child in children)
