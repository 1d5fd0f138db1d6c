"""What the process with HTTP and the process of the engine tell each other. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

#: How a request ends. In OpenAI's interface, answers name only the first two; the others are errors.
Ending = Literal["stop", "length", "cancelled", "timeout", "shutdown", "error"]

#: What is said of a request that ends without its answer.
ENDINGS: dict[Ending, str] = {
    "cancelled": "the client closed the connection",
    "timeout": "the request did not finish in its time",
    "shutdown": "the server is shutting down",
}
#: Its kind, the number of the call that it answers, its content.
Message = tuple[str, int, Any]

#: The number of different seeds: torch's generator on a CPU uses only the lowest 32 bits of a seed.
SEEDS = 2**32


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy. `seed` None is unpredictable. `max_tokens` counts generated tokens.

    `logprobs` is the number of alternatives whose log-probabilities each token carries; None asks for none.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether a token needs more than the likeliest token's number."""
        return self.temperature > 0 or self.logprobs is not None


@dataclass(frozen=True)
class Job:
    """A request on its way to the engine. `deadline` is a time of `time.monotonic()`."""

    number: int
    prompt: list[int]
    params: SamplingParams
    deadline: float | None = None


class TokenLogprob(NamedTuple):
    """A token's bytes and log-probability, and those of the most probable tokens in its place.

    `offset` counts the characters that the text has before the token.
    """

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


class TokenEvent(NamedTuple):
    """Text that became certain with a token; the last event of a request carries `finish_reason`.

    `error` says why a request ended without its answer.
    """

    text: str
    completion_tokens: int
    finish_reason: Ending | None = None
    error: str | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Served:
    """What a client must know of its engine."""

    name: str
    created: int
    vocab_size: int
    max_context: int
    max_waiting: int
    pages: int


class Reading(NamedTuple):
    """What the page plots differences of: figures at a time of `time.monotonic()`."""

    time: float
    metrics: dict[str, float]
    experts: list[int]


class EngineUnavailableError(Exception):
    """The engine takes no calls: it has ended or stops, or it does not answer in time."""


class QueueFullError(Exception):
    """The queue of waiting requests is full."""


class RequestTooLongError(Exception):
    """The request could never run, even on an empty server. `part` is to blame."""

    def __init__(self, part: Literal["prompt", "max_tokens", "n"], message: str) -> None:
        super().__init__(part, message)
        self.part = part

    def __str__(self) -> str:
        return str(self.args[1])


def check_length(prompt_tokens: int, max_tokens: int, max_context: int) -> None:
    """Raises `RequestTooLongError` if a request of so many tokens exceeds the context."""
    if prompt_tokens >= max_context:
        raise RequestTooLongError(
            "prompt",
            f"the prompt has {prompt_tokens} tokens; the context of {max_context} tokens must also "
            "hold the completion; shorten the prompt",
        )
    if prompt_tokens + max_tokens > max_context:
        raise RequestTooLongError(
            "max_tokens",
            f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the context of "
            f"{max_context} tokens; shorten the prompt or lower max_tokens",
        )
