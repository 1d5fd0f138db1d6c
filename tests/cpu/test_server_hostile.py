"""Broken requests, and clients that send or read too slowly: each gets its answer, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.demo_model import demo_folder
from tests.live_server import live_server

__all__ = ["demo_folder"]

RECEIVE_SECONDS = 1.0
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
LONG = {"prompt": "The graph", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions")
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(demo_folder: Path) -> Iterator[httpx.Client]:
    with live_server(demo_folder, "--receive-seconds", str(RECEIVE_SECONDS)) as client:
        yield client
        assert client.get("/health").json()["status"] == "ok"


def connect(server: httpx.Client, buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(20)
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((server.base_url.host, server.base_url.port or 0))
    return sock


def answer(sock: socket.socket) -> bytes:
    got = b""
    while piece := sock.recv(65536):
        got += piece
    return got


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{bad",
        b'{"prompt": "a"',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"null",
        b'"a"',
        b"[]",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_object_is_refused(server: httpx.Client, path: str, body: bytes) -> None:
    response = server.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATHS[0], {"prompt": "a", "made_up": 1}, "made_up"),
        (PATHS[1], {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt"),
        (PATHS[1], {"messages": [{"role": "user", "content": "a", "made_up": 1}]}, "messages[0].made_up"),
        (PATHS[1], {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (PATHS[1], {"messages": [{"role": "root", "content": "a"}]}, "messages[0].role"),
        (PATHS[1], {"messages": "a"}, "messages"),
        (PATHS[1], {"messages": []}, "messages"),
        (PATHS[1], {"messages": [{"role": "user", "content": "a"}], "top_logprobs": True}, "top_logprobs"),
    ],
)
def test_a_wrong_field_is_named(server: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, content=json.dumps(body), headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "head",
    [
        "content-length: -1",
        "content-length: many",
        "content-length: 3\r\ncontent-length: 4",
        "no colon",
    ],
    ids=lambda head: head[:20],
)
def test_a_wrong_head_is_refused_in_the_same_form(server: httpx.Client, head: str) -> None:
    with connect(server) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n".encode())
        status, _, body = answer(sock).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_length_beside_chunks_is_refused_and_its_connection_closed(server: httpx.Client) -> None:
    """A proxy that goes by the length would take the second request for a part of the first."""
    with connect(server) as sock:
        sock.sendall(
            f"{HEAD}content-length: 36\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
            "GET /ready HTTP/1.1\r\nhost: a\r\n\r\n".encode()
        )
        got = answer(sock)
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_request_that_trickles_is_ended(server: httpx.Client, part: str) -> None:
    """Each byte comes in time, but the request does not."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    sent = head if part == "head" else head + b"content-length: 900\r\n\r\n"
    start = time.monotonic()
    got = b""
    with connect(server) as sock:
        sock.sendall(sent)
        sock.settimeout(0.1)
        while time.monotonic() - start < 10:
            try:
                got = sock.recv(65536)
                break
            except TimeoutError:
                with suppress(ConnectionError):  # the server has closed meanwhile
                    sock.sendall(b"x")
            except ConnectionError:  # a byte came behind the end
                break
    assert RECEIVE_SECONDS * 0.9 < time.monotonic() - start < 10
    assert got == b"" if part == "head" else got.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_reads_nothing_loses_its_connection(server: httpx.Client) -> None:
    """Its answers are more than the buffers hold, so the server waits for it, but not for ever."""
    start = time.monotonic()
    with connect(server, buffer=4096) as sock, pytest.raises(ConnectionError):
        sock.setblocking(False)
        left = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n" * 2000
        while time.monotonic() - start < 20:
            with suppress(BlockingIOError):
                left = left[sock.send(left or b"G") :]
            time.sleep(0.01)
    assert time.monotonic() - start > RECEIVE_SECONDS * 0.9


def test_a_client_that_reads_all_the_time_keeps_its_connection(server: httpx.Client) -> None:
    """Its reading empties the kernel's buffers long before asyncio's buffer."""
    start, got = time.monotonic(), 0
    with connect(server) as sock:
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n" * 1000)
        while time.monotonic() - start < RECEIVE_SECONDS * 4:
            new = len(sock.recv(8192))
            assert new
            got += new
            time.sleep(0.02)
    assert got > 100_000


def test_a_client_that_reads_slowly_gets_everything(server: httpx.Client) -> None:
    body = {"prompt": "The graph", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    whole = server.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text = ""
    with server.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            time.sleep(RECEIVE_SECONDS / 20)
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == whole


def test_a_client_that_vanishes_midway_through_its_body_leaves_nothing(server: httpx.Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    before = values(server, "server_http_answers_total").get("499", 0)
    for _ in range(20):
        with connect(server) as sock:
            # The JSON is whole, and the body is not.
            sock.sendall(head + b'content-length: 90\r\n\r\n{"prompt": "The graph"}')
    end = time.monotonic() + 20
    while values(server, "server_http_answers_total").get("499", 0) < before + 20:
        assert time.monotonic() < end
    state = server.get("/health").json()
    assert (state["running"], state["waiting"], state["free_pages"]) == (0, 0, state["total_pages"])


def completion(**body: object) -> bytes:
    content = json.dumps(body).encode()
    return f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content


def until_running(server: httpx.Client, number: int) -> float:
    """The seconds until so many requests run."""
    start = time.monotonic()
    while server.get("/health").json()["running"] != number:
        assert time.monotonic() - start < 30
    return time.monotonic() - start


def values(server: httpx.Client, metric: str) -> dict[str, float]:
    """The values of a metric by its one label."""
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(metric + "{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "further", [b"\r\n", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["line", "request"]
)
def test_a_client_that_leaves_after_further_bytes_is_noticed(
    server: httpx.Client, further: bytes, stream: bool
) -> None:
    before = values(server, "server_requests_total").get("cancelled", 0)
    with connect(server) as sock:
        sock.sendall(completion(**LONG, stream=stream))
        until_running(server, 1)
        sock.sendall(further)
        time.sleep(0.1)
    until_running(server, 0)
    assert values(server, "server_requests_total")["cancelled"] == before + 1


def test_requests_that_wait_for_their_turn_are_answered(server: httpx.Client) -> None:
    with connect(server) as sock:
        sock.sendall(completion(**LONG | {"max_tokens": 40}))
        until_running(server, 1)
        sock.sendall(completion(prompt="a", max_tokens=2) + b"GET /ready HTTP/1.1\r\nhost: a\r\n")
        time.sleep(0.1)
        sock.sendall(b"connection: close\r\n\r\n")
        answers = answer(sock).split(b"HTTP/1.1 200 ")
    assert [b'"length"' in each for each in answers] == [False, True, True, False]
    assert answers[0] == b"" and b'{"status":"ok"}' in answers[3]


def test_a_flood_of_requests_behind_a_running_one_is_not_read(server: httpx.Client) -> None:
    """The server keeps little of it: the rest waits in the kernel's buffers and with the client."""
    sent = 0
    with connect(server) as sock:
        sock.sendall(completion(**LONG, stream=True))
        until_running(server, 1)
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while sent < 64 << 20:
                sent += sock.send(b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n" * 5000)
        assert server.get("/health").json()["running"] == 1, "it ended before the flood did"
    until_running(server, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_behind_the_last_request_do_not_end_its_answer(server: httpx.Client, stream: bool) -> None:
    request = completion(**LONG | {"max_tokens": 40}, stream=stream)
    with connect(server) as sock:
        sock.sendall(request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        until_running(server, 1)
        sock.sendall(b"\r\n")
        got = answer(sock)
    assert got.count(b"HTTP/1.1 ") == 1 and got.count(b'"length"') == 1


def test_each_answer_is_counted_once(server: httpx.Client) -> None:
    def counted(sent: bytes) -> tuple[dict[str, float], bytes]:
        """The answers that are counted while `sent` is answered, but those of /metrics, and the answer."""
        before = values(server, "server_http_answers_total")
        with connect(server) as sock:
            sock.sendall(sent)
            got = b"" if sent.endswith(b"{") else answer(sock)
        time.sleep(0.1)
        after = values(server, "server_http_answers_total")
        grown = {status: after[status] - before.get(status, 0) for status in after}
        return {status: count for status, count in grown.items() if count and status != "200"}, got

    chunked = f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode()
    for malformed in (b"what\r\n\r\n", chunked + b"zz\r\n", chunked + b"1\r\n{\r\nzz\r\n"):
        grown, got = counted(malformed)
        assert grown == {"400": 1} and got.count(b"HTTP/1.1 400 ") == got.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in got.lower() and b'"error"' in got
    ready = b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n"
    grown, got = counted(ready + b"what\r\n\r\n")
    assert grown == {"400": 1} and got.count(b"HTTP/1.1 ") == 2
    grown, _ = counted(f"{HEAD}content-length: 90\r\n\r\n".encode() + b"{")
    assert grown == {"499": 1}
