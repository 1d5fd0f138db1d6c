"""The two forms of an answer: a completion and a chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from server_example import protocol
from server_example.protocol import FinishReason, Usage
from server_example.scheduler import TokenEvent, TokenLogprob


class Form(Protocol):
    """Makes the parts of one answer from the events of its choices."""

    def choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> BaseModel: ...

    def delta(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> BaseModel: ...

    def answer(self, choices: list[Any], usage: Usage) -> BaseModel: ...

    def chunk(self, choices: list[Any], usage: Usage | None = None) -> BaseModel: ...


class CompletionForm:
    def __init__(self, model: str) -> None:
        self.id, self.created = protocol.new_id("cmpl")
        self.model = model
        self._offsets: dict[int, int] = {}

    def choice(
        self, index: int, events: Sequence[TokenEvent], reason: FinishReason
    ) -> protocol.CompletionChoice:
        return protocol.CompletionChoice(
            index=index,
            text=_text(events),
            logprobs=self._logprobs(index, events),
            finish_reason=reason,
        )

    delta = choice

    def answer(
        self, choices: list[protocol.CompletionChoice], usage: Usage | None = None
    ) -> protocol.CompletionResponse:
        return protocol.CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    chunk = answer

    def _logprobs(self, index: int, events: Sequence[TokenEvent]) -> protocol.CompletionLogprobs | None:
        entries = _entries(events)
        if not entries:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(entry.text)
        tops = [{**dict(entry.top), entry.text: entry.logprob} for entry in entries if entry.top]
        return protocol.CompletionLogprobs(
            tokens=[entry.text for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=tops or None,
            text_offset=offsets,
        )


class ChatForm:
    def __init__(self, model: str) -> None:
        self.id, self.created = protocol.new_id("chatcmpl")
        self.model = model
        self._begun: set[int] = set()

    def choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> protocol.ChatChoice:
        message = protocol.ChatMessage(content=_text(events))
        return protocol.ChatChoice(
            index=index, message=message, logprobs=_chat_logprobs(events), finish_reason=reason
        )

    def delta(
        self, index: int, events: Sequence[TokenEvent], reason: FinishReason
    ) -> protocol.ChatChunkChoice:
        """The first chunk of a choice has the role too."""
        begins = index not in self._begun
        self._begun.add(index)
        return protocol.ChatChunkChoice(
            index=index,
            delta=protocol.ChatDelta(role="assistant" if begins else None, content=_text(events)),
            logprobs=_chat_logprobs(events),
            finish_reason=reason,
        )

    def answer(self, choices: list[protocol.ChatChoice], usage: Usage | None) -> protocol.ChatResponse:
        return protocol.ChatResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def chunk(
        self, choices: list[protocol.ChatChunkChoice], usage: Usage | None = None
    ) -> protocol.ChatChunk:
        return protocol.ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )


def _text(events: Sequence[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def _entries(events: Sequence[TokenEvent]) -> list[TokenLogprob]:
    return [event.logprob for event in events if event.logprob is not None]


def _chat_logprobs(events: Sequence[TokenEvent]) -> protocol.ChatLogprobs | None:
    content = [
        protocol.ChatLogprob(
            **_top(entry.text, entry.logprob).model_dump(), top_logprobs=[_top(*pair) for pair in entry.top]
        )
        for entry in _entries(events)
    ]
    return protocol.ChatLogprobs(content=content) if content else None


def _top(text: str, logprob: float) -> protocol.TopLogprob:
    # A token of some bytes of a character has no text of its own, and its bytes are not known here.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return protocol.TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()) if whole else None)
