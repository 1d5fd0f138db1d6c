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
    for _ in range(20):
        with connect(server) as sock:
            sock.sendall(head + b'content-length: 90\r\n\r\n{"prompt": ')
    state = server.get("/health").json()
    assert (state["running"], state["waiting"], state["free_pages"]) == (0, 0, state["total_pages"])
