"""The page's files and the stream of figures, over HTTP; `test_server_page_browser.py` uses the page."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch

import moe_fp8
from server_example import stats as stats_module
from server_example.app import Service, create_app
from server_example.client import EngineClient
from server_example.messages import Reading
from server_example.model.transformer import Transformer
from server_example.settings import Settings
from server_example.stats import Stats
from tests.demo_model import demo_folder, load_model, model_run
from tests.engine_client import connected
from tests.live_server import live_server, server_process

__all__ = ["demo_folder"]

KEY = "a key of the tests"
PAGE = Path(__file__).resolve().parents[2] / "server_example" / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
LONG = {"prompt": "The graph", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    with live_server(demo_folder, "--api-key", KEY) as client:
        yield client


def authorized() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


@contextmanager
def stats(server: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    with server.stream("GET", "/v1/stats", headers=authorized()) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


@pytest.mark.parametrize("path", ["/", *(f"/page/{file.name}" for file in sorted(PAGE.iterdir()))])
def test_the_files_need_no_key_and_have_their_types(server: httpx.Client, path: str) -> None:
    file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
    response = server.get(path)
    assert (response.status_code, response.content) == (200, file.read_bytes())
    assert response.headers["content-type"] == TYPES[file.suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache", "a new version is seen at once"
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", ""])
def test_no_other_file_is_served(server: httpx.Client, name: str) -> None:
    response = server.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code(server: httpx.Client) -> None:
    html = server.get("/").text
    for link in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert server.get(link).status_code == 200, link
    assert not re.search(r"<style|<script>|\s(?:style|on\w+)=", html)
    for file in PAGE.iterdir():
        found = set(re.findall(r"https?://[^\s\"'`)]*", file.read_text()))
        assert found <= {"http://www.w3.org/2000/svg"}, file.name  # a name, not an address


def test_the_figures_need_the_key(server: httpx.Client) -> None:
    assert server.get("/v1/stats").status_code == 401


def test_figures_of_a_running_request(server: httpx.Client) -> None:
    start = time.monotonic()
    with stats(server) as events:
        idle = next(events)
        assert (idle["decode_ms"], idle["batch_size"], idle["pages_used"]) == (None, None, 0)
        assert set(idle["expert_tokens"]) == {0}
        body = {**LONG, "stream": True}
        with server.stream("POST", "/v1/completions", json=body, headers=authorized()) as response:
            lines = response.iter_lines()  # keep the iterator: httpx closes the stream with it
            next(lines)
            # Events before the first step have no decode_ms.
            next(event for event in islice(events, 40) if event["decode_ms"] is not None)
            *_, last = [next(events) for _ in range(3)]
            assert time.monotonic() - start > 1, "the events are half a second apart"
    assert 0 < last["decode_ms"] < 1000
    assert (last["batch_size"], last["waiting"]) == (1, 0)
    assert 0 < last["pages_used"] <= last["pages"] == 128
    assert last["tokens_per_second"] > 1
    # The model has 16 experts. Each token goes to 4 of them in each of 3 layers.
    assert len(last["expert_tokens"]) == 16
    assert sum(last["expert_tokens"]) % 12 == 0
    assert max(last["expert_tokens"]) > 0


def test_every_routed_token_is_counted_once(server: httpx.Client) -> None:
    prompt, generated = [1, 2, 3, 4, 5], 7
    with stats(server) as events:
        next(events)
        body = {"prompt": prompt, "max_tokens": generated, "ignore_eos": True}
        assert server.post("/v1/completions", json=body, headers=authorized()).status_code == 200
        # The last token is not an input of the model.
        wanted = (len(prompt) + generated - 1) * 4 * 3
        counted = 0
        for event in islice(events, 40):
            counted += sum(event["expert_tokens"])
            if counted >= wanted:
                break
        assert counted + sum(next(events)["expert_tokens"]) == wanted


def test_the_counts_are_the_routers_choices(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a prefill and through a decode step with padded rows."""
    model = load_model(demo_folder, torch.device("cpu"), num_workers=8)
    choices: list[torch.Tensor] = []
    route = moe_fp8.route_topk

    def recorded(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(*arguments, **options)
        choices.append(ids.clone())
        return weights, ids

    monkeypatch.setattr(moe_fp8, "route_topk", recorded)
    run = model_run(model, 64)
    run.prefill(list(range(1, 12)))
    assert counted(model) == chosen(choices)
    inputs = run.decode_inputs(5)
    padded = {name: torch.cat((value, torch.zeros_like(value), value)) for name, value in inputs.items()}
    before = len(choices)
    model.decode(padded, run.caches)
    assert len(choices) == 2 * before
    # Row 1 of 3 is padding.
    assert counted(model) == chosen([*choices[:before], *(ids[[0, 2]] for ids in choices[before:])])
    assert int(model.expert_tokens[0]) == sum(ids[1].numel() for ids in choices[before:])


def counted(model: Transformer) -> list[int]:
    return model.expert_tokens.tolist()[1:]


def chosen(choices: list[torch.Tensor]) -> list[int]:
    return torch.cat([ids.flatten() for ids in choices]).bincount(minlength=16).tolist()


def test_a_server_that_loads_has_no_figures(tmp_path: Path) -> None:
    app = create_app(Service(Settings.model_validate({"model": tmp_path})))

    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    assert asyncio.run(ask("/v1/stats")).status_code == 503
    assert asyncio.run(ask("/")).status_code == 200


def test_the_stream_ends_with_its_client(demo_folder: Path) -> None:
    """The application's call returns once the connection has closed."""
    service = Service(Settings.model_validate({"model": demo_folder}))
    sent: list[bytes] = []

    async def talk() -> None:
        has_event = asyncio.Event()
        begun = False

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await has_event.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if b"decode_ms" in sent[-1]:
                has_event.set()

        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/v1/stats",
            "raw_path": b"/v1/stats", "query_string": b"", "headers": [], "root_path": "",
            "asgi": {"version": "3.0"},
        }  # fmt: skip
        await asyncio.wait_for(create_app(service)(scope, receive, send), 20)

    with connected(demo_folder) as (_, service.engine):
        asyncio.run(talk())
    assert sum(b"decode_ms" in body for body in sent) == 1


def test_all_listeners_share_one_reader(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the last listener, and the next one starts another."""
    monkeypatch.setattr(stats_module, "SECONDS", 0.05)
    figures = Stats()
    readings = 0

    async def listen(engine: EngineClient, count: int) -> list[str]:
        events = figures.events(engine)
        got = [(await anext(events))["data"] for _ in range(count)]
        await events.aclose()  # type: ignore[attr-defined]
        return got

    async def talk(engine: EngineClient) -> None:
        nonlocal readings
        call = engine.call

        async def counting(name: str, *arguments: Any) -> Any:
            nonlocal readings
            readings += 1
            return await call(name, *arguments)

        monkeypatch.setattr(engine, "call", counting)
        short, *long = await asyncio.gather(listen(engine, 3), *(listen(engine, 6) for _ in range(9)))
        assert readings == 7, "one before the first interval, and one after each"
        assert all(got == long[0] for got in long) and short == long[0][:3]
        await asyncio.sleep(0.2)
        assert readings == 7, "nobody listens"
        assert len(await listen(engine, 2)) == 2 and readings == 10

    with connected(demo_folder) as (_, client):
        asyncio.run(talk(client))


def test_every_event_tells_of_its_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "SECONDS", 0.01)
    same = {"server_requests_waiting": 0.0, "server_pages_free": 3.0}
    steps = [(0.0, 0.0), (2.0, 0.5), (3.0, 0.6), (3.0, 0.6)]  # decode steps until then, and their seconds
    readings = [
        Reading(
            time=float(at),
            metrics={
                **same,
                "server_generated_tokens_total": count * 8,
                "server_step_seconds_count/decode": count,
                "server_step_seconds_sum/decode": seconds,
            },
            experts=[int(count) * 5],
        )
        for at, (count, seconds) in enumerate(steps)
    ]

    class Engine:
        alive, served = True, SimpleNamespace(pages=4)

        async def call(self, name: str) -> Reading:
            return readings.pop(0)

    async def talk() -> None:
        events = Stats().events(cast(EngineClient, Engine()))
        got = [json.loads((await anext(events))["data"]) for _ in range(3)]
        await events.aclose()  # type: ignore[attr-defined]
        assert [event["decode_ms"] for event in got] == [250, 100, None]
        assert [event["tokens_per_second"] for event in got] == [16, 8, 0]
        assert [event["expert_tokens"] for event in got] == [[10], [5], [0]]
        assert [event["pages_used"] for event in got] == [1, 1, 1]

    asyncio.run(asyncio.wait_for(talk(), 20))


def test_the_stream_ends_with_the_drain(demo_folder: Path) -> None:
    with server_process(demo_folder) as (process, url):
        with httpx.stream("GET", f"{url}/v1/stats", timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            list(lines)  # A stream that the server cuts raises an error.
        assert process.wait(timeout=20) == 0
