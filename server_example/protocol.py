"""The HTTP bodies, a strict subset of OpenAI's completions API."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """Unknown fields are refused: a setting without effect should not look effective."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[TokenId]
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    ignore_eos: bool = False
    user: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(BaseModel):
    """A whole answer, or one chunk of a stream (`finish_reason` is null until the last chunk)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ErrorDetail(BaseModel):
    message: str
    type: Literal["invalid_request_error", "overloaded_error", "server_error"]
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


def error_body(
    kind: Any, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()


def completion_id() -> tuple[str, int]:
    """A fresh id, and the current time in seconds."""
    return f"cmpl-{uuid.uuid4().hex}", int(time.time())
