"""Class http: the example server under load, from clients that each keep one stream open.

`python -m benchmarks.http --url http://127.0.0.1:8000` measures a server that runs, on any backend, and
prints a JSON object for each number of streams. `python -m benchmarks --class http` starts servers of the
example model, with graphs and without, and stores the rows. The same load without HTTP tells what HTTP costs:
jobs go through the engine's pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .load import Load, Seen, hold, idle, samples
from .results import IN_A_ROW, Row, four_digits
from .serve import replay_microseconds, shakespeare_engine

if TYPE_CHECKING:
    from .compare import Session
    from .peer import DeepGemm

#: Streams and tokens of an answer of each row, and the seconds of each of its loads.
_LOADS, _SECONDS = ((1, 128), (8, 128), (64, 128), (64, 512), (256, 128)), 8.0
#: Most tokens of the prompts that are prefilled together.
_PREFILL_CHUNK = 1024


def run_http(session: Session, peer: DeepGemm | None, step: int) -> None:
    """`us` is the mean decode step with all that HTTP and scheduling add; `peer` has no server.

    "replay, us" in the notes is the graph of the same batch, replayed in a row before and after the load.
    """
    # The other classes run without the server's dependencies.
    from server_example.demo import free_port, start_server, stop_server, wait_until_ready
    from server_example.pages import PAGE_TOKENS
    from server_example.settings import SHAKESPEARE

    loads = [Load("127.0.0.1", 0, streams, _SECONDS, max_tokens=answer) for streams, answer in _LOADS[::step]]
    most = max(load.streams for load in loads)
    context = max(load.prompt_tokens + load.max_tokens for load in loads)
    pages = 1 + most * -(-context // PAGE_TOKENS)
    options = ["--max-batch", str(most), "--max-waiting", str(most), "--cache-pages", str(pages)]
    options += ["--prefill-chunk", str(_PREFILL_CHUNK), "--drain-seconds", "1"]
    seen: dict[str, list[Seen]] = {}
    replays: list[float] = []
    engine = shakespeare_engine(most, context)
    for decode in ("graph", "eager"):
        with ExitStack() as stack:
            port = free_port()
            process = start_server(SHAKESPEARE, port, *options, "--decode", decode)
            stack.callback(stop_server, process)
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            seen[decode] = []
            for load in loads:
                replay = partial(replay_microseconds, engine, load.streams, _mean_context(load))
                times = [replay()] if decode == "graph" else []
                seen[decode].append(measure(replace(load, port=port, pid=process.pid)))
                if times:
                    replays.append((times[0] + replay()) / 2)
    alone = [asyncio.run(without_http(SHAKESPEARE, options, load)) for load in loads]
    for load, graph, eager, piped, replay_us in zip(
        loads, seen["graph"], seen["eager"], alone, replays, strict=True
    ):
        errors = [*graph.errors, *eager.errors]
        if not all(_step_seconds(one, "decode")[1] for one in (graph, eager)):
            errors.append("no decode step without a prefill in the time that is measured")
        if errors:
            session.fail(f"http, {load.streams} streams", RuntimeError(errors[0]))
            continue
        shape = {
            "model": SHAKESPEARE.name, "streams": load.streams, "prompt": load.prompt_tokens,
            "answer": load.max_tokens,
        }  # fmt: skip
        notes = figures(graph)
        row = Row("http", shape, notes["decode step, us"])
        row.notes = {
            **notes, "replay, us": four_digits(replay_us), "replays": IN_A_ROW,
            "added": four_digits(row.us / replay_us - 1),
            "eager": figures(eager), "without HTTP": figures(piped),
        }  # fmt: skip
        row.peers["eager"] = row.notes["eager"]["decode step, us"]
        session.store(row)


def _mean_context(load: Load) -> int:
    return load.prompt_tokens + load.max_tokens // 2


def measure(load: Load) -> Seen:
    """One load, and then a server without requests; pages that are not free again count as an error."""

    async def both() -> Seen:
        seen = await hold(load)
        state = await idle(load)
        if state["free_pages"] != state["total_pages"]:
            seen.errors.append(f"{state['free_pages']} of {state['total_pages']} pages are free at the end")
        return seen

    return asyncio.run(both())


async def without_http(folder: Path, options: list[str], load: Load) -> Seen:
    """The load on an engine's process without HTTP; only what the engine itself counts is seen."""
    from server_example.client import EngineClient
    from server_example.host import run_engine
    from server_example.messages import Job, SamplingParams
    from server_example.serve import read_settings

    settings = read_settings(["--model", str(folder), *options])
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=run_engine, args=(settings, far))
    process.start()
    far.close()
    kind, _, served = near.recv()
    if kind != "ready":
        raise RuntimeError(served)
    client = EngineClient(folder, served, near)
    params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
    end = time.monotonic() + load.seconds

    async def answer(prompt: list[int]) -> None:
        ended = asyncio.Event()
        job = Job(client.job_number(), prompt, params)
        await client.submit([job], [lambda event: ended.set() if event.finish_reason else None])
        await ended.wait()

    async def stream(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            await answer([draw.randrange(1, served.vocab_size) for _ in range(load.prompt_tokens)])

    tasks = [asyncio.create_task(stream(number)) for number in range(load.streams)]
    await asyncio.sleep(min(load.settle, load.seconds / 2))
    seen, begun = Seen(before=samples((await client.call("metrics")).decode())), time.monotonic()
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    seen.after, seen.seconds = samples((await client.call("metrics")).decode()), time.monotonic() - begun
    seen.tokens = seen.grew("server_generated_tokens_total")
    await asyncio.gather(*tasks)
    await asyncio.to_thread(client.stop, 10.0)
    process.join(20)
    process.kill()
    return seen


def figures(seen: Seen) -> dict[str, Any]:
    """What a row tells. A decode step is one without a prefill; it includes the scheduling."""
    steps = {phase: _step_seconds(seen, phase) for phase in ("decode", "prefill")}
    decode, count = steps["decode"]
    batches = max(1.0, seen.grew("server_batch_size_count"))
    return {
        "tokens/s": four_digits(seen.tokens / seen.seconds),
        **_percentiles("first token", seen.first_token),
        **_percentiles("between tokens", seen.gaps),
        "batch": four_digits(seen.grew("server_batch_size_sum") / batches),
        "decode step, us": four_digits(1e6 * decode / max(1.0, count)),
        "share of prefill": four_digits(steps["prefill"][0] / seen.seconds),
        "share of decode": four_digits(decode / seen.seconds),
        "finished": seen.finished,
        "refused": seen.refused,
        "misses": seen.after["moe_fp8_jit_misses"],
    }


def _step_seconds(seen: Seen, phase: str) -> tuple[float, float]:
    """The seconds of all steps of a phase, and their number."""
    name = "server_step_seconds"
    return seen.grew(f'{name}_sum{{phase="{phase}"}}'), seen.grew(f'{name}_count{{phase="{phase}"}}')


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    if not cuts:
        return {}
    return {f"{name}, p50 ms": four_digits(1e3 * cuts[49]), f"{name}, p99 ms": four_digits(1e3 * cuts[98])}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="Load the example server that runs at --url. SERVER_EXAMPLE_API_KEY is its key.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument(
        "--streams", default="1,8,64,256", help="one load after the other (default: %(default)s)"
    )
    for option, default, text in (
        ("--seconds", 60.0, "of each load"),
        ("--prompt-tokens", 128, "of each request"),
        ("--max-tokens", 128, "of each answer"),
        ("--leaving", 0, "clients that close their connections midway"),
        ("--slow", 0, "clients that read slowly"),
    ):
        parser.add_argument(
            option, type=type(default), default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    return parser


def main() -> int:
    """0 if there was no error but honest refusals, and every page is free after each load."""
    options = _parser().parse_args()
    url = urlsplit(options.url)
    failed = False
    for streams in (int(count) for count in options.streams.split(",")):
        load = Load(
            url.hostname or "127.0.0.1", url.port or 80, streams, options.seconds,
            prompt_tokens=options.prompt_tokens, max_tokens=options.max_tokens, leaving=options.leaving,
            slow=options.slow, key=os.environ.get("SERVER_EXAMPLE_API_KEY"), pid=options.pid,
        )  # fmt: skip
        try:
            seen = measure(load)
        except OSError as error:  # also for a host that has no address, or several
            print(f"FAILED cannot load {options.url}: {error}", file=sys.stderr)
            return 1
        told = {"streams": streams, **figures(seen), "left": seen.left, "errors": sorted(set(seen.errors))}
        if len(seen.memory) >= 8:
            told["memory grew in an eighth, MiB"] = four_digits(seen.memory_grew / 2**20)
        print(json.dumps(told), flush=True)
        failed = failed or bool(seen.errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
