"""Requests whose texts become tokens: they hold up nothing, and end early if their time or client does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from server_example import intake
from server_example.app import Service, create_app
from server_example.chat import ChatTemplateError
from server_example.errors import ApiError
from server_example.generation import Deadline
from server_example.options import EngineOptions
from server_example.protocol import CompletionRequest
from server_example.serve import Process, listen
from server_example.settings import Settings
from tests.demo_model import demo_folder
from tests.engine_client import connected

__all__ = ["demo_folder"]

TEXT = {"prompt": "a", "max_tokens": 1}
TOKENS = {"prompt": [1], "max_tokens": 1}
#: More than there are worker threads.
MANY = 40


class SlowTokens:
    """In place of `encode`: it takes until `may_end`, and each character becomes a token."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.special: list[bool] = []
        self.may_end = threading.Event()

    def __call__(self, tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
        self.begun.append(text)
        self.special.append(special)
        assert self.may_end.wait(30)
        return [1] * len(text)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokens]:
    slow = SlowTokens()
    monkeypatch.setattr(intake, "encode", slow)
    yield slow
    slow.may_end.set()


@pytest.fixture
def service(demo_folder: Path) -> Iterator[Service]:
    service = Service(Settings.model_validate({"model": demo_folder}))
    with connected(demo_folder, EngineOptions(max_waiting=MANY)) as (_, service.engine):
        yield service


def talk(service: Service, slow: SlowTokens, talk: Any) -> None:
    """Runs `talk` with a client. What is tokenized ends at the latest when `talk` ends."""

    async def run() -> None:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            try:
                await asyncio.wait_for(talk(client), 20)
            finally:
                slow.may_end.set()

    asyncio.run(run())


def posted(client: httpx.AsyncClient, body: dict[str, Any]) -> Coroutine[Any, Any, httpx.Response]:
    return client.post("/v1/completions", json=body)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_other_requests_go_on_and_too_many_are_refused(service: Service, slow: SlowTokens) -> None:
    """Token ids wait for no thread, even if a whole queue of texts does."""

    async def ask(client: httpx.AsyncClient) -> None:
        waiting = [asyncio.create_task(posted(client, TEXT)) for _ in range(MANY)]
        await until(lambda: service.intake.open == MANY and slow.begun)
        assert (await client.get("/health")).status_code == 200
        assert (await posted(client, TOKENS)).status_code == 200
        refused = await posted(client, TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        assert not any(task.done() for task in waiting)
        slow.may_end.set()
        assert {(await task).status_code for task in waiting} <= {200, 429}
        assert (await posted(client, TEXT)).status_code == 200

    talk(service, slow, ask)
    assert service.intake.open == 0


def test_the_first_text_that_is_too_long_is_the_last(service: Service, slow: SlowTokens) -> None:
    slow.may_end.set()

    async def ask(client: httpx.AsyncClient) -> None:
        for path, body in (
            ("completions", {"prompt": ["short", "long" * 300, "never read"]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "long" * 300}]}),
        ):
            refused = await client.post(f"/v1/{path}", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == ("prompt" if "prompt" in body else "messages")

    talk(service, slow, ask)
    assert [len(text) for text in slow.begun[:2]] == [5, 1200] and len(slow.begun) == 3


def test_a_text_is_measured_in_bytes_before_it_is_tokenized(service: Service, slow: SlowTokens) -> None:
    slow.may_end.set()
    assert service.engine is not None
    most = service.engine.served.max_context * service.engine.token_texts.most_bytes

    async def ask(client: httpx.AsyncClient) -> None:
        for text in ("é" * (most // 2), "é" * (most // 2 + 1)):
            assert (await posted(client, {"prompt": text})).status_code == 400

    talk(service, slow, ask)
    assert slow.begun == ["é" * (most // 2)]


def test_a_body_may_have_as_many_prompts_as_the_queue_has_places(service: Service, slow: SlowTokens) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        fits = await posted(client, {"prompt": [[1]] * MANY, "max_tokens": 1})
        assert fits.status_code == 200 and len(fits.json()["choices"]) == MANY
        refused = await posted(client, {"prompt": [[1]] * (MANY + 1), "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")

    talk(service, slow, ask)


def test_special_tokens_come_from_the_models_own_template_or_from_the_tokenizer(
    service: Service, slow: SlowTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.may_end.set()
    assert service.engine is not None
    template = SimpleNamespace(own=True, render=lambda messages: "<s>a")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await posted(client, TEXT)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        monkeypatch.setattr(service.engine, "chat_template", template)
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200

    talk(service, slow, ask)
    assert slow.special == [True, True, False]


def test_messages_that_the_template_refuses_are_the_clients_fault(
    service: Service, slow: SlowTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(messages: object) -> str:
        raise ChatTemplateError("roles must alternate")

    assert service.engine is not None
    monkeypatch.setattr(service.engine, "chat_template", SimpleNamespace(own=True, render=render))

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "a"}]}
        refused = await client.post("/v1/chat/completions", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "messages")
        assert "roles must alternate" in error["message"]

    talk(service, slow, ask)
    assert not slow.begun


@pytest.mark.parametrize("stream", [False, True])
def test_the_wait_counts_for_the_deadline(service: Service, slow: SlowTokens, stream: bool) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": ["first", "second"], "max_tokens": 1, "stream": stream, "timeout": 0.2}
        start = time.monotonic()
        late = await posted(client, body)
        assert (late.status_code, late.json()["error"]["type"]) == (408, "timeout_error")
        assert time.monotonic() - start < 5
        slow.may_end.set()
        await asyncio.sleep(0.1)

    talk(service, slow, ask)
    assert slow.begun == ["first"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_begun_for_a_client_that_has_left(
    service: Service, slow: SlowTokens, stream: bool
) -> None:
    app = create_app(service)
    body = {"prompt": ["first", "second"], "max_tokens": 1, "stream": stream}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await until(lambda: slow.begun)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask(client: httpx.AsyncClient) -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "root_path": "",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)
        slow.may_end.set()
        await asyncio.sleep(0.1)

    talk(service, slow, ask)
    assert slow.begun == ["first"]
    assert sent[0]["status"] == 499
    assert (service.intake.open, service.engine and service.engine.busy) == (0, False)


@pytest.mark.parametrize("seconds", [20.0, 0.2], ids=["waits", "ends"])
def test_a_drain_waits_for_texts_that_become_tokens(
    demo_folder: Path, slow: SlowTokens, seconds: float
) -> None:
    """What is left when it ends gets an answer, too."""
    settings = Settings.model_validate({"model": demo_folder, "drain_seconds": seconds})
    service = Service(settings)
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    answers: list[httpx.Response] = []
    with connected(demo_folder) as (_, service.engine):
        process = Process(service, sock)
        process._thread.start()
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=TEXT, timeout=30)))
        draining = threading.Thread(target=process.shut_down)
        asking.start()
        try:
            while not slow.begun:
                time.sleep(0.01)
            draining.start()
            if seconds > 1:
                draining.join(0.3)
                assert asking.is_alive() and draining.is_alive()
                assert httpx.post(url, json=TEXT).status_code == 503
                slow.may_end.set()
            asking.join(20)
        finally:
            slow.may_end.set()
            draining.join(20)
        (answer,) = answers
        if seconds > 1:
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["message"] == "the server is shutting down"
        assert not draining.is_alive() and not process._thread.is_alive()


@pytest.mark.parametrize(
    ("timeout", "limit", "seconds", "status"),
    [(3.0, 0.0, 3.0, 408), (None, 5.0, 5.0, 504), (3.0, 5.0, 3.0, 408), (5.0, 3.0, 3.0, 504)],
)
def test_the_earlier_limit_counts_and_is_not_tried_again(
    timeout: float | None, limit: float, seconds: float, status: int
) -> None:
    begun = time.monotonic()
    deadline = Deadline.of(CompletionRequest(prompt="a", timeout=timeout), limit)
    assert deadline.at is not None and begun + seconds <= deadline.at < begun + seconds + 1
    assert deadline.status == status
    assert ApiError(status, "late").response().headers["x-should-retry"] == "false"


def test_zero_seconds_are_no_limit() -> None:
    assert Deadline.of(CompletionRequest(prompt="a"), 0.0).at is None
