"""Bind, load, serve, drain.

HTTP runs on a thread from the start, and the engine in a process of its own; the main thread looks after
both.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from multiprocessing import resource_tracker
from types import FrameType

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from moe_fp8.errors import MoeFp8Error
from server_example import child
from server_example.app import Service, create_app
from server_example.client import EngineClient
from server_example.gate import timed_protocol
from server_example.settings import Settings

logger = logging.getLogger("server_example")

#: The most connections that wait to be accepted. asyncio tries to accept so many at once, and logs an error
#: for each attempt while the process may open no more files.
_BACKLOG = 256
#: Time for the last bytes of answers, once the engine has stopped.
_FLUSH_SECONDS = 5
_PREFIX = str(Settings.model_config["env_prefix"])
#: The variables that Kubernetes sets beside a service of the name `server-example`. The variable of the
#: option --port is another: it has the service's address then, such as tcp://10.0.0.1:80.
_OF_A_SERVICE = re.compile(rf"{_PREFIX}(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
_ADDRESSES = ("tcp://", "udp://", "sctp://")
#: Between two looks at what may have happened.
_POLL_SECONDS = 0.05
#: The signals that end the server.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `OSError` if the port is in use or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # asyncio sends small answers at once (TCP_NODELAY) only on sockets that name their protocol.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=sock.detach())


class Refused(Exception):
    """The engine's process says why it cannot serve."""


class Process:
    """The HTTP thread, the engine's process, and the two signals that end the server."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        self.service = service
        # A fork would take along this process's threads' locks and, on a GPU, a state that cannot be shared.
        context = multiprocessing.get_context("spawn")
        self._connection, self._far_end = context.Pipe()
        self._engine = context.Process(target=child.run, args=(service.settings, self._far_end))
        config = uvicorn.Config(
            create_app(service),
            http=timed_protocol(service.settings.receive_seconds, service.metrics.answers),
            ws="none",
            lifespan="off",
            log_level="warning",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="http")
        # A plain number, since a handler may run while this thread holds the lock of an Event.
        self._signals = 0

    def start(self) -> None:
        """Starts the HTTP thread and the engine's process."""
        # multiprocessing's tracker unblocks the signals when it starts, so it starts first.
        resource_tracker.ensure_running()
        # The thread and the process inherit the mask: a Ctrl-C interrupts no import there.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # uvicorn handles signals only on the main thread. It would end streams at once and die of the signal.
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        # Whoever gets an answer may send a signal, so the handlers come first.
        self._thread.start()
        self._engine.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def load(self) -> EngineClient:
        """Waits until the engine is ready. Raises `Refused` or `EOFError`."""
        self._far_end.close()  # So that the end of the process is the end of the connection.
        kind, _, content = self._connection.recv()
        if kind == "refused":
            raise Refused(content)
        settings = self.service.settings
        return EngineClient(settings.model, content, self._connection, settings.engine_seconds)

    def tell_end(self) -> None:
        """Says how the engine's process ended while it loaded, unless it has said so itself."""
        self._engine.join()
        code = self._engine.exitcode or 0
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; is there enough memory?" if name == "SIGKILL" else ""
            print(f"error: {name} ended the engine's process while it loaded{hint}", file=sys.stderr)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1 and self.service.engine is None:
            raise SystemExit(0)  # Nothing to drain: leave the loading.

    def wait(self, engine: EngineClient) -> bool:
        """True after a signal, False if the engine has failed or the HTTP thread has ended."""
        # A sleep goes on after a handler has run, so each sleep is short.
        while not self._signals and self._thread.is_alive() and engine.failure is None:
            time.sleep(_POLL_SECONDS)
        return self._signals > 0

    def shut_down(self) -> None:
        """Drains for the grace time, ends what is left with errors, and ends HTTP and the engine."""
        self.service.draining = True
        engine = self.service.engine
        # This process ends only if its thread and the engine's process do, so they end after any error too.
        try:
            if engine is not None:
                self._drain(engine)
        finally:
            self._server.should_exit = True
            if self._thread.ident is not None:  # A signal may come before its start.
                self._thread.join()
            self._connection.close()
            if self._engine.pid is not None:
                try:
                    if engine is not None:
                        self._engine.join(self.service.settings.engine_seconds)
                finally:
                    self._engine.kill()
                    self._engine.join()

    def _drain(self, engine: EngineClient) -> None:
        end = time.monotonic() + self.service.settings.drain_seconds
        while self.service.busy and engine.alive and self._thread.is_alive() and time.monotonic() < end:
            if self._signals > 1:  # A second signal ends the drain.
                break
            time.sleep(_POLL_SECONDS)
        self.service.intake.end()
        if not engine.stop(self.service.settings.engine_seconds):
            self._engine.kill()  # The end of its pipe tells every request.


def read_settings(arguments: list[str] | None = None) -> Settings:
    """Raises `ValidationError`, and `SettingsError` for an option without text and an unknown variable.

    Ends the process for `--help` and unknown options.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # The settings take an empty text for none, which is right for variables alone.
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, given, text = argument.partition("=")
        if argument == "" or (name.startswith("--") and given and not text):
            raise SettingsError(f"{name or before}: expected a text; leave the option out for its default")
    port = f"{_PREFIX}PORT"
    if os.environ.get(port, "").startswith(_ADDRESSES):
        del os.environ[port]
    settings = CliApp.run(Settings, cli_args=arguments)
    known = {f"{_PREFIX}{name}".upper() for name in Settings.model_fields}
    for name in sorted({name.upper() for name in os.environ} - known):
        if name.startswith(_PREFIX) and not _OF_A_SERVICE.fullmatch(name):
            raise SettingsError(f"{name}: no option has this variable; correct its name or unset it")
    return settings


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # With the default, a body of very many small lists is searched for garbage ten times while it is parsed.
    gc.set_threshold(50_000)
    # Each connection is an open file, and the usual soft limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        settings = read_settings()
    except ValidationError as error:
        for part in error.errors():
            name = str(part["loc"][0])
            option = f"--{name.replace('_', '-')} (or SERVER_EXAMPLE_{name.upper()})"
            print(f"error: {option}: {part['msg']}", file=sys.stderr)
        return 2
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        sock = listen(settings.host, settings.port)
    except OSError as error:
        print(f"error: {settings.host} port {settings.port}: {error.strerror}", file=sys.stderr)
        return 2
    service = Service(settings)
    process = Process(service, sock)
    url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{sock.getsockname()[1]}"
    try:
        process.start()
        engine = service.engine = process.load()
        key = "without a key" if settings.api_key is None else "with a key"
        print(
            f"serving {engine.served.name} on {url} {key} (interface: {url}/openapi.json); stop with Ctrl-C",
            flush=True,
        )
        in_order = process.wait(engine)
    except (MoeFp8Error, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EOFError:
        process.tell_end()
        return 2
    finally:
        process.shut_down()
    if engine.failure is not None:
        print(f"error: the engine has failed: {engine.failure}", file=sys.stderr)
    return 0 if in_order and engine.failure is None else 1
