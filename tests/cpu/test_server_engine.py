"""Requests that lose their pages midway, and tokens that are told late, give the same answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from server_example.backend import choose_backend
from server_example.engine import Engine, EngineOptions
from server_example.sampling import SamplingParams
from server_example.scheduler import Request, TokenEvent
from tests.demo_model import STEADY_PROMPTS, demo_folder

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
    found, few = [], 5
    for cache_pages in (64, few):
        engine = Engine(
            demo_folder, choose_backend("cpu"), EngineOptions(cache_pages=cache_pages, max_context=256)
        )
        engine._tells_late = late
        prompts = [prompt + FILLER for prompt in STEADY_PROMPTS]
        found.append([shown(events) for events in answers(engine, prompts, LONG)])
        preempted = engine.metrics.registry.get_sample_value("server_preemptions_total")
        assert (preempted or 0) > 0 if cache_pages == few else preempted == 0
    assert found[0] == found[1]


def test_tokens_that_are_told_late_are_the_same(demo_folder: Path) -> None:
    """A stop string is found only after the next step has begun; the token of that step is not told."""
    found = []
    for late in (False, True):
        engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=2))
        engine._tells_late = late
        text = "".join(event.text for event in answers(engine, STEADY_PROMPTS[:1], LONG[:1])[0])
        stops = [(text[10:14],), (text[20:22],), ()]
        params = [SamplingParams(max_tokens=20, stop=stop, ignore_eos=True) for stop in stops]
        engine = Engine(demo_folder, choose_backend("cpu"), EngineOptions(max_batch=2))
        engine._tells_late = late
        told = answers(engine, STEADY_PROMPTS[:1] * 3, params)
        assert [events[-1].finish_reason for events in told] == ["stop", "stop", "length"]
        found.append([shown(events) for events in told])
    assert found[0] == found[1]
