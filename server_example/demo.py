"""`python -m server_example.demo [--once]`: compile the small model's kernels, serve it, send a request."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from server_example.extra import server_extra

with server_extra():
    import httpx

    from moe_fp8.errors import MoeFp8Error
    from moe_fp8.warmup import build_plan, default_num_sms
    from server_example.backend import Backend, choose_backend, plan_kernels
    from server_example.options import EngineOptions
    from server_example.settings import SHAKESPEARE

PROMPT = "Enter HAMLET and the king"
#: A small model repeats itself when it always takes the most probable token.
SAMPLING = {"temperature": 0.8, "seed": 1}
START_SECONDS = 120.0


def free_port(wanted: int = 0) -> int:
    """`wanted`, or any free port if `wanted` is 0. Raises `OSError` if another process listens there."""
    with socket.socket() as sock:
        # The server binds its socket with the same option, so connections that are still closing do not
        # count.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", wanted))
        return int(sock.getsockname()[1])


def start_server(model: Path, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "server_example", "--model", str(model), "--port", str(port), *arguments]
    return subprocess.Popen(command)


def wait_until_ready(
    server: subprocess.Popen[bytes], url: str, seconds: float = START_SECONDS
) -> dict[str, object]:
    """The body of /health once the server is ready. Raises `RuntimeError` if it exits or takes too long."""
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise RuntimeError(f"the server exited with {server.returncode} before it was ready")
            with suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    return dict(client.get("/health").json())
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {seconds:.0f} s")


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """Ends the server, and waits for its drain (`--drain-seconds`)."""
    server.terminate()
    try:
        server.wait(timeout=45)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def build_kernels(model: Path, backend: Backend) -> None:
    """Compiles every kernel that the server would launch on Hopper; needs no GPU."""
    if backend.name == "reference":
        print(
            f"The server will run plain torch on the CPU here: {backend.reason}. The kernels for Hopper\n"
            "compile all the same, as in an image that is built without a GPU.",
            flush=True,
        )
    defaults = EngineOptions()
    kernels = plan_kernels(model, defaults.prefill_chunk, defaults.max_batch, default_num_sms())
    report = build_plan(kernels)
    print(
        f"{len(report.rows)} Hopper kernels in the cache: {report.compiled} compiled now, "
        f"{report.cached} found there, {report.seconds:.1f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server_example.demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop the server after one completion")
    parser.add_argument("--model", type=Path, default=SHAKESPEARE, help="default: the small trained model")
    parser.add_argument(
        "--port", type=int, default=None, help="0: any free port; default: 8000, or 0 with --once"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    # The server is a process of its own: it must not outlive the demo.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    wanted = (0 if arguments.once else 8000) if arguments.port is None else arguments.port
    try:
        port = free_port(wanted)
    except (OSError, OverflowError) as error:
        # Without this check, the demo would ask the other process on this port, which might even answer.
        reason = getattr(error, "strerror", error)
        print(f"error: port {wanted}: {reason}; choose another with --port (make: PORT=)", file=sys.stderr)
        return 1
    try:
        backend = choose_backend()
        build_kernels(arguments.model, backend)
    except MoeFp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    url = f"http://127.0.0.1:{port}"
    # The demo asks its server without a key and on this machine, whatever the environment says.
    for name in ("API_KEY", "HOST", "PORT", "MODEL"):
        os.environ.pop(f"SERVER_EXAMPLE_{name}", None)
    # `build_kernels` has said why there is no GPU; the server need not say it again.
    device = ("--device", "cpu") if backend.name == "reference" else ()
    server = start_server(arguments.model, port, *device)
    try:
        health = wait_until_ready(server, url)
        body = {"prompt": PROMPT, "max_tokens": arguments.max_tokens, **SAMPLING}
        start = time.perf_counter()
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        seconds = time.perf_counter() - start
        answer = response.json()
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {answer['error']['message']}")
        tokens = answer["usage"]["completion_tokens"]
        print(f"\nPOST {url}/v1/completions  ({health['backend']} backend)")
        print(
            f"  {PROMPT}\033[1m{answer['choices'][0]['text']}\033[0m"
            if sys.stdout.isatty()
            else f"  {PROMPT}{answer['choices'][0]['text']}"
        )
        print(f"  {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s\n", flush=True)
        if not arguments.once:
            print(f"serving on {url}; stop with Ctrl-C. Try:")
            print(f"  curl -N {url}/v1/completions -H 'content-type: application/json' \\")
            print('    -d \'{"prompt": "In the morning", "max_tokens": 40, "stream": true}\'', flush=True)
            return server.wait()
    except KeyboardInterrupt:
        print()
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        stop_server(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
