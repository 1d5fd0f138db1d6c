"""The two forms of an answer: a completion and a chat completion, whole or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar

from pydantic import BaseModel
from pydantic_core import to_json

from server_example import protocol
from server_example.messages import TokenEvent, TokenLogprob
from server_example.protocol import FinishReason, Usage

#: A part of some JSON.
Piece = bytes | bytearray


class Form(ABC):
    """Makes the parts of one answer from the events of its choices."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[type[protocol.Answer]]
    CHUNK: ClassVar[type[protocol.Answer]]

    def __init__(self, model: str) -> None:
        self.id, self.created = protocol.new_id(self.PREFIX)
        self.model = model

    @abstractmethod
    def logprobs(self, index: int, events: Sequence[TokenEvent]) -> BaseModel | None: ...

    @abstractmethod
    def choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> BaseModel: ...

    @abstractmethod
    def delta(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> BaseModel: ...

    def answer(self, choices: Iterable[WholeChoice], usage: Usage) -> Iterator[Piece]:
        """The JSON of a whole answer, in pieces."""
        answer = self.WHOLE(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)
        return _object(_fields(answer) | {"choices": _joined(b"[]", (choice.json() for choice in choices))})

    def chunk(self, choices: list[BaseModel], usage: Usage | None = None) -> BaseModel:
        return self.CHUNK(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


class CompletionForm(Form):
    PREFIX, WHOLE, CHUNK = "cmpl", protocol.CompletionResponse, protocol.CompletionResponse

    def choice(
        self, index: int, events: Sequence[TokenEvent], reason: FinishReason
    ) -> protocol.CompletionChoice:
        logprobs = self.logprobs(index, events)
        return protocol.CompletionChoice(
            index=index, text=_text(events), logprobs=logprobs, finish_reason=reason
        )

    delta = choice

    def logprobs(self, index: int, events: Sequence[TokenEvent]) -> protocol.CompletionLogprobs | None:
        entries = _entries(events)
        if not entries:
            return None
        tops = [
            {_name(token): logprob for token, logprob in (*entry.top, entry[:2])}
            for entry in entries
            if entry.top
        ]
        return protocol.CompletionLogprobs(
            tokens=[_name(entry.token) for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=tops or None,
            text_offset=[entry.offset for entry in entries],
        )


class ChatForm(Form):
    PREFIX, WHOLE, CHUNK = "chatcmpl", protocol.ChatResponse, protocol.ChatChunk

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._begun: set[int] = set()

    def choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> protocol.ChatChoice:
        message = protocol.ChatMessage(content=_text(events))
        logprobs = self.logprobs(index, events)
        return protocol.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason)

    def delta(
        self, index: int, events: Sequence[TokenEvent], reason: FinishReason
    ) -> protocol.ChatChunkChoice:
        """The first chunk of a choice has the role too."""
        delta = protocol.ChatDelta(role=None if index in self._begun else "assistant", content=_text(events))
        self._begun.add(index)
        logprobs = self.logprobs(index, events)
        return protocol.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def logprobs(self, index: int, events: Sequence[TokenEvent]) -> protocol.ChatLogprobs | None:
        content = [
            protocol.ChatLogprob(
                **_top(entry.token, entry.logprob).model_dump(),
                top_logprobs=[_top(*pair) for pair in entry.top],
            )
            for entry in _entries(events)
        ]
        return protocol.ChatLogprobs(content=content) if content else None


class WholeChoice:
    """A choice of a whole answer. Its log-probabilities become JSON as they come.

    They may be megabytes, which would hold up every stream for seconds if they became JSON at once.
    """

    def __init__(self, form: Form, index: int) -> None:
        self._form = form
        self._index = index
        self._texts: list[str] = []
        self._reason: FinishReason = None
        self._logprobs: dict[str, bytearray] = {}  # field -> JSON of its list, without the end

    def add(self, events: Sequence[TokenEvent], reason: FinishReason) -> None:
        """`reason` is that of the last event."""
        self._texts.append(_text(events))
        self._reason = reason
        for name, entries in self._form.logprobs(self._index, events) or ():
            written = self._logprobs.setdefault(name, bytearray())
            if entries is not None:
                written += (b"," if written else b"[") + to_json(entries)[1:-1]

    def json(self) -> Iterator[Piece]:
        """The JSON of `Form.choice` of all events, in pieces."""
        fields = _fields(self._form.choice(self._index, [TokenEvent("".join(self._texts), 0)], self._reason))
        if self._logprobs:
            fields["logprobs"] = _object(
                {name: (json, b"]") if json else (b"null",) for name, json in self._logprobs.items()}
            )
        return _object(fields)


def _text(events: Sequence[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def _entries(events: Sequence[TokenEvent]) -> list[TokenLogprob]:
    return [event.logprob for event in events if event.logprob is not None]


def _top(token: bytes, logprob: float) -> protocol.TopLogprob:
    return protocol.TopLogprob(token=_name(token), logprob=logprob, bytes=list(token))


def _name(token: bytes) -> str:
    """The text of a token; for a token that is not whole characters, its bytes as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _fields(model: BaseModel) -> dict[str, Iterable[Piece]]:
    """The JSON of each field of a model, in pieces."""
    return {name: [to_json(value)] for name, value in model}


def _object(fields: Mapping[str, Iterable[Piece]]) -> Iterator[Piece]:
    return _joined(b"{}", (chain([to_json(name), b":"], pieces) for name, pieces in fields.items()))


def _joined(brackets: bytes, items: Iterable[Iterable[Piece]]) -> Iterator[Piece]:
    yield brackets[:1]
    for number, pieces in enumerate(items):
        if number:
            yield b","
        yield from pieces
    yield brackets[1:]
