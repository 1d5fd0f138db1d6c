"""Time two commits of this project side by side on one GPU.

Each commit is a folder with its `moe_fp8` and its `benchmarks` (`git archive COMMIT | tar x -C FOLDER`). Each
folder has a process of its own, which checks and captures one shape after the other. The processes then take
turns: while one replays, the other waits. If two processes run the same commit, the process that was started
first is up to 12% faster on kernels of 2 us. So everything is timed twice, each commit first once, and the
times are geometric means of both passes. A shape on which either commit fails has no times; it is listed as
failed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

#: Replays of each commit for one shape in one pass, and the pause before each replay.
_REPLAYS = 9
_PAUSE_S = 0.010

_GPU_CLASSES = "dense,contiguous,masked,k_grouped,silu_mul_quantize,mqa_logits,paged_mqa_logits,topk"


class _Failed(Exception):
    """A commit's process ended before its time, or the processes do not time the same shapes."""


class _Tree:
    """The process that times the commit in `folder`."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder.resolve()
        if not self.folder.is_dir():
            raise _Failed(f"{self.folder} is no folder")
        command = [sys.executable, str(Path(__file__).resolve()), str(self.folder), "--worker"]
        command += ["--class", options.classes, "--set", options.sets]
        command += ["--every", str(options.every), "--only", options.only, "--commit", options.commit]
        self._process = subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any] | None:
        """The next message, or None after the last shape."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        if self._process.wait():
            raise _Failed(f"the process of {self.folder} ended with {self._process.returncode}")
        return None

    def ask(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def time_us(self) -> float:
        time.sleep(_PAUSE_S)
        self.ask("time")
        answer = self.read()
        if answer is None:
            raise _Failed(f"the process of {self.folder} ended while it was timed")
        return float(answer["us"])

    def stop(self) -> None:
        self._process.kill()


def one_pass(
    folders: Sequence[Path], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Microseconds of each folder by the name of a shape, and the errors of each shape that failed."""
    trees = [_Tree(folder, options) for folder in folders]
    timed: dict[str, list[float]] = {}
    failed: dict[str, list[str]] = {}
    try:
        while True:
            messages = [message for message in [tree.read() for tree in trees] if message is not None]
            if not messages:
                return timed, failed
            names = {message["shape"] for message in messages}
            if len(names) > 1 or len(messages) < len(trees):
                raise _Failed(f"the commits time different shapes: {names}")
            errors = [
                f"{folder}: {message['failed']}"
                for folder, message in zip(folders, messages, strict=True)
                if "failed" in message
            ]
            name = names.pop()
            if errors:
                failed[name] = errors
                print(f"FAILED {name}: {errors}", flush=True)
            else:
                timed[name] = _alternate(trees)
            for tree, message in zip(trees, messages, strict=True):
                if "failed" not in message:
                    tree.ask("next")
    finally:
        for tree in trees:
            tree.stop()


def _alternate(trees: Sequence[_Tree]) -> list[float]:
    """The median time of each tree on the shape that the processes have captured."""
    samples: list[list[float]] = [[] for _ in trees]
    for turn in range(_REPLAYS + 1):  # the first turn warms up
        order = range(len(trees))
        for i in order if turn % 2 else reversed(order):
            samples[i].append(trees[i].time_us())
    return [statistics.median(taken[1:]) for taken in samples]


def compare(
    old: Path, new: Path, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each shape: its name, both times in us, and old time / new time.

    A shape that failed in either pass has no row. The second list has its name and its errors.
    """
    old_first, failed = one_pass((old, new), options)
    new_first, failed_again = one_pass((new, old), options)
    rows: list[dict[str, Any]] = []
    for name in old_first:
        if name in new_first:
            passes = (old_first[name], new_first[name][::-1])
            old_us, new_us = map(statistics.geometric_mean, zip(*passes, strict=True))
            row = {"shape": name, "old_us": round(old_us, 3), "new_us": round(new_us, 3)}
            rows.append(row | {"ratio": round(old_us / new_us, 4)})
    for name, errors in failed_again.items():
        failed[name] = list(dict.fromkeys([*failed.get(name, []), *errors]))
    return rows, [{"shape": name, "errors": errors} for name, errors in failed.items()]


def geometric_means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean ratio of each class; a class's sets are apart."""
    logs = defaultdict(list)
    for row in rows:
        cls, *terms = row["shape"].split()
        drawn = [term.removeprefix("set=") for term in terms if term.startswith("set=")]
        logs[", ".join([cls, *drawn])].append(math.log(row["ratio"]))
    return {name: round(math.exp(statistics.fmean(values)), 4) for name, values in logs.items()}


def _work(options: argparse.Namespace) -> None:
    """Check and capture the shapes of the tree in `options.folders[0]`, and replay when asked."""
    sys.path[0] = str(options.folders[0])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the benchmarks print is not an answer
    import torch

    from benchmarks import __main__ as measured
    from benchmarks import compare as comparing
    from benchmarks.device import environment
    from benchmarks.results import ResultsFile
    from benchmarks.timing import Replay

    class Session(comparing.Session):
        def compare(self, row: Any, contestants: Any, num_calls: int, tolerance: float) -> None:
            name = " ".join([row.cls, *(f"{term}={value}" for term, value in row.shape.items())])
            if options.only not in name:
                return
            try:
                ours = contestants[0]
                error = comparing._checked(ours, tolerance)
                replay = Replay(ours.calls, num_calls)
            except Exception as failure:
                _answer(answers, shape=name, failed=f"{type(failure).__name__}: {failure}")
                return
            _answer(answers, shape=name, rel_error=error)
            while sys.stdin.readline().strip() == "time":
                _answer(answers, us=replay.time_us())

    torch.manual_seed(20_261)  # both processes draw the same inputs
    facts = environment(options.commit or options.folders[0].name)
    for name in options.classes.split(","):
        session = Session(ResultsFile(Path("unwritten.json"), facts), 1, [], tuple(options.sets.split(",")))
        measured.RUNNERS[name](session, None, options.every)


def _answer(answers: IO[str], **facts: Any) -> None:
    answers.write(json.dumps(facts) + "\n")
    answers.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="the old commit's and the new commit's"
    )
    parser.add_argument("--class", dest="classes", default=_GPU_CLASSES, help="default: %(default)s")
    parser.add_argument(
        "--set",
        dest="sets",
        default="listed",
        help="listed, development, unseen, few_rounds, or several with commas",
    )
    parser.add_argument(
        "--commit", default="", help="the full hash from which unseen and few_rounds shapes are drawn"
    )
    parser.add_argument("--every", type=int, default=1, help="time every n-th shape")
    parser.add_argument("--only", default="", help="time the shapes whose name has this part")
    parser.add_argument("--names", nargs=2, default=("old", "new"), help="the two commits' short hashes")
    parser.add_argument("--out", type=Path, help="write the comparison to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return 0
    from .device import demand_gpu
    from .results import DEVELOPMENT, LISTED, SETS
    from .unseen_shapes import seed

    sets = {*options.sets.split(",")}
    if unknown := sets - {*SETS}:
        parser.error(f"--set: expected some of {', '.join(SETS)}, got {', '.join(sorted(unknown))}")
    if sets - {LISTED, DEVELOPMENT}:
        try:
            seed(options.commit)  # both commits draw the same shapes
        except ValueError as error:
            parser.error(f"--commit: {error}")
    if len(options.folders) != 2:
        parser.error("give two folders: the old commit's and the new commit's")
    demand_gpu(parser)
    old, new = options.folders
    try:
        rows, failed = compare(old, new, options)
    except _Failed as failure:
        print(f"FAILED {failure}", file=sys.stderr)
        return 1
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    means = geometric_means(rows)
    for name, mean in means.items():
        print(f"{name}: old / new = {mean}")
    if options.out:
        options.out.write_text(_report(options, rows, failed, means))
    for shape in failed:
        print(f"FAILED {shape['shape']}", file=sys.stderr)
    return 1 if failed else 0


def _report(
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    failed: list[dict[str, Any]],
    means: dict[str, float],
) -> str:
    import torch

    from .results import device_slug, today

    drawn = f" (drawn from {options.commit})" if options.commit else ""
    what = (
        "two processes on one GPU, one a commit, that take turns; "
        f"sets {options.sets}{drawn}, every {options.every}. shape; medians of {_REPLAYS} replays, "
        "geometric means of two passes, each commit first once; ratio is old time / new time"
    )
    facts = {"device": device_slug(torch.cuda.get_device_name()), "date": today()}
    facts |= dict(zip(("old", "new"), options.names, strict=True)) | {"what": what}
    return json.dumps(facts | {"geometric_mean": means, "failed": failed, "rows": rows}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
