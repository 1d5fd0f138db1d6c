"""Startup script: plan a model, build missing kernels, and load all kernels if there is a Hopper GPU.

Progress goes to stderr; stdout gets one line of JSON, also if the script fails, unless an argument is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from moe_fp8.errors import MoeFp8Error, ToolchainError, requirements_needed
from moe_fp8.jit.progress import show_time
from moe_fp8.jit.runtime import KernelRuntime
from moe_fp8.warmup.arguments import (
    EXIT_CODES,
    EXIT_OK,
    add_build_arguments,
    add_model_argument,
    add_plan_arguments,
    add_store_arguments,
    complain,
    plan_from,
    run_command,
    store_from,
)
from moe_fp8.warmup.run import build_plan, demand_kept, hopper_device

#: The most characters of an error's message in the line of JSON.
_MESSAGE = 500


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_fp8.warmup",
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_argument(parser)
    add_plan_arguments(parser)
    add_store_arguments(parser)
    add_build_arguments(parser)
    parser.add_argument("--require-gpu", action="store_true", help="fail if the kernels cannot be loaded")
    return parser


def _warm(arguments: argparse.Namespace, summary: dict[str, Any]) -> None:
    started = time.perf_counter()
    store = store_from(arguments)
    with show_time("planning", arguments.quiet):
        plan = plan_from(arguments, store)
    summary["num_sms"] = plan.options.num_sms
    summary["kernels"] = len(plan.specs)
    summary["plan_seconds"] = round(time.perf_counter() - started, 3)

    report = build_plan(plan, store, jobs=arguments.jobs, progress=False if arguments.quiet else None)
    summary["compiled"] = report.compiled
    summary["cached"] = report.cached
    summary["spilling"] = sum(row.spill_bytes > 0 for row in report.rows)
    summary["build_seconds"] = round(report.seconds, 3)

    device = hopper_device()
    summary["device"] = None if device is None else device.name
    summary["loaded"] = 0
    if device is not None:
        started = time.perf_counter()
        summary["loaded"] = KernelRuntime(store).preload(plan.specs)
        summary["load_seconds"] = round(time.perf_counter() - started, 3)
    elif arguments.require_gpu:
        raise ToolchainError(
            "there is no Hopper GPU here to load the kernels on; omit --require-gpu to build them only, "
            "or run `moe-fp8 doctor`"
        )
    # The loaded kernels end with this process.
    demand_kept(report, store)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the startup script and return the exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    summary: dict[str, Any] = {"model": arguments.model, "ok": True}
    code = EXIT_OK
    try:
        with requirements_needed():
            _warm(arguments, summary)
    except (MoeFp8Error, OSError, KeyboardInterrupt) as failure:
        code = complain(failure)
        message = " ".join((str(failure) or "interrupted").split())[:_MESSAGE]
        summary.update(ok=False, error=type(failure).__name__, message=message)
    print(json.dumps(summary))
    return code


if __name__ == "__main__":
    sys.exit(main())
