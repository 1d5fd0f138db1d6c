"""The HTTP side's view of the engine, which runs in another process (see `Host`)."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from server_example.chat import ChatTemplate
from server_example.messages import EngineUnavailableError, Job, Served, TokenEvent
from server_example.text import TokenTexts, load_tokenizer

Emit = Callable[[TokenEvent], None]


def _silence(seconds: float) -> str:
    return f"the engine has not answered for {seconds:g} s"


class EngineClient:
    """Calls of one event loop to the engine; events come back on this loop."""

    def __init__(self, folder: Path, served: Served, connection: Connection, seconds: float = 10) -> None:
        """`folder` is the model's. `connection` must be ready for calls: its first message has been read.

        `seconds` is the longest that the engine may take to answer a call.
        """
        self.seconds = seconds
        self.served = served
        self.tokenizer = load_tokenizer(folder, served.vocab_size)
        self.token_texts = TokenTexts(self.tokenizer)
        self.chat_template = ChatTemplate.load(folder)
        self.failure: str | None = None
        self._stopped = False
        self._connection = connection
        self._outbox: SimpleQueue[tuple[int, str, tuple[Any, ...]] | None] = SimpleQueue()
        self._ended = False  # whether the engine's process is known to send nothing more
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._emits: dict[int, Emit] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._send, name="engine's questions", daemon=True).start()
        threading.Thread(target=self._read, name="engine's answers", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self.failure is None and not self._stopped

    @property
    def busy(self) -> bool:
        return bool(self._emits)

    def job_number(self) -> int:
        return next(self._numbers)

    async def submit(self, jobs: Sequence[Job], emits: Sequence[Emit]) -> None:
        """Queues all jobs or none; each `emit` gets the events of its job, the last with a finish reason.

        Raises `RequestTooLongError`, `QueueFullError` or `EngineUnavailableError`.
        """
        self._loop = asyncio.get_running_loop()
        self._emits |= {job.number: emit for job, emit in zip(jobs, emits, strict=True)}
        try:
            await self.call("submit", jobs)
        except BaseException:  # A task that is cancelled leaves jobs that may be queued.
            self.cancel([job.number for job in jobs])
            for job in jobs:
                self._emits.pop(job.number, None)
            raise

    def cancel(self, numbers: Sequence[int]) -> None:
        """Has no effect on jobs that have ended."""
        if open_numbers := [number for number in numbers if number in self._emits]:
            self._ask("cancel", open_numbers)

    async def call(self, name: str, *arguments: Any) -> Any:
        """The result of a method of `Host`. Raises its exception, or `EngineUnavailableError`."""
        number, answer = self._ask(name, *arguments)
        silence = EngineUnavailableError(_silence(self.seconds))
        # Before Python 3.12, `asyncio.wait_for` loses a cancellation that comes together with the answer.
        timer = asyncio.get_running_loop().call_later(self.seconds, self._fail, number, silence)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            timer.cancel()
            self._answers.pop(number, None)  # Nobody waits for it any more.

    def stop(self, seconds: float) -> bool:
        """Ends open requests with an error. Call it from another thread than the loop's.

        False if the engine does not answer in time, which is a failure. Open requests are told when its
        process has ended.
        """
        self._stopped = True
        try:
            _, answer = self._ask("stop")
            answer.result(seconds)
        except EngineUnavailableError:
            pass
        except FutureTimeoutError:
            self.failure = _silence(seconds)
            return False
        return True

    def _ask(self, name: str, *arguments: Any) -> tuple[int, Future[Any]]:
        """The number of the call, and its answer to come."""
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        self._outbox.put((number, name, arguments))
        if self._ended:
            self._fail(number, self._gone())
        return number, answer

    def _fail(self, number: int, error: Exception) -> None:
        """Answers with an error, unless somebody has answered."""
        if (answer := self._answers.pop(number, None)) and answer.set_running_or_notify_cancel():
            answer.set_exception(error)

    def _send(self) -> None:
        """The thread that sends. If the engine does not read, the pipe fills, and sending waits."""
        while message := self._outbox.get():
            try:
                self._connection.send(message)
            except OSError:
                self._fail(message[0], self._gone())
            except Exception as error:
                self._fail(message[0], error)

    def _gone(self) -> EngineUnavailableError:
        return EngineUnavailableError(self.failure or "the engine's process has ended")

    def _read(self) -> None:
        """The thread that reads what the engine sends."""
        with suppress(EOFError, OSError):
            while True:
                for kind, number, content in self._connection.recv():
                    if kind == "events":
                        self._on_loop(self._tell, content)
                    elif kind == "failed":
                        self.failure = content
                    elif (ask := self._answers.pop(number, None)) and ask.set_running_or_notify_cancel():
                        (ask.set_exception if kind == "error" else ask.set_result)(content)
        if not self._stopped and self.failure is None:
            self.failure = "the engine's process has ended"
        self._ended = True
        self._outbox.put(None)
        for number in list(self._answers):
            self._fail(number, self._gone())
        self._on_loop(self._end_all)

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        # A closed loop has no listener left.
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, events: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        for number, fields in events:
            event = TokenEvent(*fields)
            ended = event.finish_reason is not None
            emit = self._emits.pop(number, None) if ended else self._emits.get(number)
            if emit is not None:
                emit(event)

    def _end_all(self) -> None:
        self._tell([(number, TokenEvent("", 0, "error", str(self._gone()))) for number in list(self._emits)])
