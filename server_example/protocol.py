"""The HTTP bodies: a strict part of OpenAI's completions and chat completions."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


def _is_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("text", "a lone surrogate at character {at}", {"at": error.start}) from None
    return text


def _described(expected: str) -> WrapValidator:
    """One message for a field of several types, instead of one message for each type."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            known = [str(part["msg"]) for part in error.errors() if part["type"] == "text"]
            raise PydanticCustomError(
                "described", "{message}", {"message": known[0] if known else f"must be {expected}"}
            ) from None

    return WrapValidator(validate)


Text = Annotated[str, AfterValidator(_is_text)]
TokenId = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
#: Even the check of very many tiny prompts would hold up every stream.
_Several = Field(max_length=1024, fail_fast=True)
Prompt = Annotated[
    Text | Annotated[list[Text], _Several] | Tokens | Annotated[list[Tokens], _Several],
    _described("a string, a list of token ids >= 0, or a list of strings or of such lists, at most 1024"),
]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=256)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4)],
    _described("a string or at most 4 strings, each of 1 to 256 characters"),
]


class _Body(BaseModel):
    """A JSON object. Null stands for the default; unknown fields are refused, since they would do nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: Fields that the server does not act on, with the values that ask for no action.
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        if isinstance(body, bytes):
            raise PydanticCustomError("described", "send content-type: application/json")
        if not isinstance(body, dict):
            raise PydanticCustomError("described", "must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name in given:
            # pydantic would make an error for each of them, and a body has room for very many.
            if name not in cls.model_fields:
                raise _of_field(name.encode(errors="backslashreplace").decode(), "unknown field")
        return given

    @field_validator("*")
    @classmethod
    def _neutral_only(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = cls.NEUTRAL.get(info.field_name or "")
        if allowed is not None and value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise PydanticCustomError("neutral", "this server supports only {names}", {"names": names})
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The OpenAPI document names the neutral values."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        for name in cls.NEUTRAL.keys() & schema["properties"].keys():
            schema["properties"][name]["enum"] = list(cls.NEUTRAL[name])
        return schema


class StreamOptions(_Body):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(_Body):
    """The fields that both kinds of completion have."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "modalities": (["text"],),
        "service_tier": ("auto",),
        "response_format": ({"type": "text"},),
        "store": (False,),
        "metadata": ({},),
    }

    model: Text | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=16)
    user: Text | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Any, Any] = {}
    ignore_eos: bool = Field(default=False, description="extension: go on after the end-of-text token")
    timeout: float | None = Field(default=None, gt=0, le=86400, description="extension: seconds to finish in")

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _of_field("stream_options", "needs stream: true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int = 1
    suffix: str = ""


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True)],
        _described("a string or a list of text parts"),
    ]
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": content, **named}


#: All messages together have at most so many parts, since the check of each takes time.
_MOST_PARTS = 1024


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_tokens: int | None = Field(default=None, ge=1, description="default: what the context has room for")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the new name of max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[Any] = []
    tool_choice: str = "none"
    parallel_tool_calls: bool = True
    functions: list[Any] = []
    modalities: list[Any] = ["text"]
    service_tier: str = "auto"
    response_format: dict[str, Any] = {"type": "text"}
    store: bool = False
    metadata: dict[Any, Any] = {}

    @field_validator("messages", mode="before")
    @classmethod
    def _few_parts(cls, messages: Any) -> Any:
        """Counts the parts of all messages before any part is checked."""
        listed = messages if isinstance(messages, list) else []
        contents = [message.get("content") for message in listed if isinstance(message, dict)]
        if sum(len(content) for content in contents if isinstance(content, list)) > _MOST_PARTS:
            raise PydanticCustomError(
                "described", "at most {most} text parts in all messages together", {"most": _MOST_PARTS}
            )
        return messages

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _of_field("top_logprobs", "needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens:
            raise _of_field("max_tokens", "give it or max_completion_tokens, not both")
        return self


def _of_field(name: str, message: str) -> PydanticCustomError:
    """An error of an object that `field_of` gives to one of its fields."""
    return PydanticCustomError("field", "{message}", {"message": message, "field": name})


def field_of(error: Any) -> str | None:
    """The field that an error of pydantic is about, such as `messages[0].role`."""
    if error["type"] == "json_invalid":
        return None
    field = error.get("ctx", {}).get("field")
    name = ""
    for part in (*error["loc"][1:], *([field] if field else [])):  # The first is "body".
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(BaseModel):
    """What every answer has, whole or a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None


FinishReason = Literal["stop", "length"] | None


class CompletionLogprobs(BaseModel):
    """One entry for each token. `text_offset` counts the characters of the completion before the token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason


class CompletionResponse(Answer):
    """A whole answer, or one chunk of a stream (`finish_reason` is null until the last chunk)."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatResponse(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "server_example"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


def new_id(prefix: str) -> tuple[str, int]:
    """A fresh id, and the current time in seconds."""
    return f"{prefix}-{uuid.uuid4().hex}", int(time.time())
