"""`python -m server_example --model DIR`: plan, load, capture, freeze, serve."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import uvicorn

from moe_fp8.errors import MoeFp8Error
from server_example.app import create_app
from server_example.backend import Backend, choose_backend, freeze_kernels, load_kernels, plan_options
from server_example.cache import PAGE_TOKENS
from server_example.engine import Engine, EngineOptions

logger = logging.getLogger("server_example")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = EngineOptions()
    parser = argparse.ArgumentParser(prog="python -m server_example", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with a DeepSeek-V3.2 checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a Hopper GPU if there is one, else the reference backend",
    )
    parser.add_argument("--max-batch", type=int, default=defaults.max_batch, help="requests decoded together")
    parser.add_argument(
        "--max-context", type=int, default=defaults.max_context, help="tokens of a request, prompt included"
    )
    parser.add_argument(
        "--cache-pages",
        type=int,
        default=defaults.cache_pages,
        help=f"pages of {PAGE_TOKENS} tokens, and one",
    )
    parser.add_argument(
        "--prefill-chunk", type=int, default=defaults.prefill_chunk, help="tokens prefilled at once"
    )
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="requests in the queue")
    return parser.parse_args(arguments)


def prepare_engine(folder: Path, backend: Backend, options: EngineOptions) -> Engine:
    """An engine that is ready to start; on CUDA kernels are loaded and frozen, and graphs are captured."""
    start = time.perf_counter()
    if backend.name == "cuda":
        kernels = plan_options(options.prefill_chunk, options.max_batch, backend.num_sms, PAGE_TOKENS)
        load_kernels(folder, kernels)
        # Freeze before the capture: a kernel that the plan lacks should end the start, not a request.
        freeze_kernels()
    engine = Engine(folder, backend, options)
    engine.warm_up()
    captured = f", graphs for batches of {list(engine.runner.captured)}" if engine.runner.captured else ""
    logger.info("ready after %.1f s%s", time.perf_counter() - start, captured)
    return engine


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        options = EngineOptions(
            max_batch=arguments.max_batch,
            max_context=arguments.max_context,
            cache_pages=arguments.cache_pages,
            prefill_chunk=arguments.prefill_chunk,
            max_waiting=arguments.max_waiting,
        )
        backend = choose_backend(arguments.device)
        logger.info("backend: %s on %s (%s)", backend.name, backend.description, backend.reason)
        engine = prepare_engine(arguments.model, backend, options)
    except MoeFp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    uvicorn.run(
        create_app(engine),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )
    return 0 if engine.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
