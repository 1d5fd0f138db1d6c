"""Requests that lose their pages midway give the same answer as alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from server_example.backend import choose_backend
from server_example.engine import Engine, EngineOptions
from server_example.sampling import SamplingParams
from server_example.scheduler import Request, TokenEvent
from tests.demo_model import STEADY_PROMPTS, demo_folder

__all__ = ["demo_folder"]

#: With these prompts and so many tokens, each request comes to need a second page.
FILLER = " the rows of every expert follow one another without any gap between them, and so"
PARAMS = [
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, seed=7, logprobs=2),
    SamplingParams(max_tokens=48, ignore_eos=True),
]


def _answers(engine: Engine) -> list[list[TokenEvent]]:
    """The events of all requests, which are submitted together."""
    events: list[list[TokenEvent]] = [[] for _ in PARAMS]
    ended = [threading.Event() for _ in PARAMS]

    def emit(index: int, event: TokenEvent) -> None:
        events[index].append(event)
        if event.finish_reason is not None:
            ended[index].set()

    prompts = [engine.tokenizer.encode(prompt + FILLER).ids for prompt in STEADY_PROMPTS]
    engine.submit(
        *(
            Request(prompt, params, lambda event, index=index: emit(index, event))  # type: ignore[misc]
            for index, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
        )
    )
    assert all(event.wait(120) for event in ended)
    return events


def _shown(events: Sequence[TokenEvent]) -> list[tuple[object, ...]]:
    """What a client sees. Log-probabilities move with the tokens that are prefilled together, so not them."""
    assert len({event.logprob is None for event in events}) == 1
    return [(event.text, event.completion_tokens, event.finish_reason) for event in events]


def test_the_answers_do_not_change(demo_folder: Path) -> None:
    found, few = [], 5
    for cache_pages in (64, few):
        engine = Engine(
            demo_folder, choose_backend("cpu"), EngineOptions(cache_pages=cache_pages, max_context=256)
        )
        engine.start()
        found.append([_shown(events) for events in _answers(engine)])
        engine.stop()
        assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
        preempted = engine.metrics.registry.get_sample_value("server_preemptions_total")
        assert (preempted or 0) > 0 if cache_pages == few else preempted == 0
    assert found[0] == found[1]
