"""The server as a process on the reference backend, over HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from tests.demo_model import demo_folder
from tests.live_server import eventually, live_server

__all__ = ["demo_folder"]

TOTAL_PAGES = 16


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    options = ("--cache-pages", str(TOTAL_PAGES + 1), "--max-waiting", "3", "--max-batch", "3")
    with live_server(demo_folder, *options, "--prefill-chunk", "32", "--max-body-bytes", "2097152") as client:
        yield client


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


def health(server: httpx.Client) -> dict[str, Any]:
    return dict(server.get("/health").json())


def test_health_names_the_reference_backend(server: httpx.Client) -> None:
    body = health(server)
    assert (body["status"], body["backend"], body["backend_reason"]) == (
        "ok",
        "reference",
        "--device cpu",
    )
    assert body["free_pages"] == body["total_pages"] == TOTAL_PAGES


def test_models(server: httpx.Client) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("shakespeare", "model")
    assert 0 <= time.time() - model["created"] < 600
    assert server.get("/v1/models/shakespeare").json() == model
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert model["max_model_len"] == TOTAL_PAGES * 64


def test_plain_completion(server: httpx.Client) -> None:
    body = complete(server, prompt="The router looks at", max_tokens=12, model="shakespeare")
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


def test_several_prompts_and_choices(server: httpx.Client) -> None:
    """Choice `i` of a prompt draws with seed + i; prompts come in order."""
    prompts, options = ["The graph", "Then the tile"], {"max_tokens": 6, "temperature": 1.0}
    alone = [
        [complete(server, prompt=text, seed=seed, **options)["choices"][0]["text"] for text in prompts]
        for seed in (7, 8)
    ]
    body = complete(server, prompt=prompts, seed=7, **options)
    assert [choice["text"] for choice in body["choices"]] == alone[0]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 12
    both = {"prompt": "The graph", "n": 2, "seed": 7, **options}
    expected = [alone[0][0], alone[1][0]]
    assert [choice["text"] for choice in complete(server, **both)["choices"]] == expected
    texts = ["", ""]
    for chunk in events(server, **both):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected
    lists = complete(server, prompt=[[5, 6], [7]], max_tokens=2)
    assert lists["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_neutral_values_are_accepted(server: httpx.Client) -> None:
    nothing = ("temperature", "logprobs", "seed", "stop", "n", "stream_options", "user", "suffix", "made_up")
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "best_of": 1, "logit_bias": {}}
    complete(server, prompt="a", max_tokens=1, **neutral, **dict.fromkeys(nothing))
    quiet = {"stream_options": {"include_obfuscation": False}, "service_tier": "auto"}
    events(server, prompt="a", max_tokens=1, stream_options=quiet["stream_options"])
    tools = {"parallel_tool_calls": True, "modalities": ["text"], "functions": [], "tools": []}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}
    assert server.post("/v1/chat/completions", json={**chat, **quiet, **tools}).status_code == 200


def test_a_seed_may_be_negative(server: httpx.Client) -> None:
    texts = [
        complete(server, prompt="a", max_tokens=9, temperature=1, seed=seed)["choices"][0]["text"]
        for seed in (-1, 2**32 - 1, 2**63 - 1, -(2**32) - 1, 2**31 - 1, -2)
    ]
    assert len(set(texts[:4])) == 1, "seeds count modulo 2^32"
    assert texts[0] not in texts[4:]


def test_a_kept_connection_gets_its_answers_at_once(server: httpx.Client) -> None:
    """Without TCP_NODELAY each waits 40 ms for the client's acknowledgement."""
    seconds = []
    for _ in range(30):
        start = time.monotonic()
        server.get("/ready")
        seconds.append(time.monotonic() - start)
    assert min(seconds[9:]) < 0.02


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


def test_a_seed_repeats_the_text_of_a_request_that_runs_alone(server: httpx.Client) -> None:
    """In a batch of several, probabilities round differently; `test_server_engine.py` has the draws alone."""
    body = {"prompt": "In the evening", "max_tokens": 12, "temperature": 1.0, "top_p": 0.9}
    texts = [
        [complete(server, **body, seed=seed)["choices"][0]["text"] for seed in range(11, 15)] for _ in "ab"
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [1024]}, 400, "prompt"),
        ({"prompt": [[1], "a"]}, 400, "prompt"),
        ({"prompt": [1.0]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": [-1] * 300_000}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": ["a", "\udfff"]}, 400, "prompt"),
        ({"prompt": [5] * TOTAL_PAGES * 64}, 400, "prompt"),
        ({"prompt": ["a"] * 4}, 400, "prompt"),
        ({"prompt": [[5]] * 4}, 400, "prompt"),
        ({"prompt": ["a"] * 1025}, 400, "prompt"),
        ({"prompt": "a", "seed": -(2**63) - 1}, 400, "seed"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
            400,
            "stream_options.include_obfuscation",
        ),
        ({"prompt": "a", "made_up": 1, "other": 2}, 400, "made_up"),
        ({"prompt": "a", "body": 1}, 400, "body"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": "a " * 5000}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": "3"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": "1"}, 400, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature"),
        ({"prompt": "a", "stream": 1}, 400, "stream"),
        ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"prompt": "a", "echo": True}, 400, "echo"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "n": 4}, 400, "n"),
        ({"prompt": "a", "stop": "\ud800"}, 400, "stop"),
        ({"prompt": "a", "stream": True, "stream_options": {"other": 1}}, 400, "stream_options.other"),
        ({"prompt": "a", "\ud800": 1}, 400, "\\ud800"),
        ({"prompt": "a", "model": "\ud800"}, 400, "model"),
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
    server: httpx.Client, body: dict[str, Any], status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    response = server.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", **{f"f{i}": 1 for i in range(150_000)}},
        {"prompt": "a", "stream": True, "stream_options": {f"f{i}": 1 for i in range(150_000)}},
        {"prompt": "a", "logit_bias": {f"f{i}": "" for i in range(150_000)}},
        {"prompt": [[1]] * 500_000},
        {"prompt": [1] * 1_000_000},
    ],
    ids=["fields", "options", "biases", "prompts", "tokens"],
)
def test_a_body_full_of_mistakes_is_refused_at_once(server: httpx.Client, body: dict[str, Any]) -> None:
    """The check holds up every stream."""
    content = json.dumps(body, separators=(",", ":"))
    assert len(content) < 2 << 20
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        response = server.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        seconds.append(time.monotonic() - start)
        assert response.status_code == 400, response.text
    assert min(seconds) < 0.5


def test_other_http_errors_have_the_same_form(server: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    broken = server.post("/v1/completions", content=b"{bad", headers=headers)
    for response, status in (
        (broken, 400),
        (server.get("/nowhere"), 404),
        (server.get("/health/"), 404),
        (server.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_the_messages_help(server: httpx.Client) -> None:
    def message(**body: Any) -> str:
        return str(server.post("/v1/completions", json=body).json()["error"]["message"])

    assert "a list of strings" in message(prompt=[1.0])
    empty = server.post("/v1/completions", content=b"", headers={"content-type": "application/json"})
    assert empty.json()["error"]["message"] == "the body is missing; send a JSON object"
    assert message(prompt="a", presence_penalty=1) == "presence_penalty: this server supports only 0"
    assert "the prompt has 2000 tokens" in message(prompt=[1] * 2000)
    assert "ask for fewer" in message(prompt="a", n=4)
    many = server.post("/v1/completions", json={"prompt": "a", "n": 4}).json()["error"]
    assert many["code"] is None, "a shorter prompt does not help"
    assert message(prompt="a", made_up=1) == "made_up: unknown field"
    plain = server.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 400
    assert plain.json()["error"]["message"] == "send content-type: application/json"


def test_the_documentation_names_what_the_server_sends(server: httpx.Client) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = paths[path]["post"]["responses"]
        assert set(responses) == {
            *("200", "400", "401", "404", "408", "413", "429", "500", "503", "504", "default")
        }
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert "422" not in json.dumps(list(paths.values()))


def test_closing_a_stream_frees_its_pages(server: httpx.Client) -> None:
    body = {"prompt": "The graph", "max_tokens": 900, "stream": True, "temperature": 0, "ignore_eos": True}
    with server.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # keep the iterator: httpx closes the stream with it
        next(lines)
        assert health(server)["free_pages"] == TOTAL_PAGES - 1
    assert eventually(lambda: health(server)["free_pages"] == TOTAL_PAGES)
    assert health(server)["running"] == 0


def test_a_client_that_gives_up_waiting_frees_its_pages(server: httpx.Client) -> None:
    body = {"prompt": "The graph", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", json=body, timeout=0.7)
    assert eventually(lambda: health(server)["free_pages"] == TOTAL_PAGES)


def test_a_full_queue_refuses_and_recovers(server: httpx.Client) -> None:
    """One request's choices fill the batch, three requests wait, and the next is told to come back."""
    big = {
        "prompt": "The graph",
        "n": 3,
        "max_tokens": 900,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
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
        metrics = server.get("/metrics")
        assert metrics.headers["content-type"] == CONTENT_TYPE_LATEST
        lines = metrics.text.splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    before = values()
    complete(server, prompt=[1, 2, 3], max_tokens=5)
    for model in ("other", "another"):
        assert server.post("/v1/completions", json={"prompt": "a", "model": model}).status_code == 404
    assert server.post("/v1/completions", json={"prompt": "a", "n": 17}).status_code == 400
    with socket.create_connection((server.base_url.host, server.base_url.port or 0), timeout=20) as sock:
        sock.sendall(b"what\r\n\r\n")
        assert sock.recv(20).startswith(b"HTTP/1.1 400 ")
    after = values()
    for name, added in (
        ('server_http_answers_total{status="404"}', 2),
        ('server_http_answers_total{status="400"}', 2),
        ("server_prompt_tokens_total", 3),
        ("server_generated_tokens_total", 5),
        ('server_requests_total{reason="length"}', 1),
        ("server_time_to_first_token_seconds_count", 1),
        ("server_inter_token_seconds_count", 4),
        ("server_batch_size_count", 4),
        ("server_batch_size_sum", 4),
    ):
        assert after[name] - before.get(name, 0) == added
    assert after["moe_fp8_jit_misses"] == 0
    assert after["server_pages_free"] == TOTAL_PAGES
    assert after["server_cache_use"] == 0
