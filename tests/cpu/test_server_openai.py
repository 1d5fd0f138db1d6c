"""The official client of OpenAI against the server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.demo_model import demo_folder
from tests.live_server import live_server

__all__ = ["demo_folder"]

MODEL = "shakespeare"
KEY = "a key of the tests"
OPTIONS = ("--max-context", "512", "--max-batch", "2", "--max-waiting", "2")


@pytest.fixture(scope="module")
def client(demo_folder: Path) -> Iterator[openai.OpenAI]:
    with (
        live_server(demo_folder, *OPTIONS, "--api-key", KEY) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_completions(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="The graph", max_tokens=12, temperature=0)
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None and plain.usage.completion_tokens == 12
    stream = client.completions.create(
        model=MODEL, prompt="The graph", max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert last.usage == plain.usage


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    """Greedy tokens are the most probable ones, and each offset is where its token begins."""
    answer = client.completions.create(
        model=MODEL, prompt="The graph", max_tokens=8, temperature=0, logprobs=3
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
    assert logprobs.top_logprobs and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    for token, value, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        assert max(top.values()) == top[token] == value <= 0
        assert len(top) == 3
        assert choice.text[offset:].startswith(token)


def test_chat(client: openai.OpenAI) -> None:
    messages = [
        openai.types.chat.ChatCompletionUserMessageParam(role="user", content="What does the graph do?")
    ]
    plain = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    message = plain.choices[0].message
    assert (message.role, plain.choices[0].finish_reason) == ("assistant", "length")
    prompt = "user: What does the graph do?\nassistant:"
    same = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
    assert message.content == same.choices[0].text
    assert plain.usage == same.usage
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=12, temperature=0, stream=True, n=2
    )
    texts, roles = ["", ""], []
    for chunk in stream:
        (part,) = chunk.choices
        texts[part.index] += part.delta.content or ""
        roles.append(part.delta.role)
    assert texts == [message.content] * 2
    assert roles.count("assistant") == 2


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=6, temperature=0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert bytes(entry.bytes or ()).decode() == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 2


def test_a_chat_without_max_tokens_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "word " * 200}], temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def health(client: openai.OpenAI) -> dict[str, Any]:
    return dict(httpx.get(str(client.base_url.join("/health"))).json())


def ended(client: openai.OpenAI, reason: str) -> float:
    """How many requests have ended for this reason."""
    metrics = httpx.get(str(client.base_url.join("/metrics"))).text
    found = re.search(rf'^server_requests_total{{reason="{reason}"}} (\S+)$', metrics, re.M)
    return float(found[1]) if found else 0.0


def test_stop_seed_and_top_p(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        return (
            client.completions.create(model=MODEL, prompt="The graph", max_tokens=12, **options)
            .choices[0]
            .text
        )

    whole = text(temperature=0)
    assert text(temperature=0, stop=["never seen", whole[5:8]]) == whole[: whole.find(whole[5:8])]
    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text(seed=5, top_p=1e-9) == whole, "the most probable token alone"
    assert text(seed=-3), "any 64-bit integer is a seed"


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The graph", "In the morning"]
    both = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, temperature=0)
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, temperature=0).choices[0].text
        for prompt in prompts
    ]
    assert [choice.text for choice in both.choices] == alone


def test_the_usage_of_a_chat_stream(client: openai.OpenAI) -> None:
    messages = [openai.types.chat.ChatCompletionUserMessageParam(role="user", content="a")]
    plain = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, temperature=0)
    *_, last = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=5, temperature=0, stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False}, parallel_tool_calls=True,
        service_tier="auto", modalities=["text"], functions=[],
    )  # fmt: skip
    assert last.choices == [] and last.usage == plain.usage


def test_a_stream_that_is_closed_gives_its_pages_back(client: openai.OpenAI) -> None:
    before = ended(client, "cancelled")
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert health(client)["free_pages"] < health(client)["total_pages"]
    stream.close()
    end = time.monotonic() + 20
    while health(client)["free_pages"] < health(client)["total_pages"]:
        assert time.monotonic() < end
    assert ended(client, "cancelled") == before + 1


def test_a_full_queue(client: openai.OpenAI) -> None:
    long: dict[str, Any] = {"max_tokens": 500, "stream": True, "n": 2, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=MODEL, prompt="a", **long) as running:
        next(iter(running))  # its choices have left the queue
        with (
            client.completions.create(model=MODEL, prompt="a", **long),
            pytest.raises(openai.RateLimitError) as full,
        ):
            client.completions.create(model=MODEL, prompt="a", n=2)
    assert (full.value.code, full.value.response.headers["retry-after"]) == ("queue_full", "1")


def test_a_wrong_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as wrong:
        client.with_options(api_key="another").models.list()
    assert wrong.value.code == "invalid_api_key"


def test_a_request_that_is_late_is_not_sent_again(client: openai.OpenAI) -> None:
    before = ended(client, "timeout")
    late: dict[str, Any] = {"max_tokens": 500, "extra_body": {"timeout": 0.2, "ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as error:
        client.with_options(max_retries=2).completions.create(model=MODEL, prompt="a", **late)
    assert error.value.status_code == 408
    assert ended(client, "timeout") == before + 1


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", presence_penalty=1)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 2000}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as many:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}] * 1025)
    assert many.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as image:
        part = {"type": "image_url", "image_url": {"url": "http://example.org"}}
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item,misc]
    assert image.value.param == "messages[0].content"
    with pytest.raises(openai.APIError, match="did not finish in its time"):
        late = {"timeout": 0.2, "ignore_eos": True}
        list(client.completions.create(model=MODEL, prompt="a", max_tokens=500, stream=True, extra_body=late))
    assert health(client)["waiting"] == 0
