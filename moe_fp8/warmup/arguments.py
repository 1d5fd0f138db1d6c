"""Command-line arguments and exit codes that `moe-fp8` and `python -m moe_fp8.warmup` share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_fp8.errors import BundleError, CompileError, ConfigError, JitError, MoeFp8Error, ToolchainError
from moe_fp8.jit.bundle import bundle_in_use
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.settings import settings
from moe_fp8.warmup.models import load_model
from moe_fp8.warmup.options import PlanOptions
from moe_fp8.warmup.planner import Plan, plan
from moe_fp8.warmup.run import default_num_sms

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TOOLCHAIN = 3
EXIT_COMPILE = 4
EXIT_DRIVER = 5
EXIT_BUNDLE = 6

MODEL_HELP = "model folder, or its config.json"

EXIT_CODES = """\
exit codes:
  0  done
  1  a check failed: kernels or requirements of the package are missing
  2  bad arguments, a bad MOE_FP8_* variable, or a model config that cannot be served
  3  no usable NVRTC (or no driver, if a GPU is required)
  4  a kernel failed to compile
  5  the CUDA driver refused to load a kernel
  6  a kernel bundle is refused, or cannot be written
"""


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the model."""
    parser.add_argument("--model", required=True, metavar="PATH", help=MODEL_HELP)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe how a model is served."""
    default = PlanOptions  # the class, because an instance would read the settings
    add_rank_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=default.max_tokens,
        help="tokens of one forward pass (default %(default)s)",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        default=default.max_batch,
        help="requests decoded together (default %(default)s)",
    )
    parser.add_argument(
        "--next-n", type=int, default=default.next_n,
        help="most tokens of a request in one decode step (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=int, default=default.block_size,
        help="tokens in a page of the indexer's cache (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--masked-rows", type=int, default=None,
        help="rows of an expert's buffer in the masked layout (default: enough for the decode batch)",
    )  # fmt: skip
    parser.add_argument(
        "--num-sms", type=int, default=None,
        help="multiprocessors to plan for (default: this machine's Hopper GPU, else 132)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-invariant", action=argparse.BooleanOptionalAction, default=None,
        help="whether the server runs with MOE_FP8_BATCH_INVARIANT on (default: this process's setting)",
    )  # fmt: skip


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe one rank's share of a model."""
    default = PlanOptions
    parser.add_argument(
        "--tp", type=int, default=default.tp, help="tensor-parallel ranks (default %(default)s)"
    )
    parser.add_argument(
        "--ep", type=int, default=default.ep, help="expert-parallel ranks (default %(default)s)"
    )
    parser.add_argument(
        "--pad-intermediate", action="store_true",
        help="the weights' intermediate sizes are padded with zeros to a multiple of 128 per rank",
    )  # fmt: skip


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of compiled kernels."""
    parser.add_argument(
        "--cache-dir", type=absolute, default=None,
        help="where compiled kernels are kept (default: $MOE_FP8_CACHE_DIR, else ~/.cache/moe_fp8)",
    )  # fmt: skip


def add_bundle_argument(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option for a kernel bundle, with the help `text`."""
    parser.add_argument("--bundle", type=absolute, default=None, metavar="DIR", help=text)


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that control compilation."""
    parser.add_argument(
        "--jobs",
        type=positive,
        default=None,
        help="compiler processes (default: $MOE_FP8_JOBS, else the number of cores)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def absolute(text: str) -> Path:
    """argparse type: a path, converted to an absolute path."""
    return Path(text).expanduser().absolute()


def positive(text: str) -> int:
    """argparse type: an integer >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {value}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """argparse type: integers >= 1, separated by commas."""
    return tuple(positive(number) for number in text.split(","))


def plan_from(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for. Raises ConfigError."""
    model = load_model(arguments.model)
    options = PlanOptions(
        tp=arguments.tp,
        ep=arguments.ep,
        max_tokens=arguments.max_tokens,
        max_batch=arguments.max_batch,
        next_n=arguments.next_n,
        num_sms=num_sms_from(arguments),
        block_size=arguments.block_size,
        masked_rows=arguments.masked_rows,
        pad_intermediate=arguments.pad_intermediate,
        batch_invariant=batch_invariant_from(arguments),
    )
    return plan(model, options)


def num_sms_from(arguments: argparse.Namespace) -> int:
    """The multiprocessors to plan for."""
    given: int | None = arguments.num_sms
    return default_num_sms() if given is None else given


def batch_invariant_from(arguments: argparse.Namespace) -> bool:
    """Whether the server is batch-invariant."""
    given: bool | None = arguments.batch_invariant
    return settings().batch_invariant if given is None else given


def store_from(arguments: argparse.Namespace) -> KernelStore:
    """The store that the arguments ask for, with the bundle of the settings; raises BundleError."""
    if arguments.cache_dir is None:
        return default_store()
    return KernelStore(arguments.cache_dir, bundle=bundle_in_use())


def exit_code(error: MoeFp8Error) -> int:
    """The documented exit code of an error."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, ToolchainError):
        return EXIT_TOOLCHAIN
    if isinstance(error, BundleError):
        return EXIT_BUNDLE
    if isinstance(error, CompileError):
        return EXIT_COMPILE
    if isinstance(error, JitError):
        return EXIT_DRIVER
    return EXIT_FAILED


def complain(error: MoeFp8Error) -> int:
    """Print `error` to stderr and return its exit code."""
    print(f"error: {error}", file=sys.stderr)
    return exit_code(error)
