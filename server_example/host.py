"""The engine's process: it loads the model, answers calls from a pipe, and sends the events of each step.

With many streams, HTTP and the engine both need Python all the time. In one process each would wait for the
other. `EngineClient` is the other end of the pipe.
"""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from moe_fp8 import jit
from moe_fp8.errors import MoeFp8Error
from server_example.backend import choose_backend, explained_memory
from server_example.engine import Engine, prepare_engine
from server_example.messages import Job, Message, Reading, Served, TokenEvent
from server_example.scheduler import Request
from server_example.settings import Settings

logger = logging.getLogger(__name__)


def served_by(engine: Engine) -> Served:
    scheduler = engine.scheduler
    return Served(
        engine.name, engine.created, engine.config.vocab_size, scheduler.max_context,
        scheduler.max_waiting, scheduler.pool.capacity,
    )  # fmt: skip


def read_engine(engine: Engine, stream: torch.cuda.Stream | None) -> Reading:
    with torch.cuda.stream(stream):
        experts = engine.model.expert_tokens.tolist()[1:]
    return Reading(time.monotonic(), engine.metrics.values(), experts)


class Host:
    """Serves one engine over one connection. A client calls the methods without underscore, but for `serve`.

    It sends lists of these messages: ("answer", number of the call, result), ("error", number of the call,
    exception), ("events", 0, [(number of the job, fields of its `TokenEvent`), ...]), ("failed", 0, message).
    A list has all messages that came while the client was busy, so a slow client delays no step of the
    engine. Plain tuples are pickled several times faster than named ones.
    """

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._outbox = SimpleQueue[Message | None]()
        self._sender = threading.Thread(target=self._deliver, name="events", daemon=True)
        self._requests: dict[int, Request] = {}
        self._events: list[tuple[int, tuple[Any, ...]]] = []
        self._stream: torch.cuda.Stream | None = None
        engine.flush = self._flush

    def serve(self) -> None:
        """Returns after `stop`, and if the client's process has ended."""
        self._sender.start()
        name = ""
        with suppress(EOFError, OSError):
            while name != "stop":
                number, name, arguments = self._connection.recv()
                try:
                    answer = getattr(self, name)(*arguments)
                except Exception as error:  # It is the client's.
                    self._send("error", number, _portable(error))
                else:
                    self._send("answer", number, answer)
        self._outbox.put(None)
        self._sender.join()

    def submit(self, jobs: Sequence[Job]) -> None:
        """As `Engine.submit`."""
        requests = {
            job.number: Request(job.prompt, job.params, partial(self._emit, job.number), job.deadline)
            for job in jobs
        }
        self._requests |= requests
        try:
            self._engine.submit(*requests.values())
        except Exception:
            for number in requests:
                del self._requests[number]
            raise

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (request := self._requests.get(number)) is not None:
                self._engine.cancel(request)

    def stop(self) -> None:
        """As `Engine.stop`; the events of the end are sent before the answer."""
        self._engine.stop()

    def metrics(self) -> bytes:
        return self._engine.metrics.render()

    def reading(self) -> Reading:
        # On a stream of its own, the copy of the counts waits for no step, and no step waits for it.
        if self._stream is None and self._engine.backend.device.type == "cuda":
            self._stream = torch.cuda.Stream(self._engine.backend.device)
        return read_engine(self._engine, self._stream)

    def details(self) -> dict[str, Any]:
        """The engine's part of /health."""
        engine, counters = self._engine, jit.counters()
        return {
            "model": engine.name,
            "backend": engine.backend.name,
            "backend_reason": engine.backend.reason,
            "device": engine.backend.description,
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "free_pages": engine.scheduler.pool.free,
            "total_pages": engine.scheduler.pool.capacity,
            "graphs": {"captured": engine.runner.captured, "replays": engine.runner.replays},
            "jit": {
                "frozen": jit.is_frozen(),
                "loads": counters.loads,
                "compiles": counters.compiles,
                "misses": counters.misses,
            },
        }

    # The engine's thread runs the following methods.

    def _emit(self, number: int, event: TokenEvent) -> None:
        self._events.append((number, tuple(event)))
        if event.finish_reason is not None:
            del self._requests[number]

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._send("events", 0, events)
        if self._engine.failure is not None:
            self._send("failed", 0, self._engine.failure)

    def _send(self, kind: str, number: int, content: Any) -> None:
        self._outbox.put((kind, number, content))

    def _deliver(self) -> None:
        """The thread that sends."""
        ended = False
        # A client that has gone reads nothing; `serve` ends because of it.
        with suppress(OSError):
            while not ended:
                waiting = [self._outbox.get()]
                while not self._outbox.empty():
                    waiting.append(self._outbox.get())
                ended = None in waiting
                self._connection.send([message for message in waiting if message is not None])


def _portable(error: Exception) -> Exception:
    """`error`, or its type and text if a pipe cannot carry it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def run_engine(settings: Settings, connection: Connection) -> None:
    """The main function of the engine's process.

    Its first message is ("ready", 0, `Served`), or ("refused", 0, message) for settings or a machine that it
    cannot serve with.
    """
    # A signal to the whole group is the HTTP side's: it drains, and then ends this process. It started this
    # one with the signals blocked.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        backend = choose_backend(settings.device)
        said = f"backend: {backend.name} on {backend.description} ({backend.reason})"
        if backend.name == "reference" and settings.device == "auto":
            logger.warning("%s, which is slow; --device cuda would refuse", said)
        else:
            logger.info(said)
        with explained_memory():
            engine = prepare_engine(settings.model, backend, settings.engine_options())
    except MoeFp8Error as error:
        connection.send(("refused", 0, str(error)))
        return
    host = Host(engine, connection)
    engine.start()
    connection.send(("ready", 0, served_by(engine)))
    host.serve()
    engine.stop()
