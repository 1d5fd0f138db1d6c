"""Decides which requests run: a bounded queue, pages on demand, first come first served.

This module has no device code.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server_example.messages import (
    Ending,
    QueueFullError,
    RequestTooLongError,
    SamplingParams,
    TokenEvent,
    check_length,
)
from server_example.pages import PAGE_TOKENS, PagePool, pages_for
from server_example.sampling import Sampler

_numbers = itertools.count()


@dataclass(eq=False)
class Request:
    """`emit` is called from the engine's thread. `context` counts the tokens that are in the cache.

    `seat` is the request's number in the batch, from 0 to `max_batch` - 1. `prefill_upto` counts the tokens
    that must be in the cache before the request may decode. `flying` counts the tokens that the device was
    asked for and the host has not read. `deadline` is a time of `time.monotonic()`, as are `created` and
    `last_token`.
    """

    prompt: list[int]
    params: SamplingParams
    emit: Callable[[TokenEvent], None]
    deadline: float | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    pages: list[int] = field(default_factory=list)
    seat: int | None = None
    context: int = 0
    prefill_upto: int = 0
    flying: int = 0
    generated: list[int] = field(default_factory=list)
    cancelled: bool = False
    created: float = field(default_factory=time.monotonic)
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params)

    @property
    def before_decode(self) -> list[int]:
        """The tokens that must be in the cache before the next decode step; its input is the token after."""
        return self.prompt + self.generated[:-1]

    @property
    def prefilling(self) -> bool:
        return self.context < self.prefill_upto


class Scheduler:
    """Waiting and running requests, and their pages. Not thread-safe: the engine guards it.

    A request is admitted with the pages of its tokens and of the next one, and gets more pages as it grows.
    If none is left, the youngest request gives its pages back and waits at the head of the queue. When it
    runs again, its tokens, generated ones included, are prefilled anew. So the oldest request always goes on.
    """

    def __init__(self, pool: PagePool, *, max_batch: int, max_waiting: int, max_context: int) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.max_context = min(max_context, pool.capacity * PAGE_TOKENS)
        self._seats = list(range(max_batch))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their numbers, as requests are queued

    def submit(self, *requests: Request) -> None:
        """Queues all requests or none. Raises `RequestTooLongError` or `QueueFullError`."""
        for request in requests:
            check_length(len(request.prompt), request.params.max_tokens, self.max_context)
        if len(requests) > self.max_waiting:
            raise RequestTooLongError(
                "n", f"{len(requests)} choices exceed the queue of {self.max_waiting}; ask for fewer"
            )
        if len(self.waiting) + len(requests) > self.max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.extend(requests)

    def admit(self) -> None:
        """Moves requests from the queue's head into the batch while slots and pages last."""
        while self.waiting and len(self.running) < self.max_batch:
            tokens = len(self.waiting[0].before_decode)
            pages = self.pool.take(pages_for(tokens + 1))
            if pages is None:
                return
            request = self.waiting.popleft()
            request.pages, request.seat, request.prefill_upto = pages, self._seats.pop(), tokens
            self.running.append(request)

    def may_preempt(self) -> bool:
        """Whether the next `grow` may find no page. Each request needs one page at the most."""
        return self.pool.free < len(self.running)

    def grow(self) -> list[Request]:
        """Gives each decoding request the page of its next token; returns the requests preempted for that."""
        preempted = []
        for request in self.decoding():
            while request.pages and len(request.pages) < pages_for(request.context + 1):
                if (page := self.pool.take(1)) is not None:
                    request.pages += page
                    continue
                youngest = max(self.running, key=lambda request: request.number)
                self.release(youngest)
                youngest.context = 0
                self.waiting.appendleft(youngest)
                preempted.append(youngest)
        return preempted

    def next_prefill(self, chunk: int) -> list[tuple[Request, int]]:
        """The requests to prefill together, and how many tokens of each.

        These are at most `chunk` tokens, so that a long prompt does not delay the decoding requests, and with
        the tokens before them at most `max_context`, which one request may have too.
        """
        chosen: list[tuple[Request, int]] = []
        room = self.max_context
        for request in filter(lambda request: request.prefilling, self.running):
            tokens = min(len(request.before_decode) - request.context, chunk)
            if tokens == 0 or request.context + tokens > room:
                break
            chosen.append((request, tokens))
            chunk -= tokens
            room -= request.context + tokens
        return chosen

    def decoding(self) -> list[Request]:
        """Requests that need another token beside those that are on their way."""
        return [
            request
            for request in self.running
            if not request.prefilling and len(request.generated) + request.flying < request.params.max_tokens
        ]

    def release(self, request: Request) -> None:
        """Removes the request from the queue or batch, and frees its pages. A second call does nothing."""
        if request in self.running:
            self.running.remove(request)
            assert request.seat is not None
            self._seats.append(request.seat)
        elif request in self.waiting:
            self.waiting.remove(request)
        pages, request.pages = request.pages, []
        self.pool.give_back(pages)

    def drop_ended(self) -> list[tuple[Request, Ending]]:
        """Releases the requests that are cancelled or past their deadline, and says which is which."""
        now = time.monotonic()
        ended: list[tuple[Request, Ending]] = []
        for request in (*self.waiting, *self.running):
            if request.cancelled:
                ended.append((request, "cancelled"))
            elif request.deadline is not None and now > request.deadline:
                ended.append((request, "timeout"))
        for request, _ in ended:
            self.release(request)
        return ended
