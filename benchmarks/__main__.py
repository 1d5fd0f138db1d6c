"""Time moe_fp8's ops on this GPU, and DeepGEMM's if `--peer` names it; count outputs that do not repeat.

The exit code is 0 if every shape was right and timed, and 1 if some shapes were not (the last lines list
them). It is 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import (
    full_size,
    gemm,
    host,
    http,
    k_grouped,
    logits,
    moe_layer,
    repeated,
    repetition,
    selection,
    serve,
    silu_mul,
    startup,
    topk,
)
from .compare import Session
from .device import demand_gpu, environment
from .peer import DeepGemm, load
from .results import (
    DEVELOPMENT,
    LISTED,
    OF_A_COMMIT,
    RESULTS,
    SETS,
    UNSEEN,
    ResultsFile,
    full_commit,
    git_commit,
)

RUNNERS: dict[str, Callable[[Session, DeepGemm | None, int], None]] = {
    "dense": gemm.run_dense,
    "contiguous": gemm.run_contiguous,
    "masked": gemm.run_masked,
    "k_grouped": k_grouped.run_k_grouped,
    "silu_mul_quantize": silu_mul.run_silu_mul_quantize,
    "mqa_logits": logits.run_mqa_logits,
    "paged_mqa_logits": logits.run_paged_mqa_logits,
    "paged_metadata": logits.run_paged_metadata,
    "topk": topk.run_topk,
    "indexer_select": selection.run_indexer_select,
    "moe_layer": moe_layer.run_moe_layer,
    "host": host.run_host,
    "compile": startup.run_compile,
    "plan": startup.run_plan,
    "warmup": startup.run_warmup,
    "serve": serve.run_serve,
    "full_size": full_size.run_full_size,
    "http": http.run_http,
    "repetition": repeated.run_repetition,
}

#: Classes that have no more than these sets of shapes; the other classes have listed shapes alone.
_SETS_OF = {
    **dict.fromkeys(("dense", "contiguous", "masked"), SETS),
    **dict.fromkeys(("mqa_logits", "paged_mqa_logits", "topk"), (LISTED, DEVELOPMENT, UNSEEN)),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--class",
        dest="classes",
        default=",".join(RUNNERS),
        help="comma-separated classes (default: all); the rows of other classes in the file stay",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        choices=[*SETS, "all"],
        default=LISTED,
        help="which shapes; development: seeded draws, 10 replays each; unseen: the same, drawn from the "
        "hash of the commit that is measured; few_rounds: GEMMs of few tiles, drawn in that way too "
        "(default: listed)",
    )
    parser.add_argument("--quick", action="store_true", help="every third shape, 5 replays: a smoke test")
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/DEVICE.json)")
    parser.add_argument("--peer", type=Path, help="folder with deep_gemm/ or deep_gemm.zip")
    parser.add_argument(
        "--commit",
        help="what is measured, where this is not a git clone; the full hash if shapes are drawn from it",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=20_261,
        help="seed of the random inputs and of class repetition (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=repetition.SECONDS,
        help="class repetition: seconds for each case (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        default="",
        help="class repetition: only cases whose name has one of these parts, separated by commas",
    )
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    classes = [name.strip() for name in options.classes.split(",") if name.strip()]
    unknown = [name for name in classes if name not in RUNNERS]
    if unknown:
        parser.error(f"unknown class {', '.join(unknown)}: choose from {', '.join(RUNNERS)}")
    if options.quick and options.out is None:
        parser.error("--quick: give --out, since these rows would replace those of whole runs")
    sets = SETS if options.sets == "all" else (options.sets,)
    try:
        commit = full_commit(options.commit) if {*OF_A_COMMIT} & {*sets} else options.commit or git_commit()
    except ValueError as error:
        parser.error(str(error))
    demand_gpu(parser)
    torch.manual_seed(options.seed)
    peer = load(options.peer)
    facts: dict[str, Any] = environment(commit) | ({"pdl": peer.pdl} if peer else {})
    path = options.out or RESULTS / f"{facts['device']}.json"
    session = Session(ResultsFile(path, facts), replays=5 if options.quick else 20, failures=[], sets=sets)
    print(f"{facts} peer={peer.name if peer else None}", flush=True)
    repeating = partial(
        repeated.run_repetition, seconds=options.seconds, seed=options.seed, only=options.only
    )
    for name in classes:
        if not {*sets} & {*_SETS_OF.get(name, (LISTED,))}:
            print(f"-- {name}: has no such set of shapes", flush=True)
            continue
        started = time.perf_counter()
        try:
            run = repeating if name == "repetition" else RUNNERS[name]
            run(session, peer, 3 if options.quick else 1)
        except Exception as error:  # a class that fails must not stop the classes after it
            session.fail(name, error)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            session.fail("device unusable, the other classes were not run", error)
            break
        print(f"-- {name}: {time.perf_counter() - started:.1f} s", flush=True)
    for failure in session.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
