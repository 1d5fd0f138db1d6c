"""Signals that end the work early. The results up to then are still written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP raise one exception: within `raised` at once, else at the end of `handled`.

    The first of these signals raises KeyboardInterrupt or SystemExit, and all that follow have no effect.
    (GNU timeout sends its signal twice.) An ignored signal, as under nohup, stays ignored, and a handler of
    the caller's own stays in its place. Only the main thread may handle signals; in other threads nothing
    changes.
    """

    def __init__(self) -> None:
        self._seen = self._raising = False
        self._pending = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within this context the signals are handled as the class says."""
        default = (signal.SIG_DFL, signal.default_int_handler)
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in _SIGNALS if main}
        before = {number: handler for number, handler in before.items() if handler in default}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._pending:
            self._raise()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """A signal within this context raises its exception at once, and so does one that came before."""
        try:
            self._raising = True
            if self._pending:
                self._raise()
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, frame: object) -> None:
        if self._seen:
            return
        self._seen, self._pending = True, number
        if self._raising:
            self._raise()

    def _raise(self) -> NoReturn:
        number, self._pending = self._pending, 0
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
