"""Requests that lose their pages midway, and tokens that are read late, give the same answers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from server_example.backend import choose_backend
from server_example.cache import LayerCache
from server_example.engine import Engine
from server_example.messages import SamplingParams, TokenEvent
from server_example.metrics import Metrics
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.transformer import Transformer
from server_example.options import EngineOptions
from server_example.pages import PAGE_TOKENS
from server_example.sampling import likeliest
from server_example.scheduler import Request, Scheduler
from tests.demo_model import PROMPTS, demo_folder

__all__ = ["demo_folder"]

#: With it and 48 tokens, each prompt comes to need a second page.
FILLER = " the rows of every expert follow one another without any gap between them, and so"
LONG = [
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, seed=7, logprobs=2),
    SamplingParams(max_tokens=48, ignore_eos=True),
]


def answers(
    engine: Engine, prompts: Sequence[str], params: Sequence[SamplingParams]
) -> list[list[TokenEvent]]:
    """The events of requests that are submitted together; afterwards the engine is stopped, and empty."""
    events: list[list[TokenEvent]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def emit(index: int, event: TokenEvent) -> None:
        assert not ended[index].is_set(), "an event after the end"
        events[index].append(event)
        if event.finish_reason is not None:
            ended[index].set()

    engine.start()
    engine.submit(
        *(
            Request(engine.tokenizer.encode(prompt).ids, own, lambda event, index=index: emit(index, event))  # type: ignore[misc]
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        )
    )
    assert all(event.wait(120) for event in ended)
    engine.stop()
    assert not engine._open and engine.scheduler.pool.free == engine.scheduler.pool.capacity
    return events


def shown(events: Sequence[TokenEvent]) -> list[tuple[object, ...]]:
    """What a client sees. Log-probabilities move with the tokens that are prefilled together, so not them."""
    assert len({event.logprob is None for event in events}) == 1
    return [(event.text, event.completion_tokens, event.finish_reason) for event in events]


@pytest.mark.parametrize("late", [False, True])
def test_a_preempted_request_goes_on_where_it_was(demo_folder: Path, late: bool) -> None:
    found, counted, few = [], set(), 5
    for cache_pages in (64, few):
        engine = Engine(
            demo_folder, choose_backend("cpu"), EngineOptions(cache_pages=cache_pages, max_context=256)
        )
        engine._ahead = int(late)
        prompts = [prompt + FILLER for prompt in PROMPTS]
        found.append([shown(events) for events in answers(engine, prompts, LONG)])
        sample = engine.metrics.registry.get_sample_value
        counted.add(sample("server_prompt_tokens_total"))
        preempted = sample("server_preemptions_total")
        assert (preempted or 0) > 0 if cache_pages == few else preempted == 0
    assert found[0] == found[1] and len(counted) == 1


@pytest.mark.parametrize(("temperature", "logprobs"), [(0.0, None), (0.0, 1), (1.0, None)])
@pytest.mark.parametrize("tokens", [0, 2])
def test_logits_that_are_not_numbers_end_one_request(
    demo_folder: Path, tokens: int, temperature: float, logprobs: int | None
) -> None:
    """It has got `tokens` tokens before. The other request of the batch goes on."""
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
    engine._ahead = 1
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, logprobs=logprobs)
    logits, steps = engine.model._logits, itertools.count()

    def broken(x: torch.Tensor) -> torch.Tensor:
        found = logits(x)
        if next(steps) == tokens:
            found[0, 5] = float("nan")
        return found

    engine.model._logits = broken  # type: ignore[method-assign]
    failed, other = answers(engine, PROMPTS[:2], [params] * 2)
    assert [event.finish_reason for event in failed] == [None] * tokens + ["error"]
    assert failed[-1].completion_tokens == tokens and "not finite" in str(failed[-1].error)
    assert other[-1].finish_reason == "length" and engine.failure is None
    assert engine.metrics.values()["server_generated_tokens_total"] == tokens + 6


def test_the_likeliest_token_has_a_probability() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, 2.0, 1.0], [0.0, -inf, -1.0], [nan, 2.0, 1.0], [0.0, inf, 1.0], [-inf] * 3]
    assert likeliest(torch.tensor(rows)).tolist() == [1, 0, -1, -1, -1]


def test_metrics_count_every_token_of_a_step(demo_folder: Path) -> None:
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
    answers(engine, PROMPTS, [SamplingParams(max_tokens=8, ignore_eos=True)] * len(PROMPTS))
    value = engine.metrics.values()
    of = len(PROMPTS)
    assert value["server_generated_tokens_total"] == 8 * of
    assert value["server_time_to_first_token_seconds_count"] == of
    for sample in ("count", "bucket/+Inf"):
        assert value[f"server_inter_token_seconds_{sample}"] == 7 * of
    assert value["server_inter_token_seconds_sum"] > 0
    assert b'server_inter_token_seconds_bucket{le="0.001"}' in engine.metrics.render()


def test_each_token_is_timed_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now = Metrics({}), 100.0
    monkeypatch.setattr("server_example.metrics.time", SimpleNamespace(monotonic=lambda: now))
    requests = [Request([1], SamplingParams(), print, created=now) for _ in range(3)]
    for passed, some in ((0.75, requests), (0.25, requests[:2]), (4.0, requests)):
        now += passed
        metrics.tokens(some)
    values = metrics.values()
    assert values["server_time_to_first_token_seconds_sum"] == 3 * 0.75
    name = "server_inter_token_seconds"
    assert values[f"{name}_sum"] == 2 * 0.25 + 2 * 4.0 + 4.25
    below = [values[f"{name}_bucket/{bound}"] for bound in ("0.2", "0.5", "1.0", "5.0", "20.0", "+Inf")]
    assert below == [0, 2, 2, 5, 5, 5]


def test_tokens_that_are_told_late_are_the_same(demo_folder: Path) -> None:
    """A stop string is found only after the next step has begun; the token of that step is not told."""
    found = []
    for late in (False, True):
        engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=2))
        engine._ahead = int(late)
        text = "".join(event.text for event in answers(engine, PROMPTS[:1], LONG[:1])[0])
        stops = [(text[10:14],), (text[20:22],), ()]
        params = [SamplingParams(max_tokens=20, stop=stop, ignore_eos=True) for stop in stops]
        engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=2))
        engine._ahead = int(late)
        told = answers(engine, PROMPTS[:1] * 3, params)
        assert [events[-1].finish_reason for events in told] == ["stop", "stop", "length"]
        found.append([shown(events) for events in told])
    assert found[0] == found[1]


def test_no_token_waits_for_the_end_of_a_long_prefill(demo_folder: Path) -> None:
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=2, prefill_chunk=64))
    engine._ahead = 1
    prefill, runs = engine.model.prefill, 0
    at_end: list[int] = []
    ended = threading.Event()

    def counted(batch: PrefillBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return prefill(batch, caches)

    def emit_long(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            ended.set()

    def emit(event: TokenEvent) -> None:
        if event.completion_tokens == 3:  # The fourth token, its last, is on its way.
            engine.submit(Request([7] * 200, SamplingParams(max_tokens=1, ignore_eos=True), emit_long))
        if event.finish_reason is not None:
            at_end.append(runs)

    engine.model.prefill = counted  # type: ignore[method-assign]
    engine.start()
    engine.submit(Request([5, 6], SamplingParams(max_tokens=4, ignore_eos=True), emit))
    assert ended.wait(60), engine.failure
    engine.stop()
    assert (at_end, runs) == ([2], 5), "told after the first of four chunks"


def following(history: Sequence[int], vocab: int) -> int:
    """What `Echo` gives after these tokens, which depends on all of them; now and then the end, 0."""
    drawn = sum((at + 1) * (token + 1) for at, token in enumerate(history)) * 2654435761 % 2**32
    return drawn % vocab if drawn % 89 else 0


class Echo:
    """In place of a model: its cache holds the tokens themselves, so a wrong page, seat or order shows."""

    def __init__(self, engine: Engine) -> None:
        self.vocab = engine.config.vocab_size
        self.cache = torch.full((engine.options.cache_pages * PAGE_TOKENS,), -1)

    def logits(self, slots: torch.Tensor) -> torch.Tensor:
        history = self.cache[slots].tolist()
        assert -1 not in history
        likeliest = following(history, self.vocab)
        logits = torch.full((self.vocab,), -50.0)
        logits[[likeliest, likeliest - 1]] = torch.tensor([0.1, 0.0])
        return logits

    def prefill(self, batch: PrefillBatch, caches: object) -> torch.Tensor:
        self.cache[batch.slots] = batch.tokens
        ends = zip(batch.key_start[batch.last], batch.key_end[batch.last], strict=True)
        return torch.stack([self.logits(batch.context_slots[start:end]) for start, end in ends])

    def decode(self, inputs: Mapping[str, torch.Tensor], caches: object) -> dict[str, torch.Tensor]:
        batch = DecodeBatch.of(inputs)
        rows = []
        for row, length in enumerate(batch.context_lens.tolist()):
            if not length:
                rows.append(torch.zeros(self.vocab))
                continue
            slots = batch.to_slots(torch.arange(length).expand(len(batch.tokens), -1))[row]
            self.cache[slots[-1]] = batch.tokens[row]
            rows.append(self.logits(slots))
        logits = torch.stack(rows)
        return {"logits": logits, "tokens": logits.argmax(-1)}


def test_a_seed_repeats_the_draws_whatever_else_runs(demo_folder: Path) -> None:
    """The model gives the same logits in every batch, so the same draws give the same tokens."""

    def texts(*together: int) -> list[str]:
        engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
        engine.model = cast(Transformer, Echo(engine))
        params = [
            SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True) for seed in together
        ]
        told = answers(engine, PROMPTS[:1] * len(together), params)
        return ["".join(event.text for event in events) for events in told]

    seeds = range(8)
    assert texts(*seeds) == [texts(seed)[0] for seed in seeds]
    assert len(set(texts(*seeds))) == len(seeds)


def test_log_probabilities_without_other_tokens(demo_folder: Path) -> None:
    """Zero alternatives still ask for the log-probability of each token itself."""
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
    engine.model = cast(Transformer, Echo(engine))
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)
    (events,) = answers(engine, PROMPTS[:1], [params])
    assert [event.logprob is not None and event.logprob.top for event in events] == [()] * 3


def chosen(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> list[TokenEvent]:
    """The events of a request whose likeliest tokens are these, one after another."""
    engine.model = cast(Transformer, Echo(engine))
    coming = iter(tokens)

    def logits(slots: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(coming)), engine.config.vocab_size).float()

    engine.model.logits = logits  # type: ignore[attr-defined]
    (events,) = answers(engine, ["a prompt"], [params])
    return events


def test_what_a_stop_string_held_back_is_told_at_the_end_of_text(demo_folder: Path) -> None:
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
    a, b = (engine.tokenizer.get_vocab()[character] for character in "ab")
    end = engine.config.eos_token_id
    assert end is not None
    events = chosen(engine, [a, b, end], SamplingParams(max_tokens=9, stop=("abc",)))
    assert shown(events) == [("", 1, None), ("", 2, None), ("ab", 3, "stop")]


def test_an_offset_counts_the_text_before_its_token(demo_folder: Path) -> None:
    engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_context=256))
    a, b = (engine.tokenizer.get_vocab()[character] for character in "ab")
    params = SamplingParams(max_tokens=4, stop=("bb",), logprobs=1)
    events = chosen(engine, [a, b, a, b], params)
    assert "".join(event.text for event in events) == "abab"
    entries = [event.logprob for event in events]
    assert [(entry.token, entry.offset) for entry in entries if entry] == [
        (b"a", 0), (b"b", 1), (b"a", 2), (b"b", 3),
    ]  # fmt: skip
    assert all(entry and entry.top == ((entry.token, entry.logprob),) for entry in entries)


def test_a_prompt_of_several_chunks_is_counted_once(demo_folder: Path) -> None:
    options = EngineOptions(max_context=256, prefill_chunk=3)
    engine = Engine(demo_folder, choose_backend("cpu"), options)
    engine.model = cast(Transformer, Echo(engine))
    answers(engine, PROMPTS, [SamplingParams(max_tokens=2)] * len(PROMPTS))
    tokens = sum(len(engine.tokenizer.encode(prompt).ids) for prompt in PROMPTS)
    assert tokens > len(PROMPTS) * options.prefill_chunk
    assert engine.metrics.values()["server_prompt_tokens_total"] == tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", [0, 1])
def test_any_mixture_of_requests_gets_its_own_tokens(demo_folder: Path, ahead: int, seed: int) -> None:
    """More requests than seats, too few pages, ends by number and by token, samples, and some that leave."""
    draw = random.Random(seed)
    options = EngineOptions(max_batch=4, cache_pages=6, max_context=300, prefill_chunk=64, max_waiting=64)
    engine = Engine(demo_folder, choose_backend("cpu"), options)
    engine._ahead = ahead
    engine.model = cast(Transformer, Echo(engine))
    vocab, eos = engine.config.vocab_size, engine.config.eos_token_id
    ended = threading.Semaphore(0)
    requests, reasons = [], {}
    for number in range(30):
        prompt = [draw.randrange(1, vocab) for _ in range(draw.choice((1, 7, 64, 65, 150)))]
        params = SamplingParams(
            max_tokens=draw.choice((1, 2, 90, 140)),
            temperature=float(draw.random() < seed / 20),
            ignore_eos=draw.random() < 0.5,
        )

        def emit(event: TokenEvent, number: int = number) -> None:
            if event.finish_reason is None and number % 7 == 3 and event.completion_tokens == 5:
                engine.cancel(requests[number])
            if event.finish_reason is not None:
                reasons[number] = event.finish_reason
                ended.release()

        requests.append(Request(prompt, params, emit))
    preempted = []

    def grow() -> list[Request]:
        gone = Scheduler.grow(engine.scheduler)
        assert not any(request.flying for request in gone), "a token of it will come too late"
        preempted.extend(gone)
        return gone

    engine.scheduler.grow = grow  # type: ignore[method-assign]
    engine.start()
    engine.submit(*requests)
    for _ in requests:
        assert ended.acquire(timeout=60), engine.failure
    engine.stop()
    assert engine.failure is None
    for number, request in enumerate(requests):
        history = list(request.prompt)
        for token in request.generated:
            wanted = following(history, vocab)
            assert token == wanted or (request.params.temperature and token == (wanted - 1) % vocab)
            history.append(token)
        at_end = eos in request.generated[-1:] and not request.params.ignore_eos
        expected = "stop" if at_end else "length"
        if reasons[number] == "length":
            assert len(request.generated) == request.params.max_tokens
        assert reasons[number] in (expected, "cancelled")
        assert eos not in request.generated[:-1] or request.params.ignore_eos
        assert request.flying == 0 or reasons[number] == "cancelled"
    assert set(reasons.values()) == {"length", "stop", "cancelled"}
    assert preempted
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
    assert sorted(engine.scheduler._seats) == list(range(options.max_batch))
