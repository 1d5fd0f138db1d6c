"""Decides which requests run: a bounded queue, admission by free pages, first come first served.

This module has no device code.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from server_example.cache import PAGE_TOKENS, PagePool, pages_for
from server_example.sampling import Sampler, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]

_numbers = itertools.count()


@dataclass(frozen=True)
class TokenEvent:
    """Text that became certain with a token; the last event of a request carries `finish_reason`."""

    text: str
    completion_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None


class QueueFullError(Exception):
    """The queue of waiting requests is full."""


class RequestTooLongError(Exception):
    """The request could never run, even on an empty server."""


@dataclass(eq=False)
class Request:
    """`emit` is called from the engine's thread. `context` counts the tokens that are in the cache."""

    prompt: list[int]
    params: SamplingParams
    emit: Callable[[TokenEvent], None]
    number: int = field(default_factory=lambda: next(_numbers))
    pages: list[int] = field(default_factory=list)
    context: int = 0
    generated: list[int] = field(default_factory=list)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params)

    @property
    def max_context(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def prefilling(self) -> bool:
        return self.context < len(self.prompt)


class Scheduler:
    """Waiting and running requests, and their pages. Not thread-safe: the engine guards it.

    A request is admitted with all pages that it can ever need. So no request runs out of pages midway, and
    none has to be evicted.
    """

    def __init__(self, pool: PagePool, *, max_batch: int, max_waiting: int, max_context: int) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.max_context = min(max_context, pool.capacity * PAGE_TOKENS)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises `RequestTooLongError` if the request does not fit the context or the cache."""
        if prompt_tokens + max_tokens > self.max_context:
            raise RequestTooLongError(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the context of "
                f"{self.max_context} tokens; shorten the prompt or lower max_tokens"
            )

    def submit(self, request: Request) -> None:
        """Raises `RequestTooLongError` or `QueueFullError`."""
        self.check(len(request.prompt), request.params.max_tokens)
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests are waiting; try again later")
        self.waiting.append(request)

    def admit(self) -> None:
        """Moves requests from the queue's head into the batch while slots and pages last."""
        while self.waiting and len(self.running) < self.max_batch:
            pages = self.pool.take(pages_for(self.waiting[0].max_context))
            if pages is None:
                return
            request = self.waiting.popleft()
            request.pages = pages
            self.running.append(request)

    def next_prefill(self) -> Request | None:
        return next((request for request in self.running if request.prefilling), None)

    def decoding(self) -> list[Request]:
        return [request for request in self.running if not request.prefilling]

    def release(self, request: Request) -> None:
        """Removes the request from the queue or batch, and frees its pages. A second call does nothing."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        pages, request.pages = request.pages, []
        self.pool.give_back(pages)

    def drop_cancelled(self) -> list[Request]:
        """Releases and returns the requests whose client has disconnected."""
        gone = [request for request in (*self.waiting, *self.running) if request.cancelled]
        for request in gone:
            self.release(request)
        return gone
