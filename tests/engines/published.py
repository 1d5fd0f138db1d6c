"""Run DeepGEMM's published tests, unchanged, against the module in the place of `deep_gemm`.

    python -m tests.engines.published FOLDER --peer FOLDER

FOLDER has the published scripts (`test_fp8_fp4.py`, `test_attention.py`, ...) and the modules that they
import (`generators.py`, `utils.py`); they are no part of this repository. `--peer` names a folder with a
`deep_gemm/` package or a `deep_gemm.zip`, the copy that serves what no kernel of ours serves.

The scripts loop over cases inside their functions and stop at the first failure. The runner calls a function
again for each case and reports each: the functions that list cases (`enumerate_*`, `sample_*`) give one case
at a time. A function without such a list is one case. The report tells which calls our kernels served and
which went on to the copy. The scripts' timings are off, by their own variable DG_USE_NVIDIA_TOOLS, unless
`--time` is given.

The copy compiles each kernel with nvcc, which takes seconds; `--shards` splits each function's cases between
processes, of which `--jobs` run at once on the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_fp8 import integrations
from moe_fp8.integrations import vendored

SCRIPTS = ("test_fp8_fp4", "test_attention", "test_layout")
_LISTS = ("enumerate_", "sample_")


class Calls:
    """Counts the calls of `deep_gemm`: `ours` by our kernels, `copy` by the copy. Names -> calls."""

    def __init__(self, drop_in: Any) -> None:
        self.ours: Counter[str] = Counter()
        self.copy: Counter[str] = Counter()
        lookup = vendored.lookup
        vendored.lookup = lambda name, submodule="": self._theirs(name, lookup(name, submodule))
        for name, (kind, function) in drop_in._SERVED.items():
            drop_in._SERVED[name] = (kind, self._own(name, function))
        for name in ("get_mn_major_tma_aligned_tensor", "transform_sf_into_required_layout"):
            counted = self._own(name, drop_in._SHARED[name])
            drop_in._SHARED[name] = counted
            for module in (drop_in.utils, drop_in.utils.layout):
                setattr(module, name, counted)

    def take(self) -> dict[str, dict[str, int]]:
        """The calls since the last `take`."""
        taken = {"ours": dict(self.ours), "copy": dict(self.copy)}
        self.ours.clear()
        self.copy.clear()
        return taken

    def _own(self, name: str, function: Any) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            before = self.copy.total()
            result = function(*given, **named)
            if self.copy.total() == before:
                self.ours[name] += 1
            return result

        return call

    def _theirs(self, name: str, found: Any) -> Any:
        home = getattr(found, "__module__", None) or ""
        helper = any(part in home for part in (".utils", ".testing"))
        if not callable(found) or isinstance(found, type) or helper:
            return found

        def call(*given: Any, **named: Any) -> Any:
            self.copy[name] += 1
            return found(*given, **named)

        return call


class Cases:
    """Gives a published function one of its cases: the outermost list that it asks for is cut to one item."""

    def __init__(self, script: ModuleType) -> None:
        self._number = 0
        self._asked = self._listed = self._ended = False
        self._names = set()
        for name, function in list(vars(script).items()):
            if name.startswith(_LISTS) and inspect.isfunction(function):
                self._names.add(name)
                setattr(script, name, self._cut(function))

    def _cut(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def listed(*given: Any, **named: Any) -> Any:
            items = function(*given, **named)
            if self._asked:
                return items
            self._asked = True
            chosen = list(itertools.islice(items, self._number, self._number + 1))
            self._listed, self._ended = True, not chosen
            return chosen

        return listed

    def run(self, function: Callable[[], None], first: int, step: int) -> Iterator[dict[str, Any]]:
        """Call `function` for its cases first, first + step, ...; yields a result for each."""
        listed = bool(self._names & set(inspect.unwrap(function).__code__.co_names))
        if not listed and first:
            return
        for self._number in itertools.count(first, step):
            self._asked = self._listed = self._ended = False
            began = time.monotonic()
            error = ""
            random.seed(0)
            torch.manual_seed(0)
            try:
                function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except Exception as failure:
                where = traceback.extract_tb(failure.__traceback__)[-1]
                error = f"{type(failure).__name__}: {failure} ({Path(where.filename).name}:{where.lineno})"
            if self._ended or (first and not self._asked and not error):
                return
            yield {"case": self._number, "error": error, "seconds": round(time.monotonic() - began, 2)}
            if not self._listed:  # it has no list, or its list fails
                return
            torch.cuda.empty_cache()


def work(options: argparse.Namespace) -> None:
    """Run one shard of a script's functions in this process; writes a line of JSON for each case."""
    logging.basicConfig(level=logging.INFO)  # says why the copy cannot be loaded
    if not options.time:
        os.environ["DG_USE_NVIDIA_TOOLS"] = "1"
    sys.path[:0] = [str(Path(options.folder).resolve()), str(Path(options.peer).resolve())]
    drop_in = integrations.install(options.serve)
    calls = Calls(drop_in)
    script = importlib.import_module(options.scripts[0])
    functions = {
        name: function
        for name, function in vars(script).items()
        if name.startswith("test_") and getattr(function, "__module__", "") == script.__name__
    }
    cases = Cases(script)
    first, shards = options.shard
    with Path(options.out).open("w") as out:
        for name, function in functions.items():
            if options.only and name not in options.only:
                continue
            for result in cases.run(function, first * options.every, shards * options.every):
                line = {"script": script.__name__, "function": name, **result, **calls.take()}
                out.write(json.dumps(line) + "\n")
                out.flush()


@dataclass(frozen=True)
class Shard:
    """One process: its script, its part of the cases, and where its results and its output go."""

    script: str
    number: int
    folder: Path

    @property
    def results(self) -> Path:
        return self.folder / f"{self.script}.{self.number}.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.script}.{self.number}.log"

    def run(self, options: argparse.Namespace) -> str:
        """Run the process; returns why it did not end well, or ""."""
        command = [sys.executable, "-m", "tests.engines.published", options.folder, "--peer", options.peer]
        command += ["--scripts", self.script, "--every", str(options.every), "--out", str(self.results)]
        command += ["--shard", str(self.number), str(options.shards), "--serve", *options.serve]
        command += ["--time"] if options.time else []
        command += ["--only", *options.only] if options.only else []
        with self.log.open("w") as log:
            try:
                ended = subprocess.run(command, stdout=log, stderr=log, timeout=options.timeout, check=False)
            except subprocess.TimeoutExpired:
                return (
                    f"{self.script}, shard {self.number}: stopped after {options.timeout} s; see {self.log}"
                )
        if not ended.returncode:
            return ""
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return f"{self.script}, shard {self.number}: exit code {ended.returncode}: {last[0]}; see {self.log}"

    def lines(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text().splitlines()]


def report(results: list[dict[str, Any]], troubles: list[str]) -> str:
    """A paragraph for each function: its cases, who served their calls, and each failure."""
    lines = []
    for key in dict.fromkeys((line["script"], line["function"]) for line in results):
        own = [line for line in results if (line["script"], line["function"]) == key]
        failed = sorted((line for line in own if line["error"]), key=lambda line: line["case"])
        alone = sum(bool(line["ours"]) and not line["copy"] for line in own)
        seconds = sum(line["seconds"] for line in own)
        lines.append(
            f"{'.'.join(key)}: {len(own) - len(failed)} of {len(own)} cases passed, "
            f"{alone} of {len(own)} by our kernels alone, {seconds:.0f} s"
        )
        for side, text in (("ours", "served by our kernels"), ("copy", "sent on to the copy")):
            total: Counter[str] = Counter()
            for line in own:
                total.update(line[side])
            named = ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
            lines.append(f"    {text}: {named or 'none'}")
        lines += [f"    FAILED case {line['case']}: {line['error']}" for line in failed]
    lines += [f"TROUBLE {trouble}" for trouble in troubles]
    good = sum(not line["error"] for line in results)
    lines.append(f"{good} cases passed, {len(results) - good} failed, {len(troubles)} processes in trouble")
    return "\n".join(lines)


def unpacked(folder: str) -> str:
    """The folder that has the package `deep_gemm/`: `folder`, or its `unpacked` with the zip's contents."""
    peer = Path(folder)
    if (peer / "deep_gemm").is_dir():
        return str(peer)
    with zipfile.ZipFile(peer / "deep_gemm.zip") as archive:
        archive.extractall(peer / "unpacked")
    return str(peer / "unpacked")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="the published scripts")
    parser.add_argument("--peer", default=".peer", help="the copy of deep_gemm (default: .peer)")
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), help="names without .py")
    parser.add_argument(
        "--only", nargs="*", default=[], help="functions to run (default: all of the scripts)"
    )
    parser.add_argument(
        "--serve", nargs="*", default=["dense", "experts", "indexer"], help="our kinds of calls"
    )
    parser.add_argument("--every", type=int, default=1, help="run each N-th case only")
    parser.add_argument("--shards", type=int, default=1, help="processes for each script's cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for a process")
    parser.add_argument("--time", action="store_true", help="let the scripts time their kernels")
    parser.add_argument("--logs", help="where the scripts' output goes (default: a temporary folder)")
    parser.add_argument("--shard", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.shard:
        work(options)
        return 0
    if "CUDA_HOME" not in os.environ and Path("/usr/local/cuda/bin/nvcc").exists():
        os.environ["CUDA_HOME"] = "/usr/local/cuda"
    if not any((Path(options.peer) / name).exists() for name in ("deep_gemm", "deep_gemm.zip")):
        parser.error(f"--peer: {options.peer} has neither deep_gemm/ nor deep_gemm.zip")
    options.peer = unpacked(options.peer)
    folder = Path(options.logs or tempfile.mkdtemp(prefix="published-"))
    folder.mkdir(parents=True, exist_ok=True)
    shards = [Shard(script, number, folder) for number in range(options.shards) for script in options.scripts]
    with ThreadPoolExecutor(options.jobs) as pool:
        troubles = [text for text in pool.map(lambda shard: shard.run(options), shards) if text]
    results = [line for shard in shards for line in shard.lines()]
    print(report(results, troubles))
    return int(bool(troubles) or not results or any(line["error"] for line in results))


if __name__ == "__main__":
    sys.exit(main())
