"""The way of a request into the engine's queue: its body is accepted, and its texts become tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

from fastapi import Request as HttpRequest

from server_example.chat import ChatTemplateError
from server_example.client import EngineClient
from server_example.errors import ApiError, unless
from server_example.generation import Deadline, Generation
from server_example.messages import (
    ENDINGS,
    EngineUnavailableError,
    QueueFullError,
    RequestTooLongError,
    check_length,
)
from server_example.protocol import ChatRequest, CompletionRequest
from server_example.text import encode


async def client_left(http: HttpRequest) -> ApiError:
    """Returns once the client has closed its connection."""
    # The body has been read, so the next message is the end of the connection.
    while (await http.receive())["type"] != "http.disconnect":
        pass
    return ApiError(499, ENDINGS["cancelled"])


class Intake:
    """The requests that are accepted, until they are in the engine's queue.

    The texts of a request become tokens one after another, each on a worker thread. So a request of many
    texts hardly delays the others, and none of its texts is begun after it has ended.
    """

    def __init__(self) -> None:
        #: The number of requests whose answers are not sent yet, for which a drain waits.
        self.open = 0
        self._tokenizing = 0
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Ends these requests with an error. Call it from another thread than the loop's."""
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop may be closed.
                self._loop.call_soon_threadsafe(self._over.set)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Within it, the answer of one more request is open."""
        self._loop = asyncio.get_running_loop()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def submit(
        self,
        engine: EngineClient,
        body: CompletionRequest | ChatRequest,
        deadline: Deadline,
        http: HttpRequest,
    ) -> Generation:
        """The choices of a body, which are in the engine's queue.

        Raises `ApiError`, also if the client leaves, the time is over or the drain ends before.
        """
        ends = [client_left(http), self.drained()]
        if deadline.at is not None:
            ends.append(_late(deadline.at, deadline.status))
        return await unless(self._submit(engine, body, deadline), *ends)

    async def drained(self) -> ApiError:
        """Returns at `end`."""
        self._loop = asyncio.get_running_loop()
        await self._over.wait()
        return ApiError(503, ENDINGS["shutdown"])

    async def _submit(
        self, engine: EngineClient, body: CompletionRequest | ChatRequest, deadline: Deadline
    ) -> Generation:
        try:
            if isinstance(body, ChatRequest):
                prompts = await self._chat(engine, body)
            else:
                prompts = await self._prompts(engine, body)
            generation = Generation(engine, body, prompts, deadline)
            await generation.submit()
        except RequestTooLongError as error:
            chat = isinstance(body, ChatRequest)
            param = "messages" if chat and error.part == "prompt" else error.part
            code = None if error.part == "n" else "context_length_exceeded"
            raise ApiError(400, str(error), param=param, code=code) from None
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full") from None
        except EngineUnavailableError as error:
            raise ApiError(503, str(error)) from None
        return generation

    async def _chat(self, engine: EngineClient, body: ChatRequest) -> list[list[int]]:
        messages = [message.for_template() for message in body.messages]
        with self._place(engine.served.max_waiting):
            try:
                text = await asyncio.to_thread(engine.chat_template.render, messages)
            except ChatTemplateError as error:
                message = f"the model's chat template refuses the messages: {error}"
                raise ApiError(400, message, param="messages") from None
            # A model's own template writes the special tokens.
            return await _encoded(engine, [text], "messages", special=not engine.chat_template.own)

    async def _prompts(self, engine: EngineClient, body: CompletionRequest) -> list[list[int]]:
        prompt = body.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = cast("list[str] | list[list[int]]", prompt if several else [prompt])
        if len(prompts) > engine.served.max_waiting:
            message = f"{len(prompts)} prompts exceed the queue of {engine.served.max_waiting}; send fewer"
            raise ApiError(400, message, param="prompt")
        texts = [text for text in prompts if isinstance(text, str)]
        if texts:
            with self._place(engine.served.max_waiting):
                return await _encoded(engine, texts, "prompt")
        return [_checked(engine, tokens, "prompt") for tokens in prompts if isinstance(tokens, list)]

    @contextmanager
    def _place(self, most: int) -> Iterator[None]:
        """A place among the `most` requests whose texts may become tokens at the same time."""
        if self._tokenizing >= most:
            raise QueueFullError(f"the texts of {self._tokenizing} requests are waiting; try again later")
        self._tokenizing += 1
        try:
            yield
        finally:
            self._tokenizing -= 1


async def _late(at: float, status: int) -> ApiError:
    await asyncio.sleep(at - time.monotonic())
    return ApiError(status, ENDINGS["timeout"])


async def _encoded(
    engine: EngineClient, texts: list[str], param: str, special: bool = True
) -> list[list[int]]:
    most = engine.served.max_context * engine.token_texts.most_bytes
    for text in texts:
        # More bytes than the context's tokens can stand for: no need to count the tokens.
        if len(text) > most or len(text.encode()) > most:
            message = f"{param} has more than {most} bytes, which exceeds the context of "
            message += f"{engine.served.max_context} tokens; shorten it"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
    prompts = []
    for text in texts:
        tokens = await asyncio.to_thread(encode, engine.tokenizer, text, special=special)
        prompts.append(_checked(engine, tokens, param))
    return prompts


def _checked(engine: EngineClient, tokens: list[int], param: str) -> list[int]:
    """`tokens`, if they are a prompt that can be continued. Raises `ApiError` or `RequestTooLongError`."""
    if not tokens:
        raise ApiError(400, f"{param} is empty", param=param)
    check_length(len(tokens), 1, engine.served.max_context)
    if max(tokens) >= engine.served.vocab_size:
        message = f"token id {max(tokens)} is outside the vocabulary of {engine.served.vocab_size}"
        raise ApiError(400, message, param=param)
    return tokens
