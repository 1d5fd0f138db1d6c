"""What a request must pass before the app sees it: its key, its size, and the time it takes to arrive.

All answers are counted here too.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import termios
from array import array
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import h11
from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from server_example.errors import ApiError, unless

#: The key in a scope's `state` of what is wrong with the bytes of the body.
_MALFORMED = "malformed"


class Gate:
    """ASGI middleware that hands on whole bodies only. `api_key` None lets everyone in."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        receive_seconds: float,
        drained: Callable[[], Coroutine[Any, Any, ApiError]],
    ) -> None:
        """`drained` returns at the end of a drain: a body that is still on its way comes too late."""
        self.app = app
        self._drained = drained
        self.max_body_bytes = max_body_bytes
        self.receive_seconds = receive_seconds
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if b"transfer-encoding" in headers and b"content-length" in headers:
                # A proxy that goes by the length would take what follows for another request (RFC 9112, 6.1).
                raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
            self._check_key(scope["path"], headers)
            body = await self._body(scope, headers, receive)
        except ApiError as error:
            # The rest of a late or malformed body is not awaited; the rest of a large one is read, so that
            # its sender sees the answer.
            headers_sent = {"Connection": "close"} if error.status in (400, 408, 503) else None
            await error.response(headers_sent)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or not path.startswith("/v1/"):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._key):
            raise ApiError(401, "Authorization must be 'Bearer' and the server's key", code="invalid_api_key")

    async def _body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        # The HTTP parser has refused lengths that are not numbers.
        if int(headers.get(b"content-length", b"0")) > self.max_body_bytes:
            raise self._too_large()
        return await unless(self._read(scope, receive), self._late(), self._drained())

    async def _late(self) -> ApiError:
        await asyncio.sleep(self.receive_seconds)
        return ApiError(408, f"the body did not come within {self.receive_seconds:g} s")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the connection closed before the body was complete")
            if (malformed := scope.get("state", {}).get(_MALFORMED)) is not None:
                raise ApiError(400, malformed)
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.max_body_bytes} bytes", code="body_too_large")


class Awaited:
    """ASGI middleware that is in `awaited()` until a POST request is answered and the answer is sent.

    Other answers are sent at once, or have no end of their own, as that of /v1/stats.
    """

    def __init__(self, app: ASGIApp, *, awaited: Callable[[], AbstractContextManager[None]]) -> None:
        self.app = app
        self._awaited = awaited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            with self._awaited():
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Counted:
    """ASGI middleware that counts the answers by their status."""

    def __init__(self, app: ASGIApp, *, answers: Counter) -> None:
        self.app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._answers.labels(message["status"]).inc()
            await send(message)

        try:
            await self.app(scope, receive, counting)
        except Exception:
            if not begun:
                self._answers.labels(500).inc()  # Starlette answers so, outside of all middleware.
            raise


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request begins or ends in time, or on which the client reads nothing.

    uvicorn alone would wait for ever.
    """

    def __init__(self, *args: Any, receive_seconds: float, answers: Counter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = receive_seconds
        self._answers = answers
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        # uvicorn reads no more once a further request waits for its turn. Then it would not see that the
        # client leaves, so go on reading until much waits.
        if self._answering and not self.cycle.more_body:
            much = len(self.conn.trailing_data[0]) > HIGH_WATER_LIMIT
            (self.flow.pause_reading if much else self.flow.resume_reading)()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._await_reading(self._unread())

    def _await_reading(self, unread: int) -> None:
        """Ends the connection unless the client reads some of the `unread` bytes in time, again and again."""

        def look() -> None:
            left = self._unread()
            if left < unread:
                self._await_reading(left)
            else:
                self.transport.abort()

        self._writing = self.loop.call_later(self._seconds, look)

    def _unread(self) -> int:
        """The bytes of answers in asyncio's buffer, and in the kernel's until the client confirms them."""
        unsent = array("i", [0])
        with suppress(OSError, ValueError):  # the socket is closed
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unsent)
        return int(self.transport.get_write_buffer_size()) + unsent[0]

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    @property
    def _answering(self) -> bool:
        """Whether a request runs whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Times what arrives while no request runs: a head, or the rest of a body that was refused."""
        if self._answering:
            self._stop_timer()  # `Gate` times the body.
        elif self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, unless the request that they belong to has an answer.

        `Gate` answers if they are in a body. Bytes behind the last request of a connection change nothing.
        """
        if self._answering and not self.cycle.more_body:
            return
        if self._answering and not self.cycle.response_started:
            self.cycle.scope["state"][_MALFORMED] = msg
            self.cycle.message_event.set()
            return
        if self.conn.our_state is not h11.IDLE:
            self.transport.close()
            return
        self._answers.labels(400).inc()
        body = ApiError(400, msg).body.model_dump_json().encode()
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def timed_protocol(receive_seconds: float, answers: Counter) -> Any:
    """A class of connections for `uvicorn.Config(http=)`."""
    return partial(TimedProtocol, receive_seconds=receive_seconds, answers=answers)
