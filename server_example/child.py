"""The engine's process from its start. The process that starts it imports nothing else of it."""

from __future__ import annotations

from multiprocessing.connection import Connection

from server_example.extra import server_extra
from server_example.settings import Settings


def run(settings: Settings, connection: Connection) -> None:
    """As `run_engine` of `host.py`, which needs PyTorch."""
    with server_extra():
        from server_example.host import run_engine

    run_engine(settings, connection)
