"""The command `moe-fp8 tune`."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from moe_fp8.errors import ConfigError
from moe_fp8.warmup.arguments import (
    EXIT_OK,
    add_build_arguments,
    add_rank_arguments,
    counts,
    model_from,
    natural,
    parallelism_from,
    positive,
)


def _factor(text: str) -> float:
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return value


def _number(text: str) -> float:
    """The number, or NaN, which is in no range, for another text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--model", action="append", default=[], metavar="PATH",
        help="model folder, or its config.json: tune the GEMMs of one rank; may be repeated",
    )  # fmt: skip
    add_rank_arguments(parser)
    parser.add_argument(
        "--shape", action="append", default=[], metavar="LAYOUT:N:K:EXPERTS",
        help="tune this GEMM, such as dense:4096:7168 or masked:4096:7168:32; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=counts, default=counts("1,8,16,32,64,128"), metavar="ROWS",
        help="numbers of rows, of each expert if there are several (default 1,8,16,32,64,128)",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=natural, default=0, metavar="COUNT",
        help="time this number of random GEMMs, for a later --fit; needs --timings",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the GEMMs that --sample draws (default %(default)s)"
    )
    parser.add_argument(
        "--factor", type=_factor, default=1.6,
        help="try tiles with a predicted cost of at most this many times the least (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--replays",
        type=positive,
        default=11,
        help="replays of each timing, whose median counts (default %(default)s)",
    )
    parser.add_argument(
        "--max-seconds", type=_seconds, default=float("inf"),
        help="begin no more timings after this time and write the timings so far (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=None, help="table to correct (default: the package's for this device)"
    )
    parser.add_argument(
        "--timings", type=Path, default=None, metavar="FILE",
        help="add every timing to this file; without --out no table is corrected",
    )  # fmt: skip
    parser.add_argument(
        "--fit", action="store_true", help="time nothing: fit the cost model to the timings of --timings"
    )
    parser.add_argument(
        "--table", action="store_true", help="time nothing: make the device's table from those of --timings"
    )
    add_build_arguments(parser)


def run_tune(arguments: argparse.Namespace) -> int:
    """Run the command, with arguments of `add_tune_arguments` and --json; return the exit code."""
    from moe_fp8 import tune  # which needs torch

    if arguments.fit or arguments.table:
        if arguments.timings is None:
            raise ConfigError("--fit, --table", "--timings FILE, which has the timings", "none")
        if arguments.out is not None and arguments.out.resolve() == arguments.timings.resolve():
            raise ConfigError("--out", "another file than --timings, which is only read", str(arguments.out))
        print((tune.refit if arguments.fit else tune.retable)(arguments.timings, arguments.out))
        return EXIT_OK
    _refuse_without_effect(arguments)
    parallelism = parallelism_from(arguments)
    targets = [tune.parse_target(text) for text in arguments.shape]
    for path in arguments.model:
        model = model_from(path, arguments)
        targets += tune.model_targets(model, parallelism, pad_intermediate=arguments.pad_intermediate)
    # Targets of equal weights follow each other, so that the weights are made once.
    targets = sorted(set(targets), key=lambda target: (target[1:], target.layout))
    problems = list(islice(tune.sample(arguments.seed), arguments.sample))
    problems += [(target, rows) for target in targets for rows in arguments.rows]
    if not problems:
        raise ConfigError("--model, --shape, --sample", "at least one of the three", "none")
    if arguments.sample and arguments.timings is None:
        raise ConfigError("--sample", "--timings FILE, which takes the timings", "none")
    path, timings = tune.tune(
        problems,
        arguments.out,
        timings_file=arguments.timings,
        factor=arguments.factor,
        replays=arguments.replays,
        max_seconds=arguments.max_seconds,
        jobs=arguments.jobs,
        quiet=arguments.quiet,
    )
    written = tune.table_rows(timings)
    if arguments.json:
        print(json.dumps({"file": str(path), "timed": len(timings), "rows": written}, indent=2))
    else:
        print(f"{len(timings)} timings; by them {len(written)} rows of a table gain; see {path}")
    return EXIT_OK


def _refuse_without_effect(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect without another option."""
    parser, rank = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_tune_arguments(parser)
    add_rank_arguments(rank)
    defaults = vars(parser.parse_args([]))
    needed = {"seed": ["sample"], "rows": ["model", "shape"]}
    needed |= {name: ["model"] for name in vars(rank.parse_args([]))}
    for name, others in needed.items():
        if getattr(arguments, name) != defaults[name] and not any(getattr(arguments, one) for one in others):
            wanted = " or ".join(f"--{one}" for one in others)
            raise ConfigError(f"--{name.replace('_', '-')}", f"{wanted}, which it is for", f"no {wanted}")
