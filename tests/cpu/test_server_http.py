"""The server as a process on the reference backend, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_example.demo import free_port, start_server, stop_server, wait_until_ready
from tests.demo_model import demo_folder

__all__ = ["demo_folder"]

TOTAL_PAGES = 16


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    port = free_port()
    process = start_server(
        demo_folder, port, "--device", "cpu", "--cache-pages", str(TOTAL_PAGES + 1), "--max-waiting", "3",
        "--max-batch", "3", "--prefill-chunk", "32",
    )  # fmt: skip
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
        assert process.poll() is None, "the server died"
    finally:
        stop_server(process)
    assert process.returncode == 0


def complete(server: httpx.Client, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(server: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion, after a check of the framing."""
    body = {"temperature": 0, "stream": True, **body}
    with server.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def health(server: httpx.Client) -> dict[str, Any]:
    return dict(server.get("/health").json())


def test_health_names_the_reference_backend(server: httpx.Client) -> None:
    body = health(server)
    assert (body["status"], body["backend"], body["backend_reason"]) == (
        "ok",
        "reference",
        "it was asked for",
    )
    assert body["free_pages"] == body["total_pages"] == TOTAL_PAGES


def test_models(server: httpx.Client) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == "demo-model"
    assert model["max_model_len"] == TOTAL_PAGES * 64


def test_plain_completion(server: httpx.Client) -> None:
    body = complete(server, prompt="The router looks at", max_tokens=12, model="demo-model")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"]) > 12
    assert body["object"] == "text_completion"
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_stream_gives_the_text_of_the_plain_answer(server: httpx.Client) -> None:
    plain = complete(server, prompt="The graph", max_tokens=20)
    chunks = events(server, prompt="The graph", max_tokens=20, stream_options={"include_usage": True})
    *parts, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"] == plain["usage"]
    texts = [part["choices"][0]["text"] for part in parts]
    assert "".join(texts) == plain["choices"][0]["text"]
    assert len(parts) > 10, "tokens did not come one by one"
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert len({part["id"] for part in parts}) == 1


def test_token_ids_are_a_prompt(server: httpx.Client) -> None:
    body = complete(server, prompt=[5, 6, 7], max_tokens=3)
    assert body["usage"]["prompt_tokens"] == 3


def test_a_prompt_longer_than_a_chunk(server: httpx.Client) -> None:
    body = complete(server, prompt=list(range(1, 101)), max_tokens=4)
    assert body["usage"] == {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104}


def test_stop_ends_the_text_before_it(server: httpx.Client) -> None:
    whole = complete(server, prompt="The graph", max_tokens=20)["choices"][0]["text"]
    stop = whole[9:13]
    expected = whole[: whole.find(stop)]
    body = complete(server, prompt="The graph", max_tokens=20, stop=["never seen", stop])
    assert body["choices"][0] == {"index": 0, "text": expected, "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] < 20
    chunks = events(server, prompt="The graph", max_tokens=20, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_seed_repeats_and_the_batch_does_not_matter(server: httpx.Client) -> None:
    body = {"prompt": "In the evening", "max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 11}
    alone = complete(server, **body)["choices"][0]["text"]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(complete, server, **{**body, "seed": seed}) for seed in (11, 12, 11)]
        texts = [future.result()["choices"][0]["text"] for future in futures]
    assert [texts[0], texts[2]] == [alone, alone]
    assert texts[1] != alone


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [512]}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "logprobs": 6}, 400, "logprobs"),
        ({"prompt": "a", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
    ],
)
def test_bad_requests_are_refused_by_name(
    server: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    response = server.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_other_http_errors_have_the_same_form(server: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    broken = server.post("/v1/completions", content=b"{bad", headers=headers)
    for response, status in (
        (broken, 400),
        (server.get("/nowhere"), 404),
        (server.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_closing_a_stream_frees_its_pages(server: httpx.Client) -> None:
    body = {"prompt": "The graph", "max_tokens": 900, "stream": True, "temperature": 0, "ignore_eos": True}
    with server.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # keep the iterator: httpx closes the stream with it
        next(lines)
        assert health(server)["free_pages"] == TOTAL_PAGES - 15
    assert eventually(lambda: health(server)["free_pages"] == TOTAL_PAGES)
    assert health(server)["running"] == 0


def test_a_client_that_gives_up_waiting_frees_its_pages(server: httpx.Client) -> None:
    body = {"prompt": "The graph", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", json=body, timeout=0.7)
    assert eventually(lambda: health(server)["free_pages"] == TOTAL_PAGES)


def test_a_full_queue_refuses_and_recovers(server: httpx.Client) -> None:
    """One request takes nearly all pages, three requests wait, and the next is told to come back."""
    big = {"prompt": "The graph", "max_tokens": 900, "stream": True, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        with server.stream("POST", "/v1/completions", json=big) as response:
            lines = response.iter_lines()  # keep the iterator: httpx closes the stream with it
            next(lines)
            waiting = [
                pool.submit(complete, server, prompt=[token] * 100, max_tokens=2) for token in (1, 2, 3)
            ]
            assert eventually(lambda: health(server)["waiting"] == 3)
            refused = server.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "overloaded_error"
        assert [future.result()["usage"]["completion_tokens"] for future in waiting] == [2, 2, 2]
    assert eventually(lambda: health(server)["free_pages"] == TOTAL_PAGES)


def test_metrics_count(server: httpx.Client) -> None:
    def values() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    before = values()
    complete(server, prompt=[1, 2, 3], max_tokens=5)
    after = values()
    for name, added in (
        ("server_prompt_tokens_total", 3),
        ("server_generated_tokens_total", 5),
        ('server_requests_total{reason="length"}', 1),
    ):
        assert after[name] - before[name] == added
    assert after["moe_fp8_jit_misses"] == 0
    assert after["server_pages_free"] == TOTAL_PAGES
