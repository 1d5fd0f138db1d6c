"""The scheduler and its pages."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_example.cache import BlockTable
from server_example.messages import QueueFullError, RequestTooLongError, SamplingParams
from server_example.pages import DUMMY_PAGE, PAGE_TOKENS, PagePool, pages_for
from server_example.scheduler import Request, Scheduler


def request(prompt: int, max_tokens: int) -> Request:
    return Request([1] * prompt, SamplingParams(max_tokens=max_tokens), emit=lambda event: None)


def test_pool_hands_out_each_page_once_and_never_the_dummy() -> None:
    pool = PagePool(5)
    assert pool.take(5) is None
    assert pool.free == 4
    pages = pool.take(4)
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4]
    assert DUMMY_PAGE not in pages
    pool.give_back(pages[:2])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.give_back(pages[:1])


def test_the_use_of_a_pool_counts_the_pages_of_requests_alone() -> None:
    pool = PagePool(5)
    shares = [pool.use()]
    for count in (1, 3):
        pool.take(count)
        shares.append(pool.use())
    assert shares == [0.0, 0.25, 1.0]


def test_a_block_table_follows_the_pages_of_each_seat() -> None:
    """Pages may grow in place. A seat's next request has another list, as has one after a preemption."""
    table, first, second = BlockTable(3, 4), [5], [6, 7]
    assert table.rows([2, 0], [first, second]).tolist() == [[5, 0, 0, 0], [6, 7, 0, 0]]
    first += [8, 9]
    assert table.rows([0, 2], [second, first]).tolist() == [[6, 7, 0, 0], [5, 8, 9, 0]]
    assert table.rows([0, 2], [[3, 4], [1]]).tolist() == [[3, 4, 0, 0], [1, 0, 0, 0]]


def test_admission_is_in_order_and_needs_the_pages_of_the_prompt() -> None:
    scheduler = Scheduler(PagePool(5), max_batch=3, max_waiting=3, max_context=4 * PAGE_TOKENS)
    big, small = request(2 * PAGE_TOKENS, PAGE_TOKENS), request(1, 1)
    scheduler.submit(request(PAGE_TOKENS, PAGE_TOKENS))
    scheduler.submit(big)
    scheduler.submit(small)
    with pytest.raises(QueueFullError):
        scheduler.submit(request(1, 1))
    scheduler.admit()
    # The small request would fit, but it must not overtake.
    assert [len(running.pages) for running in scheduler.running] == [2]
    scheduler.release(scheduler.running[0])
    scheduler.admit()
    assert scheduler.running == [big, small]
    assert scheduler.pool.free == 0


def test_the_choices_of_a_request_are_queued_together() -> None:
    scheduler = Scheduler(PagePool(5), max_batch=3, max_waiting=3, max_context=4 * PAGE_TOKENS)
    scheduler.submit(request(1, 1), request(1, 1))
    with pytest.raises(QueueFullError):
        scheduler.submit(request(1, 1), request(1, 1))
    assert len(scheduler.waiting) == 2
    with pytest.raises(RequestTooLongError) as error:
        scheduler.submit(*[request(1, 1)] * 4)
    assert error.value.part == "n"


def test_a_late_request_gives_its_pages_back() -> None:
    scheduler = Scheduler(PagePool(5), max_batch=3, max_waiting=3, max_context=4 * PAGE_TOKENS)
    late, early = request(1, 1), request(1, 1)
    late.deadline, early.deadline = time.monotonic() - 1, time.monotonic() + 100
    scheduler.submit(late, early)
    scheduler.admit()
    assert scheduler.drop_ended() == [(late, "timeout")]
    assert scheduler.running == [early]
    assert scheduler.pool.free == 3


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(PagePool(3), max_batch=3, max_waiting=3, max_context=1000)
    scheduler.submit(request(100, 28))
    with pytest.raises(RequestTooLongError, match="128 tokens") as error:
        scheduler.submit(request(100, 29))
    assert error.value.part == "max_tokens"
    with pytest.raises(RequestTooLongError, match="128 tokens") as error:
        scheduler.submit(request(128, 1))
    assert error.value.part == "prompt"


CHUNK = 100


def step(scheduler: Scheduler) -> None:
    """What the engine does in a step, with a token for each request that decodes."""
    scheduler.grow()
    scheduler.admit()
    prefill, decoding = scheduler.next_prefill(CHUNK), scheduler.decoding()
    assert bool(prefill) == any(running.prefilling for running in scheduler.running)
    assert sum(tokens for _, tokens in prefill) <= CHUNK
    assert sum(running.context + tokens for running, tokens in prefill) <= scheduler.max_context
    for running, tokens in prefill:
        assert tokens > 0
        running.context += tokens
        if not running.prefilling and not running.generated:
            running.generated.append(0)
    for running in decoding:
        assert running.context == len(running.before_decode)
        running.context += 1
        running.generated.append(0)
    for running in list(scheduler.running):
        if len(running.generated) >= running.params.max_tokens:
            scheduler.release(running)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 99)), min_size=1, max_size=8), st.integers(8, 12)
)
def test_every_request_ends_with_few_pages(sizes: list[tuple[int, int]], pages: int) -> None:
    scheduler = Scheduler(PagePool(pages), max_batch=4, max_waiting=8, max_context=400)
    scheduler.submit(*(request(*size) for size in sizes))
    everyone = list(scheduler.waiting)
    # A preempted request begins anew, at most once for each page of each older request.
    for _ in range(100 * len(sizes) * (1 + len(sizes))):
        oldest = min((*scheduler.running, *scheduler.waiting), key=lambda request: request.number)
        step(scheduler)
        if not scheduler.running and not scheduler.waiting:
            break
        assert oldest in scheduler.running or len(oldest.generated) == oldest.params.max_tokens
    assert [len(done.generated) for done in everyone] == [max_tokens for _, max_tokens in sizes]
    assert scheduler.pool.free == scheduler.pool.capacity


def test_the_youngest_gives_its_pages_to_the_oldest() -> None:
    scheduler = Scheduler(PagePool(4), max_batch=3, max_waiting=3, max_context=3 * PAGE_TOKENS)
    old, young, last = (request(PAGE_TOKENS - 8, 100) for _ in range(3))
    scheduler.submit(old, young, last)
    step(scheduler)
    while not scheduler.waiting:
        step(scheduler)
    assert scheduler.running == [old, young] and list(scheduler.waiting) == [last]
    assert (last.pages, last.context) == ([], 0) and last.generated
    assert [len(old.pages), len(young.pages)] == [2, 1]
    last.cancelled = True
    assert scheduler.drop_ended() == [(last, "cancelled")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("sacrg"), st.integers(1, 300), st.integers(1, 200)), max_size=60))
def test_pages_are_never_shared_or_lost(actions: list[tuple[str, int, int]]) -> None:
    scheduler = Scheduler(PagePool(9), max_batch=3, max_waiting=4, max_context=400)
    for action, first, second in actions:
        if action == "s":
            try:
                scheduler.submit(request(first, second))
            except (QueueFullError, RequestTooLongError):
                continue
        elif action == "a":
            scheduler.admit()
        elif action == "g":
            step(scheduler)
        elif action == "c":
            everyone = [*scheduler.waiting, *scheduler.running]
            if everyone:
                everyone[first % len(everyone)].cancelled = True
                assert len(scheduler.drop_ended()) == 1
        elif scheduler.running:
            done = scheduler.running[first % len(scheduler.running)]
            scheduler.release(done)
            scheduler.release(done)
        held = Counter(page for running in scheduler.running for page in running.pages)
        assert all(count == 1 for count in held.values())
        assert len(held) + scheduler.pool.free == scheduler.pool.capacity
        assert all(len(running.pages) >= pages_for(running.context) for running in scheduler.running)


def test_a_prompt_that_fills_the_context_is_prefilled_alone() -> None:
    scheduler = Scheduler(PagePool(12), max_batch=2, max_waiting=2, max_context=400)
    long, short = request(380, 1), request(90, 1)
    scheduler.submit(long, short)
    scheduler.admit()
    long.context = 320
    assert scheduler.next_prefill(CHUNK) == [(long, 60)], "380 tokens and 40 more are too many"
    long.context = 380
    assert scheduler.next_prefill(CHUNK) == [(short, 90)]


def test_no_token_is_asked_for_beyond_the_last() -> None:
    scheduler = Scheduler(PagePool(5), max_batch=3, max_waiting=3, max_context=4 * PAGE_TOKENS)
    scheduler.submit(ending := request(1, 2))
    scheduler.admit()
    ending.context, ending.generated = 1, [0]
    assert scheduler.decoding() == [ending]
    ending.flying = 1  # the second token, which the host has not read
    assert scheduler.decoding() == []
