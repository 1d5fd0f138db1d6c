"""An engine of this process behind a pipe, as the server's engine is behind one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server_example.backend import choose_backend
from server_example.client import EngineClient
from server_example.engine import Engine
from server_example.host import Host, served_by
from server_example.options import EngineOptions


@contextmanager
def connected(folder: Path, options: EngineOptions | None = None) -> Iterator[tuple[Engine, EngineClient]]:
    """An engine on the reference backend that runs until the end of the context, and its client."""
    engine = Engine(folder, choose_backend("cpu"), options or EngineOptions())
    near, far = multiprocessing.Pipe()
    host = Host(engine, far)

    def serve() -> None:
        host.serve()
        far.close()  # as the end of a process does

    thread = threading.Thread(target=serve)
    thread.start()
    engine.start()
    client = EngineClient(folder, served_by(engine), near)
    try:
        yield engine, client
    finally:
        client.stop(20)
        thread.join(20)
        assert not thread.is_alive()
