"""The end of the server: running requests finish within the grace time, and the exit status is 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx

from server_example.demo import free_port, start_server, stop_server
from tests.demo_model import demo_folder
from tests.live_server import server_process

__all__ = ["demo_folder"]

BODY = {"prompt": "The graph", "temperature": 0, "ignore_eos": True}


def data(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_running_requests_finish_and_new_ones_are_refused(demo_folder: Path) -> None:
    with server_process(demo_folder) as (process, url):
        stream = {**BODY, "max_tokens": 150, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=stream, timeout=60) as response:
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/ready").status_code == 200:
                assert process.poll() is None
            assert httpx.get(f"{url}/health").json()["status"] == "draining"
            refused = httpx.post(f"{url}/v1/completions", json=BODY)
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
        plain = pool.submit(httpx.post, f"{url}/v1/completions", json=long, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json={**long, "stream": True}) as response:
            while httpx.get(f"{url}/health").json()["running"] < 2:
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            *_, error, done = data(response)
        assert done == "[DONE]"
        assert "shutting down" in json.loads(error)["error"]["message"]
        answer = plain.result()
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert process.wait(timeout=20) == 0


def test_a_signal_while_the_model_loads(demo_folder: Path) -> None:
    port = free_port()
    process = start_server(demo_folder, port, "--device", "cpu")
    try:
        while True:
            with suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        stop_server(process)


def test_the_demo_takes_its_server_with_it(demo_folder: Path) -> None:
    port = free_port()
    # The demo without the compilation of its kernels.
    code = "import sys, server_example.demo as demo; demo.build_kernels = lambda model: None; demo.main()"
    command = [
        sys.executable,
        "-c",
        code,
        "--port",
        str(port),
        "--max-tokens",
        "2",
        "--dir",
        str(demo_folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        said = ""
        while "stop with Ctrl-C. Try" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        assert "untrained" in said
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=30) == 0
    assert free_port(port) == port
