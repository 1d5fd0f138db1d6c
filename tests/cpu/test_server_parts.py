"""Bodies, sampling, text and answers, each on its own."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from server_example.answers import ChatForm, CompletionForm, Form, WholeChoice
from server_example.client import Emit, EngineClient
from server_example.generation import Deadline, Generation
from server_example.messages import Job, RequestTooLongError, SamplingParams, TokenEvent, TokenLogprob
from server_example.protocol import ChatRequest, CompletionRequest, Message, Usage, field_of
from server_example.sampling import Sampler, log_probabilities
from server_example.settings import SHAKESPEARE
from server_example.text import TextStream, TokenTexts, encode


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHAKESPEARE / "tokenizer.json"))


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30, 2.0])
def test_any_temperature_gives_a_token(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1, top_p=0.9))
    drawn = [sampler(torch.tensor([-80.0, 3.0, 60.0])) for _ in range(20)]
    assert set(drawn) == {2}


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))

    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler(row) for row in logits]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_sampling_follows_temperature_and_top_p() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def frequencies(**params: float) -> list[float]:
        sampler = Sampler(SamplingParams(seed=7, **params))
        counts = Counter(sampler(probabilities.log()) for _ in range(4000))
        return [counts[token] / 4000 for token in range(4)]

    assert frequencies(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    # 0.5 does not reach 0.6; 0.5 + 0.3 does.
    assert frequencies(temperature=1.0, top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    squared = probabilities.square() / probabilities.square().sum()
    assert frequencies(temperature=0.5) == pytest.approx(squared.tolist(), abs=0.03)
    assert frequencies(temperature=1.0, top_p=0.1) == [1, 0, 0, 0]


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log() + 4
    got = log_probabilities(logits, 2, 2)
    assert [token for token, _ in got] == [2, 0, 1]
    assert [math.exp(value) for _, value in got] == pytest.approx([0.2, 0.5, 0.3])
    never = torch.tensor([0.0, -math.inf])
    assert log_probabilities(never, 1, 0) == [(1, -9999.0)]


def streamed(tokenizer: Tokenizer, tokens: list[int], *stop: str) -> tuple[list[str], bool]:
    text = TextStream(TokenTexts(tokenizer), stop)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()], text.stopped


@pytest.mark.parametrize("text", ["The server reads.", "a ünïcödé 😀 mix 漢字 end", "", "😀"])
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert not stopped
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_broken_character_leaves_the_next_one_whole(tokenizer: Tokenizer) -> None:
    cut, whole = tokenizer.encode("中").ids[:-1], tokenizer.encode("😀").ids
    pieces, _ = streamed(tokenizer, cut + whole)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}😀"


def test_an_added_token_that_is_not_special_has_a_text() -> None:
    tokenizer = Tokenizer.from_file(str(SHAKESPEARE / "tokenizer.json"))
    tokenizer.add_tokens(["<think>"])
    number = tokenizer.token_to_id("<think>")
    assert TokenTexts(tokenizer).written(number) == b"<think>"
    assert TokenTexts(tokenizer).written(0) == b"" != TokenTexts(tokenizer)[0]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 300) | st.integers(0, 1030), max_size=20))
def test_any_tokens_give_the_text_that_the_tokenizer_gives(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Most of the first 300 are single bytes, and 0 is special. Numbers from 1024 on have no token."""
    text = TextStream(TokenTexts(tokenizer), ())
    joined = "".join([*map(text.push, tokens), text.finish()])
    assert joined == tokenizer.decode(tokens)
    assert text.length == len(joined)


def test_log_probabilities_name_every_token(tokenizer: Tokenizer) -> None:
    """Parts of a character have the offset of the character; a special token moves no offset."""
    texts = TokenTexts(tokenizer)
    parts = tokenizer.encode("😀").ids
    assert len(parts) > 1
    tokens = [*tokenizer.encode("a").ids, 0, *parts, *tokenizer.encode("b").ids]
    stream, events = TextStream(texts, ()), []
    others = tuple((texts[token], -2.0) for token in parts)
    for number, token in enumerate(tokens, 1):
        entry = TokenLogprob(texts[token], -1.0, others, stream.length)
        events.append(TokenEvent(stream.push(token), number, logprob=entry))
    logprobs = CompletionForm("m").logprobs(0, events)
    assert logprobs is not None and logprobs.top_logprobs is not None
    names = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in texts[part]) for part in parts]
    assert logprobs.tokens == ["a", "<|endoftext|>", *names, "b"]
    assert logprobs.text_offset == [0, 1, *[1] * len(parts), 2]
    assert list(logprobs.top_logprobs[0]) == [*names, "a"], "no two of them collapse"
    chat = ChatForm("m").logprobs(0, events)
    assert chat is not None
    assert b"".join(bytes(entry.bytes) for entry in chat.content) == "a<|endoftext|>😀b".encode()
    assert [top.token for top in chat.content[0].top_logprobs] == names
    assert names[0].startswith(r"bytes:\xf0")


def test_a_stream_may_end_within_a_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x😀").ids[:-1]
    pieces, _ = streamed(tokenizer, tokens)
    assert "".join(pieces) == "x\N{REPLACEMENT CHARACTER}"


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab .", max_size=40), st.lists(st.text("ab .", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text).ids, *stops)
    joined = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(found)
    if not found:
        assert joined == text
        return
    # A token may complete several stop strings. No stop string may be shown, nor any text after it.
    assert text.startswith(joined)
    assert not any(stop in joined for stop in stops)
    assert len(joined) >= min(found) - max(map(len, stops))


def test_of_two_stop_strings_in_a_token_the_first_in_the_text_counts(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" the").ids) == 1
    for stops in (("e", "h"), ("h", "e")):
        pieces, stopped = streamed(tokenizer, tokenizer.encode(" the").ids, *stops)
        assert stopped and "".join(pieces) == " t"


def test_the_beginning_of_a_character_behind_a_stop_string_is_not_sent() -> None:
    texts = SimpleNamespace(written=lambda token: b"end\xf0")
    stream = TextStream(cast(TokenTexts, texts), ("nd",))
    assert stream.push(0) + stream.finish() == "e"


def test_stop_string_across_tokens_is_never_sent(tokenizer: Tokenizer) -> None:
    pieces, stopped = streamed(tokenizer, tokenizer.encode("The server reads a page.").ids, "er rea")
    assert stopped
    assert "".join(pieces) == "The serv"


def test_log_probabilities_without_alternatives_have_no_list_of_them() -> None:
    event = TokenEvent("a", 1, logprob=TokenLogprob(b"a", -1.0, (), 0))
    logprobs = CompletionForm("m").logprobs(0, [event])
    assert logprobs is not None and logprobs.top_logprobs is None


def test_tokens_that_begin_each_text_are_left_out_on_request(tokenizer: Tokenizer) -> None:
    """A chat asks for this, since its template writes them."""
    begins = Tokenizer.from_str(tokenizer.to_str())
    begins.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokens = encode(tokenizer, "The page")
    assert encode(begins, "The page") == [0, *tokens]
    assert encode(begins, "The page", special=False) == tokens


def test_the_models_tokenizer_ends_with_token_0(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.token_to_id("<|endoftext|>") == 0


async def submitted(body: CompletionRequest) -> tuple[Generation, list[Emit]]:
    """The choices of `body`, and what an engine would call with the events of each."""
    emits: list[Emit] = []

    async def submit(jobs: Sequence[Job], given: Sequence[Emit]) -> None:
        emits.extend(given)

    served = SimpleNamespace(max_context=99)
    engine = SimpleNamespace(job_number=lambda: 1, submit=submit, cancel=lambda numbers: None, served=served)
    generation = Generation(cast(EngineClient, engine), body, [[1]], Deadline(None, 504))
    await generation.submit()
    return generation, emits


def test_events_that_wait_for_a_slow_client_become_one_chunk() -> None:
    async def chunks() -> list[str]:
        body = CompletionRequest(prompt="a", n=2, stream=True)
        generation, emits = await submitted(body)
        first, second = emits
        for emit, text in ((first, "a\u2028"), (second, "x"), (first, "b\x85"), (first, "c")):
            emit(TokenEvent(text, 1))
        first(TokenEvent("d", 4, "stop"))
        second(TokenEvent("y", 2, "length"))
        await asyncio.sleep(0.01)
        return [event["data"] async for event in generation.stream(CompletionForm("m"))]

    *parts, done = asyncio.run(chunks())
    assert done == "[DONE]"
    assert all(len(part.splitlines()) == 1 for part in parts), "clients split an event there"
    told = [json.loads(part)["choices"][0] for part in parts]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in told] == [
        (0, "a\u2028b\x85cd", "stop"),
        (1, "xy", "length"),
    ]


def test_a_token_whose_text_is_held_back_has_its_log_probability_in_the_stream() -> None:
    async def first() -> str:
        body = CompletionRequest(prompt="a", logprobs=0, stream=True)
        generation, emits = await submitted(body)
        chunks = generation.stream(CompletionForm("m"))
        emits[0](TokenEvent("", 1, logprob=TokenLogprob(b"e", -0.5, (), 0)))
        chunk = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.01)
        emits[0](TokenEvent("en", 2, "length", logprob=TokenLogprob(b"n", -0.5, (), 1)))
        return (await chunk)["data"]

    (told,) = json.loads(asyncio.run(first()))["choices"]
    assert (told["text"], told["logprobs"]["tokens"], told["finish_reason"]) == ("", ["e"], None)


@pytest.mark.parametrize("form", [CompletionForm, ChatForm])
@pytest.mark.parametrize("tops", [None, 0, 2])
def test_a_whole_answer_in_pieces_is_that_of_all_events(form: type[Form], tops: int | None) -> None:
    def entry(text: str) -> TokenLogprob | None:
        top = ((text.encode(), -1e-7), (b"\xf0\x9f", -9999.0))[: tops or 0]
        return None if tops is None else TokenLogprob(text.encode(), -1e-7, top, offset=3)

    events = [TokenEvent("", 1, logprob=entry(text)) for text in ('"a', "\u00e9\\", "b\n")]
    events.append(TokenEvent('"a\u00e9\\b\n', 4, "stop"))
    usage = Usage(prompt_tokens=1, completion_tokens=4, total_tokens=5)
    whole, in_pieces = form("m"), form("m")
    in_pieces.id, in_pieces.created = whole.id, whole.created
    expected = whole.WHOLE(
        id=whole.id, created=whole.created, model="m", usage=usage,
        choices=[whole.choice(0, events, "stop"), whole.choice(1, [], "length")],
    )  # fmt: skip
    choices = [WholeChoice(in_pieces, 0), WholeChoice(in_pieces, 1)]
    choices[0].add(events[:2], None)
    choices[0].add(events[2:], "stop")
    choices[1].add([], "length")
    assert b"".join(in_pieces.answer(choices, usage)).decode() == expected.model_dump_json()


@pytest.mark.parametrize("ends", ["at once", "later", None])
def test_a_deadline_ends_what_a_silent_engine_does_not_end(ends: str | None) -> None:
    """But a whole answer waits for a slow client."""

    async def last() -> str:
        emits: list[Emit] = []

        async def submit(jobs: Sequence[Job], given: Sequence[Emit]) -> None:
            emits.extend(given)
            given[0](TokenEvent("a", 1, "stop" if ends == "at once" else None))

        engine = SimpleNamespace(
            job_number=lambda: 1, submit=submit, cancel=lambda numbers: None, seconds=0.05,
            served=SimpleNamespace(max_context=99),
        )  # fmt: skip
        body = CompletionRequest(prompt="a", stream=True)
        deadline = Deadline(time.monotonic() + 0.05, 504)
        generation = Generation(cast(EngineClient, engine), body, [[1]], deadline)
        await generation.submit()
        if ends == "later":
            emits[0](TokenEvent("b", 2, "stop"))
        await asyncio.sleep(0.3)
        *_, told, _ = [event["data"] async for event in generation.stream(CompletionForm("m"))]
        return told

    told = json.loads(asyncio.run(last()))
    if ends:
        assert told["choices"][0]["finish_reason"] == "stop"
    else:
        assert told["error"]["message"] == "the engine has not answered in time"


def test_a_prompt_longer_than_the_context_does_not_travel_to_the_engine() -> None:
    """The fake engine has no `submit`."""
    engine = SimpleNamespace(job_number=lambda: 1, served=SimpleNamespace(max_context=99))
    body = CompletionRequest(prompt="a")
    generation = Generation(cast(EngineClient, engine), body, [[1] * 99], Deadline(None, 504))
    with pytest.raises(RequestTooLongError, match="the prompt has 99 tokens"):
        asyncio.run(generation.submit())


def test_without_a_seed_each_request_draws_on_its_own() -> None:
    first, second = (Sampler(SamplingParams(temperature=1.0)) for _ in range(2))
    logits = torch.zeros(64)
    assert [first(logits) for _ in range(20)] != [second(logits) for _ in range(20)]


def test_a_set_that_reaches_top_p_gets_no_further_token() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.5, seed=1))
    assert {sampler(torch.zeros(4)) for _ in range(100)} == {0, 1}


TEXT: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def refused_field(body: dict[str, Any]) -> str | None:
    """The field that an error names, or None if the body is accepted."""
    kind = ChatRequest if "messages" in body else CompletionRequest
    try:
        kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        return field_of({**first, "loc": ("body", *first["loc"])})
    return None


def test_what_a_body_leaves_out_has_openais_default() -> None:
    body = CompletionRequest.model_validate(TEXT)
    assert (body.max_tokens, body.temperature, body.top_p, body.n) == (16, 1.0, 1.0, 1)
    assert (body.stream, body.ignore_eos, body.stop_strings) == (False, False, ())
    assert body.seed is body.logprobs is body.timeout is None


@pytest.mark.parametrize(
    ("body", "field", "accepted", "refused"),
    [
        (TEXT, "n", (1, 16), (0, 17)),
        (TEXT, "temperature", (0, 2), (2.1,)),
        (TEXT, "top_p", (0.1, 1), (1.1,)),
        (TEXT, "timeout", (0.1, 86400), (0, 86401)),
        (TEXT, "stop", ("a" * 256, ["a"] * 4), ("a" * 257, ["a"] * 5, ["a" * 257])),
        (TEXT, "suffix", ("",), ("b",)),
        (CHAT, "top_logprobs", (0,), (1, 21)),
        (CHAT | {"logprobs": True}, "top_logprobs", (0, 20), (21,)),
        (CHAT, "tools", ([],), ([{"type": "function"}],)),
        (CHAT, "tool_choice", ("none", "auto"), ("required",)),
        (CHAT, "functions", ([],), ([{"name": "f"}],)),
        (CHAT, "parallel_tool_calls", (True,), (False,)),
        (CHAT, "modalities", (["text"],), (["audio"],)),
        (CHAT, "response_format", ({"type": "text"},), ({"type": "json_object"},)),
        (CHAT, "service_tier", ("auto",), ("flex",)),
        (CHAT, "store", (False,), (True,)),
        (CHAT, "metadata", ({},), ({"a": "b"},)),
        (CHAT | {"max_tokens": 1}, "max_tokens", (2,), ()),
        (CHAT | {"max_completion_tokens": 1}, "max_tokens", (None,), (1,)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_is_accepted_only_if_the_server_acts_on_it(
    body: dict[str, Any], field: str, accepted: Sequence[Any], refused: Sequence[Any]
) -> None:
    for value in accepted:
        assert refused_field(body | {field: value}) is None, value
    for value in refused:
        assert refused_field(body | {field: value}) == field, value


def test_a_message_reaches_the_template_whole() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "developer", "content": parts, "name": "me"})
    assert message.for_template() == {"role": "developer", "content": "ab", "name": "me"}
    plain = Message.model_validate({"role": "assistant", "content": "a"})
    assert plain.for_template() == {"role": "assistant", "content": "a"}
