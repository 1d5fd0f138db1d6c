"""Clients that leave while the engine answers leave nothing behind: no request, no reader, no task.

The engine answers each call before the event loop's next turn. So every test knows in which turns the answer
travels on, and lets the client leave in each of them.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Coroutine, Iterator
from concurrent import futures
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from server_example import stats as stats_module
from server_example.app import Service, create_app
from server_example.client import EngineClient
from server_example.engine import Engine
from server_example.gate import Gate
from server_example.host import Host
from server_example.intake import Intake
from server_example.messages import Job, RequestTooLongError, SamplingParams
from server_example.settings import Settings
from server_example.stats import Stats
from tests.demo_model import demo_folder
from tests.engine_client import connected

__all__ = ["demo_folder"]

TURNS = range(16)
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def pair(demo_folder: Path) -> Iterator[tuple[Engine, EngineClient]]:
    with connected(demo_folder) as pair:
        yield pair


@pytest.fixture
def engine(pair: tuple[Engine, EngineClient]) -> Engine:
    return pair[0]


@pytest.fixture
def asked(pair: tuple[Engine, EngineClient], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls, each of which the engine has answered when it is in this list."""
    names: list[str] = []
    ask = pair[1]._ask

    def ask_and_wait(name: str, *arguments: Any) -> tuple[int, futures.Future[Any]]:
        number, answer = ask(name, *arguments)
        assert futures.wait([answer], 20).done
        names.append(name)
        return number, answer

    monkeypatch.setattr(pair[1], "_ask", ask_and_wait)
    return names


@pytest.fixture
def client(pair: tuple[Engine, EngineClient], asked: list[str]) -> EngineClient:
    return pair[1]


async def turns_pass(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def leave(work: Coroutine[Any, Any, Any], turns: int) -> bool:
    """Whether `work` was cancelled: in `turns`, unless it had ended. Nothing else may swallow that."""
    task = asyncio.create_task(work)
    await turns_pass(turns)
    was_running = task.cancel()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled() == was_running
    return was_running


def ended(engine: Engine, reason: str) -> float:
    return engine.metrics.values().get(f"server_requests_total/{reason}", 0.0)


async def settled(engine: Engine, client: EngineClient) -> None:
    """Returns once no request is left. No request of these tests runs to its end: all are cancelled."""
    assert isinstance(engine.flush, MethodType)
    host: Host = engine.flush.__self__
    end = time.monotonic() + 20
    while engine.scheduler.waiting or engine.scheduler.running or host._requests or client.busy:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)
    assert ended(engine, "length") == 0


@pytest.mark.parametrize("turns", TURNS)
def test_a_submission_that_is_cancelled(engine: Engine, client: EngineClient, turns: int) -> None:
    before = ended(engine, "cancelled")
    job = Job(client.job_number(), [1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True))

    async def submit() -> None:
        left = await leave(client.submit([job], [lambda event: None]), turns)
        assert client.busy != left, "nobody waits for the events of a request that was cancelled"
        if not left:
            client.cancel([job.number])
        await settled(engine, client)

    asyncio.run(submit())
    assert ended(engine, "cancelled") == before + (turns > 0), "at turn 0 it has not begun"


def test_a_submission_that_is_refused(engine: Engine, client: EngineClient) -> None:
    fits, too_long = (
        Job(client.job_number(), [1] * size, SamplingParams(max_tokens=1)) for size in (1, 9999)
    )

    async def submit() -> None:
        with pytest.raises(RequestTooLongError, match="9999 tokens"):
            await client.submit([fits, too_long], [lambda event: None] * 2)
        await settled(engine, client)

    asyncio.run(submit())


def test_what_a_pipe_cannot_carry_fails_its_own_call_alone(
    pair: tuple[Engine, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = pair

    class LocalError(Exception):
        """A pipe carries no error of a class that the other side cannot import."""

    def render() -> bytes:
        raise LocalError("why")

    monkeypatch.setattr(engine.metrics, "render", render)

    async def talk() -> None:
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            await client.call("cancel", [lambda: None])
        with pytest.raises(RuntimeError, match="LocalError: why"):
            await client.call("metrics")
        assert (await client.call("details"))["running"] == 0

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turns", TURNS)
def test_a_client_that_leaves_while_its_request_is_queued(
    engine: Engine, client: EngineClient, demo_folder: Path, asked: list[str], turns: int, stream: bool
) -> None:
    before = ended(engine, "cancelled")
    service = Service(Settings.model_validate({"model": demo_folder}))
    service.engine = client
    body = json.dumps({"prompt": [1, 2, 3], "stream": stream, **LONG}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while "submit" not in asked:
            await asyncio.sleep(0)
        await turns_pass(turns)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def talk() -> None:
        await asyncio.wait_for(create_app(service)(scope("POST", "/v1/completions"), receive, send), 20)
        await settled(engine, client)
        assert service.intake.open == 0

    asyncio.run(talk())
    assert ended(engine, "cancelled") == before + 1


@pytest.mark.parametrize("turns", TURNS)
def test_a_listener_that_leaves_takes_the_reader_along(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(stats_module, "SECONDS", 0.02)
    stats = Stats()

    async def listen() -> None:
        async for _ in stats.events(client):
            pass

    async def talk() -> None:
        assert await leave(listen(), turns)
        await turns_pass(8)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        listener = stats.events(client)
        assert await anext(listener), "the next listener has a reader of its own"
        await listener.aclose()  # type: ignore[attr-defined]

    asyncio.run(talk())


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Stats:
    monkeypatch.setattr(stats_module, "SECONDS", 0.02)
    return Stats()


def test_a_listener_may_come_in_the_turn_in_which_the_last_one_leaves(
    client: EngineClient, stats: Stats
) -> None:
    async def talk() -> None:
        for _ in range(3):
            listener = stats.events(client)
            assert await anext(listener)
            await listener.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(talk(), 20))


def test_listeners_do_not_wait_for_an_engine_that_takes_no_requests(
    client: EngineClient, stats: Stats, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        listener = stats.events(client)
        assert await anext(listener)
        monkeypatch.setattr(client, "failure", "broken on purpose")
        assert len([event async for event in listener]) <= 1

    asyncio.run(asyncio.wait_for(talk(), 20))


def test_figures_that_cannot_be_read_end_the_stream_and_the_next_listener_has_them_again(
    client: EngineClient, stats: Stats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(name: str) -> None:
        raise ValueError("broken on purpose")

    async def talk() -> None:
        slow, listener = stats.events(client), stats.events(client)
        assert await anext(slow) and await anext(listener)
        with monkeypatch.context() as broken:
            broken.setattr(client, "call", fail)
            assert len([event async for event in listener]) <= 1
        newcomer = stats.events(client)
        assert await anext(newcomer), "though the slow listener has not left"
        for left in (slow, newcomer):
            await left.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(talk(), 20))
    assert "the engine's figures cannot be read" in caplog.text and "broken on purpose" in caplog.text


def test_a_listener_that_reads_too_slowly_misses_the_oldest_figures() -> None:
    async def talk() -> list[str]:
        stats = Stats()
        stats._read = lambda engine: asyncio.sleep(20)  # type: ignore[assignment, method-assign, return-value]
        listener = stats.events(None)  # type: ignore[arg-type]
        first = asyncio.create_task(anext(listener))  # type: ignore[arg-type]
        await turns_pass(2)
        for number in range(1000):
            stats._tell(str(number))
        stats._tell(None)
        return [(await first)["data"]] + [event["data"] async for event in listener]

    found = asyncio.run(asyncio.wait_for(talk(), 20))
    assert found[-1] == "999" and len(found) < 50
    assert found == sorted(found, key=int)


@pytest.mark.parametrize("turns", TURNS)
def test_a_body_whose_reading_is_cancelled(turns: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(20)

    async def receive() -> dict[str, Any]:
        await turns_pass(3)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    gate = Gate(app, api_key=None, max_body_bytes=9, receive_seconds=20, drained=Intake().drained)
    assert asyncio.run(leave(gate(scope("POST", "/"), receive, send), turns))


def scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
        "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"},
    }  # fmt: skip
