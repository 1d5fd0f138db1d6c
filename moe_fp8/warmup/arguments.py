"""Command-line arguments and exit codes that `moe-fp8` and `python -m moe_fp8.warmup` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

from moe_fp8.errors import (
    BundleError,
    CompileError,
    ConfigError,
    JitError,
    MoeFp8Error,
    ToolchainError,
    requirements_needed,
)
from moe_fp8.jit.bundle import bundle_in_use
from moe_fp8.jit.progress import lossy_output
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.settings import settings
from moe_fp8.warmup.engines import ENGINES
from moe_fp8.warmup.models import ModelDescription, load_model
from moe_fp8.warmup.models.quantization import QUANTIZE
from moe_fp8.warmup.options import PlanOptions
from moe_fp8.warmup.planner import Plan, plan
from moe_fp8.warmup.run import default_num_sms
from moe_fp8.warmup.shapes import GemmShape, Parallelism, parse_shape
from moe_fp8.warmup.stored import stored_plan

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TOOLCHAIN = 3
EXIT_COMPILE = 4
EXIT_DRIVER = 5
EXIT_BUNDLE = 6
EXIT_INTERRUPTED = 130

MODEL_HELP = "model folder, or its config.json"

EXIT_CODES = """\
exit codes:
    0  done
    1  kernels or requirements are missing, kernels could not be kept on disk, or any other error
    2  bad arguments, a bad MOE_FP8_* variable, or a model config that cannot be served
    3  no usable NVRTC (or no driver, if a GPU is required)
    4  a kernel failed to compile
    5  the CUDA driver refused to load a kernel
    6  a kernel bundle is refused, or cannot be written
  130  interrupted by Ctrl-C
"""


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the model."""
    parser.add_argument("--model", required=True, metavar="PATH", help=MODEL_HELP)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan."""
    add_serving_arguments(parser)
    parser.add_argument(
        "--strict", action="store_true", help="fail if a linear layer with FP8 weights cannot be planned"
    )


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--next-n", type=one_or_more, default=default.next_n, metavar="N[,N...]",
        help="most tokens of a request in one decode step; with commas: all numbers that occur "
        "(default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=one_or_more, default=default.block_size, metavar="TOKENS[,...]",
        help="tokens in a page of the indexer's cache (default: 64, or what --engine may choose)",
    )  # fmt: skip
    parser.add_argument(
        "--masked-rows", type=int, default=None,
        help="rows of an expert's buffer in the masked layout (default: enough for the decode batch; with "
        "--engine enough for a pass, since both engines prefill in this layout)",
    )  # fmt: skip
    parser.add_argument(
        "--num-sms", type=one_or_more, default=None, metavar="SMS[,SMS...]",
        help="multiprocessors to plan for; with commas, if some calls leave SMs to communication "
        "(default: this machine's Hopper GPU, else 132)",
    )  # fmt: skip
    parser.add_argument(
        "--out-dtypes", type=lambda text: tuple(text.split(",")), default=default.out_dtypes,
        metavar="DTYPE[,DTYPE]", help="dtypes of the GEMMs' outputs: bfloat16, float32 (default bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-invariant", nargs="?", choices=tuple(_BATCH_INVARIANT), const="on", default=None,
        help="whether the server runs with MOE_FP8_BATCH_INVARIANT on, or both with it and without it "
        "(default: this process's setting)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), default=None,
        help="plan only what this engine calls (default: every call that the ops serve)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-gradients", action="store_true",
        help="plan the weight gradients of every GEMM too, which training computes",
    )  # fmt: skip
    parser.add_argument(
        "--gemm", action="append", default=[], metavar="LAYOUT:N:K:EXPERTS",
        help="plan this GEMM too, such as dense:4096:7168 or masked:4096:7168:32; may be repeated",
    )  # fmt: skip


_BATCH_INVARIANT: dict[str, bool | tuple[bool, ...]] = {"on": True, "off": False, "both": (False, True)}


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe one rank's share of a model, and how its config is read."""
    default = PlanOptions
    parser.add_argument(
        "--tp", type=int, default=default.tp, help="tensor-parallel ranks (default %(default)s)"
    )
    parser.add_argument(
        "--ep", type=int, default=default.ep, help="expert-parallel ranks (default %(default)s)"
    )
    for name, text in (
        ("attention", "attention; 1 with data-parallel attention"),
        ("mlp", "dense MLPs"),
        ("shared", "shared experts; 1 if every rank has them whole"),
        ("moe", "each routed expert"),
    ):
        parser.add_argument(
            f"--{name}-tp", type=int, default=None,
            help=f"ranks that split {text} (default: what --tp and --ep give)",
        )  # fmt: skip
    parser.add_argument(
        "--redundant-experts", type=int, default=default.redundant_experts,
        help="copies of experts on all ranks together, as with EPLB (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fuse-shared", action="store_true",
        help="the engine computes shared experts as further routed experts (E + 1)",
    )  # fmt: skip
    parser.add_argument(
        "--pad-intermediate", action="store_true",
        help="the weights' intermediate sizes are padded with zeros to a multiple of 128 per rank",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", choices=QUANTIZE, default=None,
        help="the engine quantizes a bf16 checkpoint to FP8 blocks while it loads it",
    )  # fmt: skip
    parser.add_argument(
        "--read-as", default=None, metavar="MODEL_TYPE",
        help="for a model of an unknown architecture: the known architecture that has the same layers",
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
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # a user without a home directory
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """argparse type: an integer >= 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """argparse type: an integer >= 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """argparse type: integers >= 1, separated by commas."""
    return tuple(positive(number) for number in text.split(","))


def one_or_more(text: str) -> int | tuple[int, ...]:
    """argparse type: an integer >= 1, or several with commas."""
    numbers = counts(text)
    return numbers if "," in text else numbers[0]


def plan_from(arguments: argparse.Namespace, store: KernelStore | None = None) -> Plan:
    """The plan that the arguments ask for; a note on stderr names what it lacks. Raises ConfigError.

    With a `store`, a plan that it has is read, and a new plan is kept there.
    """
    model = model_from(arguments.model, arguments)
    extra = extra_from(arguments)
    options, strict = options_from(arguments), arguments.strict
    if store is None:
        planned = plan(model, options, extra=extra, strict=strict)
    else:
        planned = stored_plan(model, options, store, extra=extra, strict=strict)
    if planned.lacking:
        listed = "; ".join(map(str, planned.lacking))
        remedy = f"; {planned.remedy}" if planned.remedy else ""
        print(f"note: other kernels must serve {listed}{remedy}", file=sys.stderr)
    return planned


def model_from(path: str, arguments: argparse.Namespace) -> ModelDescription:
    """The model in `path`, read as the arguments say. Raises ModelError."""
    return load_model(path, quantize=arguments.quantize, read_as=arguments.read_as)


def extra_from(arguments: argparse.Namespace) -> list[GemmShape]:
    """Further GEMMs of the server. Raises ConfigError."""
    return [parse_shape(text, "--gemm") for text in arguments.gemm]


def parallelism_from(arguments: argparse.Namespace) -> Parallelism:
    """A rank's share of a model. Raises ConfigError."""
    return Parallelism(**{one.name: getattr(arguments, one.name) for one in fields(Parallelism)})


def options_from(arguments: argparse.Namespace) -> PlanOptions:
    """The options of a plan. Raises ConfigError."""
    given = {one.name: getattr(arguments, one.name) for one in fields(PlanOptions)}
    given["num_sms"] = num_sms_from(arguments)
    given["batch_invariant"] = batch_invariant_from(arguments)
    return PlanOptions(**given)


def num_sms_from(arguments: argparse.Namespace) -> int | tuple[int, ...]:
    """The multiprocessors to plan for."""
    given: int | tuple[int, ...] | None = arguments.num_sms
    return default_num_sms() if given is None else given


def batch_invariant_from(arguments: argparse.Namespace) -> bool | tuple[bool, ...]:
    """Whether the server is batch-invariant."""
    given: str | None = arguments.batch_invariant
    return settings().batch_invariant if given is None else _BATCH_INVARIANT[given]


def store_from(arguments: argparse.Namespace) -> KernelStore:
    """The store that the arguments ask for, with the bundle of the settings; raises BundleError."""
    if arguments.cache_dir is None:
        return default_store()
    return KernelStore(arguments.cache_dir, bundle=bundle_in_use())


#: What ends a command with one line on stderr.
Failure: TypeAlias = MoeFp8Error | OSError | KeyboardInterrupt


def run_command(command: Callable[[], int]) -> int:
    """Run `command`, which returns an exit code; for a failure, print one line and return the failure's code.

    Output that nobody can read, because a stream is closed or its reader has left, changes neither the work
    nor the code. If stdout takes no more for another reason, such as a full disk, this is an error.
    """
    with lossy_output() as out:
        try:
            with requirements_needed():
                code = command()
        except (MoeFp8Error, OSError, KeyboardInterrupt) as failure:
            code = complain(failure)
        out.flush()
        if out.error is not None and not isinstance(out.error, BrokenPipeError):
            lost = complain(out.error)
            code = code or lost
        return code


def exit_code(failure: Failure) -> int:
    """The documented exit code of a failure."""
    if isinstance(failure, ConfigError):
        return EXIT_USAGE
    if isinstance(failure, ToolchainError):
        return EXIT_TOOLCHAIN
    if isinstance(failure, BundleError):
        return EXIT_BUNDLE
    if isinstance(failure, CompileError):
        return EXIT_COMPILE
    if isinstance(failure, JitError):
        return EXIT_DRIVER
    if isinstance(failure, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_FAILED


def complain(failure: Failure) -> int:
    """Print `failure` to stderr and return its exit code."""
    kind = "interrupted" if isinstance(failure, KeyboardInterrupt) else "error"
    print(": ".join(filter(None, (kind, str(failure)))), file=sys.stderr)
    return exit_code(failure)
