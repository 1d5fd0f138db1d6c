"""What the server keeps out: large, slow, late and keyless requests; other requests go on meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import Response
from starlette.types import ASGIApp

from server_example.app import Service, create_app
from server_example.client import Emit
from server_example.gate import Counted, Gate
from server_example.host import Host
from server_example.intake import Intake
from server_example.messages import EngineUnavailableError, Job, TokenEvent, TokenLogprob
from server_example.protocol import ChatResponse
from server_example.settings import Settings
from tests.demo_model import demo_folder
from tests.engine_client import connected
from tests.live_server import live_server

__all__ = ["demo_folder"]

KEY = "a key of the tests"
RECEIVE_SECONDS = 1.0
LONG = {"prompt": "The graph", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    limits = ("--api-key", KEY, "--receive-seconds", str(RECEIVE_SECONDS), "--max-waiting", "3")
    with live_server(demo_folder, *limits, "--max-body-bytes", "2097152") as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client


def test_a_key_is_needed_under_v1_only(server: httpx.Client) -> None:
    for wrong in (f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer", "Bearer \xe9"):
        headers = {"authorization": wrong.encode("latin-1")}
        response = server.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/v1/stats", "/v1/nowhere"):
        assert httpx.get(f"{server.base_url}{path}").status_code == 401
    assert server.get("/v1/models").status_code == server.head("/v1/models").status_code == 200
    lower = server.get("/v1/models", headers={"authorization": f"bearer {KEY}"})
    assert lower.status_code == 200, "the scheme has no case"
    for open_path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert httpx.get(f"{server.base_url}{open_path}").status_code == 200
    for path in ("/", "/health", "/ready", "/metrics"):
        assert httpx.head(f"{server.base_url}{path}").status_code == 200
    for path in ("/docs", "/redoc"):
        assert httpx.get(f"{server.base_url}{path}").status_code == 404, "it loads scripts from elsewhere"


def test_browsers_of_other_origins_get_no_leave(server: httpx.Client) -> None:
    response = server.get("/v1/models", headers={"origin": "https://example.org"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("known_length", [True, False])
def test_a_body_of_ten_megabytes_is_refused(server: httpx.Client, known_length: bool) -> None:
    body = json.dumps({"prompt": "word " * (2 << 20)}).encode()
    content = body if known_length else (body[at : at + 65536] for at in range(0, len(body), 65536))
    response = server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize(("size", "status"), [(9, 200), (10, 413)])
def test_a_body_of_the_most_bytes_is_accepted(size: int, status: int, known_length: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"a" * size
        await Response()(scope, receive, send)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"a"

    gate = Gate(app, api_key=None, max_body_bytes=9, receive_seconds=20, drained=Intake().drained)
    content = b"a" * size if known_length else parts()
    assert asyncio.run(ask(gate, "POST", "/", content=content)).status_code == status


def test_the_largest_body_follows_from_context_and_queue() -> None:
    def largest(**options: int) -> int:
        return Settings.model_validate(options).body_bytes

    assert largest() == (64 << 10) + 6 * 1024 * 64
    assert largest(max_context=2, max_waiting=1) > 64 << 10
    assert largest(max_context=163840) == 2 << 20
    assert largest(max_context=163840, max_body_bytes=100) == 100


def test_parts_of_texts_are_counted_over_all_messages(server: httpx.Client) -> None:
    def ask(messages: int, parts: int) -> httpx.Response:
        part = {"type": "text", "text": "a"}
        body = {"messages": [{"role": "user", "content": [part] * parts}] * messages, "max_tokens": 1}
        return server.post("/v1/chat/completions", json=body)

    assert ask(4, 100).status_code == 200
    refused = ask(205, 5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert refused.json()["error"]["message"] == "messages: at most 1024 text parts in all messages together"


def test_a_long_prompt_is_refused_by_its_bytes(server: httpx.Client) -> None:
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        response = server.post("/v1/completions", json={"prompt": "word " * 400_000})
        seconds.append(time.monotonic() - start)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prompt")
        assert "bytes" in error["message"]
    assert min(seconds) < 1, "tokenizing takes about two seconds"


async def ask(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, **options)


def test_a_server_that_loads_is_alive_but_not_ready(tmp_path: Path) -> None:
    app = create_app(Service(Settings.model_validate({"model": tmp_path})))
    health = asyncio.run(ask(app, "GET", "/health"))
    assert (health.status_code, health.json()) == (200, {"status": "loading"})
    assert asyncio.run(ask(app, "GET", "/ready")).status_code == 503
    refused = asyncio.run(ask(app, "POST", "/v1/completions", json={"prompt": "a"}))
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "loading" in refused.json()["error"]["message"]


def test_a_failed_engine_is_told_by_every_route(demo_folder: Path) -> None:
    """The process ends soon; until then, nothing looks well and nothing hangs."""
    service = Service(Settings.model_validate({"model": demo_folder}))
    app = create_app(service)

    async def statistics() -> list[dict[str, str]]:
        return [event async for event in service.stats.events(client)]

    with connected(demo_folder) as (_, client):
        service.engine = client
        assert client.stop(20)
        client.failure = "broken on purpose"
        health = asyncio.run(ask(app, "GET", "/health"))
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["failure"] == "broken on purpose"
        assert asyncio.run(ask(app, "GET", "/ready")).status_code == 503
        completion = asyncio.run(ask(app, "POST", "/v1/completions", json={"prompt": "a"}))
        for answer in (completion, asyncio.run(ask(app, "GET", "/metrics"))):
            assert answer.status_code == 503
            assert "broken on purpose" in answer.json()["error"]["message"]
        assert asyncio.run(statistics()) == [], "the stream ends in order"


def test_a_drain_is_told_although_the_engine_is_silent(demo_folder: Path) -> None:
    """Nobody should kill a server that ends by itself."""
    service = Service(Settings.model_validate({"model": demo_folder}))
    with connected(demo_folder) as (_, service.engine):
        assert service.engine.stop(20)
        service.draining = True
        health = asyncio.run(ask(create_app(service), "GET", "/health"))
    assert (health.status_code, health.json()["status"]) == (200, "draining")
    assert "ended" in health.json()["failure"]


def test_an_end_that_reader_and_sender_see_at_once_is_told_once(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe:
        """The engine's process ends after the question is noted and before it is sent."""

        def recv(self) -> None:
            raise EOFError

        def send(self, message: object) -> None:
            client._read()
            raise BrokenPipeError

    with connected(demo_folder) as (_, client):
        assert client.stop(20)
        monkeypatch.setattr(client, "_connection", Pipe())
        with pytest.raises(EngineUnavailableError):
            asyncio.run(client.call("details"))


def test_an_exception_that_no_pipe_carries_is_told_all_the_same(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(Exception):
        """Pickle cannot find it."""

    def fail(self: Host) -> bytes:
        raise Local("broken on purpose")

    monkeypatch.setattr(Host, "metrics", fail)
    with connected(demo_folder) as (_, client):
        with pytest.raises(RuntimeError, match="Local: broken on purpose"):
            asyncio.run(client.call("metrics"))
        assert asyncio.run(client.call("details"))["running"] == 0


def test_browsers_of_named_origins_get_leave(tmp_path: Path) -> None:
    settings = {"model": tmp_path, "cors_origins": ["https://a.example"], "api_key": KEY}
    app = create_app(Service(Settings.model_validate(settings)))
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        response = asyncio.run(ask(app, "OPTIONS", "/v1/completions", headers=headers))
        assert response.headers.get("access-control-allow-origin") == allowed
    wanted = {"access-control-request-headers": "authorization, content-type"}
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST", **wanted}
    assert asyncio.run(ask(app, "OPTIONS", "/v1/completions", headers=preflight)).status_code == 200
    busy = asyncio.run(ask(app, "GET", "/metrics", headers={"origin": "https://a.example"}))
    assert busy.headers["retry-after"]
    assert busy.headers["access-control-expose-headers"] == "Retry-After, x-should-retry"


def test_an_unforeseen_error_has_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(Settings.model_validate({"model": tmp_path}))
    monkeypatch.setattr(Service, "ready_engine", lambda self: 1 / 0)
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=False)

    async def talk() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/v1/models")

    response = asyncio.run(talk())
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed: ZeroDivisionError"


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: a search of the other tests' objects would count as a long turn."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("stream", [False, True])
def test_other_tasks_go_on_while_megabytes_are_answered(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """All events are there at once, and no turn takes a tenth of the answer's time on the processor."""
    service = Service(Settings.model_validate({"model": demo_folder}))
    choices, tokens = 4, 1000
    top = tuple((f"token {number}".encode(), -float(number)) for number in range(20))
    turns: list[float] = []
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while True:
            turns.append(time.thread_time())
            await asyncio.sleep(0)

    async def submit(jobs: Sequence[Job], emits: Sequence[Emit]) -> None:
        for emit in emits:
            for number in range(1, tokens + 1):
                reason = "length" if number == tokens else None
                emit(TokenEvent("word", number, reason, logprob=TokenLogprob(b"word", -0.5, top, 0)))
        watchers.append(asyncio.create_task(watch()))

    async def talk() -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "n": choices}
        body |= {"logprobs": True, "top_logprobs": len(top), "stream": stream}
        answer = await ask(create_app(service), "POST", "/v1/chat/completions", json=body)
        watchers[0].cancel()
        return answer

    with connected(demo_folder) as (_, client):
        monkeypatch.setattr(client, "submit", submit)
        service.engine = client
        answer = asyncio.run(talk())
    assert answer.status_code == 200 and len(answer.content) > 4_000_000
    if not stream:
        assert int(answer.headers["content-length"]) == len(answer.content)
        whole = ChatResponse.model_validate_json(answer.content)
        assert [choice.message.content for choice in whole.choices] == ["word" * tokens] * choices
    longest = max(after - before for before, after in pairwise(turns))
    assert longest < (turns[-1] - turns[0]) / 10


def raw(server: httpx.Client, sent: bytes) -> tuple[bytes, float]:
    """What the server answers to these bytes until it closes the connection, and the seconds that took."""
    url = server.base_url
    start = time.monotonic()
    with socket.create_connection((url.host, url.port or 0), timeout=20) as sock:
        sock.sendall(sent)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    return answer, time.monotonic() - start


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"], ids=["none", "half"])
def test_a_connection_without_a_request_is_closed(server: httpx.Client, sent: bytes) -> None:
    answer, seconds = raw(server, sent)
    assert answer == b""
    assert RECEIVE_SECONDS * 0.9 < seconds < 10


def test_a_half_sent_body_is_refused_and_its_connection_closed(server: httpx.Client) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
    head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n"
    answer, seconds = raw(server, head.encode() + b'{"prompt": "The')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer
    assert RECEIVE_SECONDS * 0.9 < seconds < 15


@pytest.mark.parametrize("late", [False, True])
def test_malformed_bytes_behind_a_refusal_get_no_answer(server: httpx.Client, late: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    url = server.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=20) as sock:
        sock.sendall(head + b"5\r\nhello\r\n" + (b"" if late else b"zz\r\n"))
        got = sock.recv(65536)
        if late:
            sock.sendall(b"zz\r\n")
        while piece := sock.recv(65536):
            got += piece
    assert got.startswith(b"HTTP/1.1 401 ") and got.count(b"HTTP/1.1 ") == 1


def test_what_is_no_http_is_refused_in_the_same_form(server: httpx.Client) -> None:
    answer, _ = raw(server, b"what\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_request_ends_at_its_time(server: httpx.Client) -> None:
    plain = server.post("/v1/completions", json={**LONG, "timeout": 0.3})
    assert plain.status_code == 408, "the client's own limit is no failure of the server"
    assert plain.json()["error"]["type"] == "timeout_error"
    for seconds in (0.3, 1, 3):  # a busy machine may have no token by the first of these
        late = {**LONG, "timeout": seconds, "stream": True}
        with server.stream("POST", "/v1/completions", json=late) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        if len(lines) > 3:
            break
    assert len(lines) > 3
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert lines[-1] == "data: [DONE]"
    assert server.get("/health").json()["running"] == 0


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_to_a_fault_of_the_server_is_counted(begun: bool) -> None:
    counter = prometheus_client.Counter("answers", "Answers", ["status"], registry=None)

    async def faulty(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("on purpose")

    async def send(message: Any) -> None: ...

    with pytest.raises(KeyError):
        asyncio.run(Counted(faulty, answers=counter)({"type": "http"}, None, send))  # type: ignore[arg-type]
    counted = {
        one.labels["status"]: one.value for one in counter.collect()[0].samples if one.name == "answers_total"
    }
    assert counted == {"200" if begun else "500": 1}
