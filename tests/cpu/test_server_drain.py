"""The end of the server: running requests finish within the grace time, and the exit status is 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from server_example import serve
from server_example.app import Service
from server_example.client import Emit
from server_example.demo import PROMPT, free_port, start_server, stop_server, wait_until_ready
from server_example.engine import Engine
from server_example.host import Host
from server_example.messages import Job, TokenEvent
from server_example.serve import Process, listen
from server_example.settings import Settings
from tests.demo_model import demo_folder
from tests.engine_client import connected
from tests.live_server import children, server_process

__all__ = ["demo_folder"]

BODY = {"prompt": "The graph", "temperature": 0, "ignore_eos": True}

# With TLS, each call would read all certificates, which takes the CPU 20 ms.
get, post, stream = (partial(method, verify=False) for method in (httpx.get, httpx.post, httpx.stream))


def data(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_running_requests_finish_and_new_ones_are_refused(demo_folder: Path) -> None:
    with server_process(demo_folder) as (process, url):
        long = {**BODY, "max_tokens": 150, "stream": True}
        with stream("POST", f"{url}/v1/completions", json=long, timeout=60) as response:
            process.send_signal(signal.SIGTERM)
            while get(f"{url}/ready").status_code == 200:
                assert process.poll() is None
            assert get(f"{url}/health").json()["status"] == "draining"
            refused = post(f"{url}/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert "shutting down" in refused.json()["error"]["message"]
            *chunks, done = data(response)
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=20) == 0


def test_after_the_grace_time_requests_get_an_error(demo_folder: Path) -> None:
    with (
        server_process(demo_folder, "--drain-seconds", "0.3") as (process, url),
        ThreadPoolExecutor() as pool,
    ):
        long = {**BODY, "max_tokens": 1000}
        plain = pool.submit(post, f"{url}/v1/completions", json=long, timeout=60)
        with stream("POST", f"{url}/v1/completions", json={**long, "stream": True}) as response:
            while get(f"{url}/health").json()["running"] < 2:
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            *_, error, done = data(response)
        assert done == "[DONE]"
        assert "shutting down" in json.loads(error)["error"]["message"]
        answer = plain.result()
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert process.wait(timeout=20) == 0


def test_the_host_ends_once_its_last_message_is_sent() -> None:
    """Its process ends with it, and requests that end then should be told why."""
    sent: list[Any] = []

    def send(messages: list[Any]) -> None:
        time.sleep(0.1)
        sent.extend(messages)

    engine = SimpleNamespace(stop=lambda: host._send("events", 0, []), failure=None)
    pipe = SimpleNamespace(recv=lambda: (1, "stop", ()), send=send)
    host = Host(cast(Engine, engine), cast(Connection, pipe))
    host.serve()
    assert sent == [("events", 0, []), ("answer", 1, None)]


def test_a_body_that_is_on_its_way_at_the_end_of_a_drain_is_refused(
    demo_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with server_process(demo_folder, "--drain-seconds", "0.1") as (process, url):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            get(f"{url}/health")  # the server has read the head meanwhile
            process.send_signal(signal.SIGTERM)
            with client.makefile("rb") as answer:
                status, *rest = answer.read().splitlines()
        assert process.wait(timeout=20) == 0
    assert status.split()[1] == b"503" and b"shutting down" in rest[-1]
    assert "Traceback" not in capfd.readouterr().err


def test_the_end_of_the_engines_process_is_told(demo_folder: Path) -> None:
    with server_process(demo_folder) as (process, url):
        (engine,) = [pid for pid, command in children(process.pid).items() if "spawn_main" in command]
        with stream(
            "POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 900, "stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
        assert done == "[DONE]"
        assert "the engine's process has ended" in json.loads(error)["error"]["message"]
        assert process.wait(timeout=20) == 1, "a supervisor starts it anew"


def test_an_engine_that_hangs_is_ended(demo_folder: Path) -> None:
    """Its clients are told, and nothing waits for ever."""
    with (
        server_process(demo_folder, "--engine-seconds", "1", "--drain-seconds", "0.2") as (process, url),
        ThreadPoolExecutor() as pool,
    ):
        (engine,) = [pid for pid, command in children(process.pid).items() if "spawn_main" in command]
        long = {**BODY, "max_tokens": 900}
        plain = pool.submit(post, f"{url}/v1/completions", json=long, timeout=60)
        with stream("POST", f"{url}/v1/completions", json={**long, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            while get(f"{url}/health").json()["running"] < 2:
                assert process.poll() is None
            os.kill(engine, signal.SIGSTOP)
            health = get(f"{url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "silent")
            assert "not answered for 1 s" in health.json()["failure"]
            ready = get(f"{url}/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "silent"})
            for answer in (get(f"{url}/metrics"), post(f"{url}/v1/completions", json=BODY)):
                assert answer.status_code == 503
            process.send_signal(signal.SIGTERM)
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
        assert done == "[DONE]"
        assert "not answered for 1 s" in json.loads(error)["error"]["message"]
        answer = plain.result()
        assert answer.status_code == 500
        assert "not answered for 1 s" in answer.json()["error"]["message"]
        assert process.wait(timeout=20) == 1


def test_a_silent_engine_stops_neither_http_nor_deadlines(demo_folder: Path) -> None:
    """The pipe to an engine that does not read fills, and requests that run get no events."""
    with (
        server_process(demo_folder, "--engine-seconds", "1", "--request-seconds", "3") as (process, url),
        ThreadPoolExecutor(50) as pool,
    ):
        (engine,) = [pid for pid, command in children(process.pid).items() if "spawn_main" in command]
        long = {**BODY, "max_tokens": 900, "ignore_eos": True}
        ask = partial(post, f"{url}/v1/completions", timeout=60)
        late = [pool.submit(ask, json=body) for body in (long, {**long, "timeout": 2})]
        while get(f"{url}/health").json()["running"] < 2:
            assert process.poll() is None
        os.kill(engine, signal.SIGSTOP)
        assert [answer.result().status_code for answer in late] == [504, 408]
        many = [pool.submit(ask, json={**BODY, "prompt": [1] * 500}) for _ in range(300)]
        # (If the server itself stands still for a while, some find their deadline first.)
        assert {503} <= {answer.result().status_code for answer in many} <= {503, 504}
        health = get(f"{url}/health", timeout=10)
        assert (health.status_code, health.json()["status"]) == (503, "silent")
        os.kill(engine, signal.SIGCONT)
        end = time.monotonic() + 30
        while ask(json=BODY).status_code != 200:
            assert time.monotonic() < end
        assert get(f"{url}/health").json()["status"] == "ok"
        assert get(f"{url}/ready").status_code == 200


def test_the_engine_ends_with_a_server_that_is_killed(demo_folder: Path) -> None:
    with server_process(demo_folder) as (process, _):
        started = children(process.pid)
        process.kill()
        process.wait()
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() and _runs(pid) for pid in started):
            assert time.monotonic() < end, "a child outlives its server"
            time.sleep(0.1)


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return " (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_a_signal_while_the_model_loads(demo_folder: Path) -> None:
    port = free_port()
    process = start_server(demo_folder, port, "--device", "cpu")
    try:
        while True:
            with suppress(httpx.TransportError):
                get(f"http://127.0.0.1:{port}/health")
                break
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        stop_server(process)


#: A wait and a drain, again and again, while signals come at all moments.
_SIGNALLED = """
import signal
from types import SimpleNamespace
from server_example import serve
serve._POLL_SECONDS = 0
process = serve.Process.__new__(serve.Process)
engine = SimpleNamespace(failure=None, alive=True, stop=lambda seconds: True)
intake, settings = SimpleNamespace(end=lambda: None), SimpleNamespace(drain_seconds=60, engine_seconds=1)
process.service = SimpleNamespace(engine=engine, busy=True, intake=intake, settings=settings)
process._thread = SimpleNamespace(is_alive=lambda: True)
signal.signal(signal.SIGALRM, process._on_signal)
for turn in range(2000):
    process._signals = 0
    signal.setitimer(signal.ITIMER_REAL, 1e-4 + turn % 50 * 1e-6, 5e-5 + turn % 7 * 1e-6)
    assert process.wait(engine)
    process._drain(engine)
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_signals_at_any_moment_end_the_wait_and_the_drain() -> None:
    """A handler that took a lock could find it taken by the code that it interrupts, and wait for ever."""
    subprocess.run([sys.executable, "-c", _SIGNALLED], check=True, timeout=60)


def test_the_end_of_the_http_thread_is_noticed(demo_folder: Path) -> None:
    settings = Settings.model_validate({"model": demo_folder})
    with socket.socket() as sock:
        process = Process(Service(settings), sock)
        process._thread = threading.Thread(target=lambda: None)
        process._thread.start()
        with connected(demo_folder) as (_, engine):
            assert not process.wait(engine)


def test_http_ends_although_the_drain_fails(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its thread would keep the process alive for ever."""

    def fail(seconds: float) -> bool:
        raise OverflowError("broken on purpose")

    service = Service(Settings.model_validate({"model": demo_folder}))
    process = Process(service, listen("127.0.0.1", 0))
    process._thread.start()
    with connected(demo_folder) as (_, service.engine), monkeypatch.context() as patch:
        patch.setattr(service.engine, "stop", fail)
        with pytest.raises(OverflowError, match="broken on purpose"):
            process.shut_down()
        assert not process._thread.is_alive()


def test_a_drain_waits_for_answers_on_the_wire(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has ended the request, and the client reads the megabytes of its answer slowly."""
    monkeypatch.setattr(serve, "_FLUSH_SECONDS", 1)
    sock = listen("127.0.0.1", 0)
    service = Service(Settings.model_validate({"model": demo_folder}))
    process = Process(service, sock)
    content = json.dumps({"prompt": "a", "max_tokens": 100}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"

    async def submit(jobs: Sequence[Job], emits: Sequence[Emit]) -> None:
        emits[0](TokenEvent("word" * 4_000_000, 100, "length"))

    with connected(demo_folder) as (_, client):
        monkeypatch.setattr(client, "submit", submit)
        service.engine = client
        process._thread.start()
        draining = threading.Thread(target=process.shut_down)
        with socket.create_connection(sock.getsockname(), timeout=20) as reader:
            reader.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            got = reader.recv(1000)
            assert got.startswith(b"HTTP/1.1 200 ")
            draining.start()
            draining.join(1.5)
            assert service.busy and draining.is_alive()
            size = len(got)
            while size < 16_000_000:
                piece = reader.recv(1 << 20)
                assert piece
                size += len(piece)
        draining.join(20)
        assert not service.busy and not draining.is_alive() and not process._thread.is_alive()


def test_ctrl_c_while_the_engine_imports(demo_folder: Path) -> None:
    """It reaches the whole group, and the engine's process leaves it to the first one."""
    port = free_port()
    process = start_server(demo_folder, port, "--device", "cpu")
    try:
        while not (engines := [pid for pid, line in children(process.pid).items() if "spawn_main" in line]):
            assert process.poll() is None
            time.sleep(0.01)
        for _ in range(10):
            os.kill(engines[0], signal.SIGINT)
            time.sleep(0.1)
        wait_until_ready(process, f"http://127.0.0.1:{port}")
    finally:
        stop_server(process)


def test_the_demo_takes_its_server_with_it(demo_folder: Path) -> None:
    port = free_port()
    command = demo_command("--port", str(port), "--max-tokens", "2", "--model", str(demo_folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        said = ""
        while "stop with Ctrl-C. Try" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        assert "tokens/s" in said
        assert get(f"http://127.0.0.1:{port}/ready").status_code == 200
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=30) == 0
    assert free_port(port) == port


def demo_command(*arguments: str) -> list[str]:
    """The demo without the compilation of its kernels."""
    code = "import sys, server_example.demo as demo; demo.build_kernels = lambda *_: 0; sys.exit(demo.main())"
    return [sys.executable, "-c", code, *arguments]


def test_the_demos_answer_does_not_repeat_itself() -> None:
    command = demo_command("--once", "--port", "0")
    # No proxy leads to the demo's own server.
    environment = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    start = done.stdout.index(PROMPT)
    words = done.stdout[start : done.stdout.index(" tokens in ", start)].split()[:-1]
    most = Counter(zip(*(words[i:] for i in range(4)), strict=False)).most_common(1)
    assert len(words) > 20 and most[0][1] < 3, done.stdout
    assert done.stderr.count("which is slow") == 0, "what the demo says first is enough"


def test_the_demo_shows_the_message_of_an_error() -> None:
    done = subprocess.run(
        demo_command("--once", "--max-tokens", "5000"), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1
    assert "error: status 400: prompt (" in done.stderr and "lower max_tokens" in done.stderr
