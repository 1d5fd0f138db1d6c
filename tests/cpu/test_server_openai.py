"""The official client of OpenAI against the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.demo_model import demo_folder
from tests.live_server import live_server

__all__ = ["demo_folder"]

MODEL = "shakespeare"


@pytest.fixture(scope="module")
def client(demo_folder: Path) -> Iterator[openai.OpenAI]:
    with (
        live_server(demo_folder, "--max-context", "512") as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client,
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
    assert httpx.get(str(client.base_url).replace("/v1/", "/health")).json()["waiting"] == 0
