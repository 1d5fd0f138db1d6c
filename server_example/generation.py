"""One HTTP request: its body becomes requests of the engine, and their events become one answer or stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel

from server_example.answers import Form, Piece, WholeChoice
from server_example.client import EngineClient
from server_example.errors import ApiError
from server_example.messages import SEEDS, Job, SamplingParams, TokenEvent, check_length
from server_example.protocol import ChatRequest, CompletionRequest, FinishReason, Usage

#: Events of one request that become JSON before other tasks get their turn.
_AT_ONCE = 64

#: These end no line in a stream of events, but some clients split it there (`str.splitlines`, httpx).
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}

_STATUS = {"error": 500, "cancelled": 499, "shutdown": 503}


@dataclass(frozen=True)
class Deadline:
    """`at` is a time of `time.monotonic()`. `status` is that of a late answer."""

    at: float | None
    status: int

    @classmethod
    def of(cls, body: CompletionRequest | ChatRequest, limit: float) -> Deadline:
        """The earlier of the server's limit (seconds, 0 is none) and the client's, which is no fault here."""
        limits = [(body.timeout, 408), (limit, 504)]
        seconds, status = min(((s, status) for s, status in limits if s), default=(None, 504))
        return cls(None if seconds is None else time.monotonic() + seconds, status)


class Generation:
    """The choices of one HTTP request, each a job of the engine; their events share a queue."""

    def __init__(
        self,
        engine: EngineClient,
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        deadline: Deadline,
    ) -> None:
        self.engine = engine
        self.body = body
        self._status = {**_STATUS, "timeout": deadline.status}
        self._late: asyncio.TimerHandle | None = None
        self._prompt_tokens = sum(map(len, prompts))
        self._events: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()
        self._jobs = [
            Job(engine.job_number(), tokens, self._params(tokens, number), deadline.at)
            for tokens in prompts
            for number in range(body.n)
        ]
        self._counts = [0] * len(self._jobs)
        self._running = len(self._jobs)  # choices whose last event has not come

    def _params(self, tokens: list[int], number: int) -> SamplingParams:
        """The settings of choice `number` of a prompt; each choice draws with a seed of its own."""
        body = self.body
        if isinstance(body, ChatRequest):
            room = max(1, self.engine.served.max_context - len(tokens))
            max_tokens = body.max_completion_tokens or body.max_tokens or room
            logprobs = body.top_logprobs if body.logprobs else None
        else:
            max_tokens, logprobs = body.max_tokens, body.logprobs
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=None if body.seed is None else (body.seed + number) % SEEDS,
            stop=body.stop_strings,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
        )

    def _emit(self, index: int, event: TokenEvent) -> None:
        self._running -= event.finish_reason is not None
        if not self._running and self._late is not None:
            self._late.cancel()  # a slow client may take the answer later
        self._events.put_nowait((index, event))

    async def submit(self) -> None:
        """Queues all choices or none. Raises what `EngineClient.submit` raises."""
        for job in self._jobs:  # A huge prompt does not even travel to the engine.
            check_length(len(job.prompt), job.params.max_tokens, self.engine.served.max_context)
        await self.engine.submit(self._jobs, [partial(self._emit, i) for i in range(len(self._jobs))])
        self._end_late()

    def _end_late(self) -> None:
        """Ends the answer after its deadline if the engine, which ends jobs that are late, is silent."""
        deadline = self._jobs[0].deadline
        if deadline is not None and self._running:
            left = deadline + self.engine.seconds - time.monotonic()
            silence = TokenEvent("", 0, "timeout", "the engine has not answered in time")
            self._late = asyncio.get_running_loop().call_later(max(0, left), self._emit, 0, silence)

    def cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self.engine.cancel([job.number for job in self._jobs])

    async def _arrivals(self) -> AsyncIterator[dict[int, list[TokenEvent]]]:
        """The new events of each choice, several if the client or this thread is slower than the engine.

        Raises `ApiError` if a choice fails.
        """
        left = len(self._jobs)
        while left:
            arrived = [await self._events.get()]
            while not self._events.empty() and len(arrived) < _AT_ONCE:
                arrived.append(self._events.get_nowait())
            of_choice: dict[int, list[TokenEvent]] = {}
            for index, event in arrived:
                if event.finish_reason in self._status:
                    raise ApiError(self._status[event.finish_reason], event.error or "the engine failed")
                self._counts[index] = event.completion_tokens
                left -= event.finish_reason is not None
                of_choice.setdefault(index, []).append(event)
            yield of_choice
            await asyncio.sleep(0)  # `get` gives no other task a turn if there are more events.

    def _usage(self) -> Usage:
        generated = sum(self._counts)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=generated,
            total_tokens=self._prompt_tokens + generated,
        )

    async def collect(self, form: Form) -> list[Piece]:
        """The JSON of the whole answer, in pieces; if this is cancelled, the requests are too."""
        choices = [WholeChoice(form, index) for index in range(len(self._jobs))]
        try:
            async for arrived in self._arrivals():
                for index, events in arrived.items():
                    choices[index].add(events, _reason(events[-1]))
        finally:
            self.cancel()
        return list(form.answer(choices, self._usage()))

    async def stream(self, form: Form) -> AsyncIterator[dict[str, str]]:
        """Yields server-sent events; if the connection closes, the requests are cancelled."""
        try:
            async for arrived in self._arrivals():
                for index, events in arrived.items():
                    reason = _reason(events[-1])
                    if reason or any(event.text or event.logprob for event in events):
                        yield _data(form.chunk([form.delta(index, events, reason)]))
            options = self.body.stream_options
            if options is not None and options.include_usage:
                yield _data(form.chunk([], self._usage()))
        except ApiError as error:
            yield {"data": json.dumps(error.body.model_dump())}
        finally:
            self.cancel()
        yield {"data": "[DONE]"}


def _reason(event: TokenEvent) -> FinishReason:
    return event.finish_reason if event.finish_reason in ("stop", "length") else None


def _data(chunk: BaseModel) -> dict[str, str]:
    return {"data": chunk.model_dump_json().translate(_LINE_ENDS)}
