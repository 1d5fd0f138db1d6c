"""Class engine: decode and prefill steps of a real vLLM with and without the plug-in, in turns.

vLLM must be importable. The contestants are vLLM's two kinds of experts, each alone and with the plug-in
(MOE_FP8_ENGINE=1): "deep_gemm" is DeepGEMM for experts and dense layers, "triton" is Triton experts with
CUTLASS dense layers. (The indexer of DeepSeek-V3.2 needs DeepGEMM in both.) All engines of a model live at
the same time, and one works at a time. In each turn the main threads of all engines run on the same core,
and each turn takes another core: cores of a shared host differ by up to a third. So the ratio of wall times
is the median of the turns' ratios. A start is timed while no other engine lives.

A decode step serves a batch, and its graph is replayed. A prefill step reads one prompt and calls op by op.
No two prompts of an engine have the same length, as in a server, so its calls have numbers of rows that are
new to the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .compare import Session
from .device import demand_gpu, environment
from .engine_models import MODELS
from .results import RESULTS, ROOT, ResultsFile, Row, four_digits, git_commit

EXPERTS = ("deep_gemm", "triton")

#: Tokens of each request that are compared, decode steps of a turn, and profiled steps.
_TOKENS, _TURN, _PROFILED = 32, 12, 8

#: Prompts of a turn, and of the profile.
_PROMPTS = 4

#: What a step does: ("batch", requests that decode) or ("prompt", tokens that are read, at most).
Step: TypeAlias = tuple[str, int]

#: A kind of experts, and whether they are ours.
Contestant: TypeAlias = tuple[str, bool]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Engine:
    """A process with a vLLM engine, which works only when it is asked to."""

    def __init__(self, model: str, experts: str, ours: bool, folder: Path, batches: Sequence[int]) -> None:
        dense = experts == "deep_gemm" or model.startswith("deepseek_v32")
        caches = folder / ("ours" if ours else "theirs")
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "VLLM_USE_DEEP_GEMM": str(int(dense)),
            "VLLM_MOE_USE_DEEP_GEMM": str(int(experts == "deep_gemm")),
            "MOE_FP8_ENGINE": str(int(ours)),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "DG_JIT_CACHE_DIR": str(caches / "deep_gemm"),
            "MOE_FP8_CACHE_DIR": str(caches / "moe_fp8"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "STARTED": str(time.time()),
        }
        self.name = f"{model}, {experts}, {'ours' if ours else 'theirs'}"
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed with the process
        read, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.vllm_server", "--model", model]
        # vLLM captures a graph for each batch, and wants one at least.
        command += ["--batches", ",".join(map(str, batches or (1,))), "--answers", str(write)]
        self._process = subprocess.Popen(
            [*command, "--folder", str(folder / model)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self.seconds: dict[str, float] = {}

    def wait_ready(self) -> None:
        """Wait for the first token. Raises RuntimeError with the end of the output if the process ends."""
        if not self.seconds:
            self.seconds = self._answer()

    def ask(self, request: str, **options: Any) -> Any:
        """The answer to a request of `benchmarks.vllm_server.Server`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # of a process that has ended, `_answer` tells more
            self._process.stdin.write(json.dumps({"request": request, **options}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def run_on(self, core: int) -> None:
        """From now on the main thread, which is where vLLM schedules, runs on this core."""
        os.sched_setaffinity(self._process.pid, {core})

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name}: exit code {code}: {self._log.read().strip()[-1500:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


@dataclass
class Measured:
    """What the processes of one contestant told: of tokens and profiles, an entry a process.

    `tokens` has the batches that were compared.
    """

    tokens: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    wall_us: dict[Step, list[float]] = field(default_factory=dict)
    profiles: dict[Step, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counters: Any = None

    def gpu_us(self, step: Step) -> float:
        """The least of all processes."""
        return min(float(profile["gpu_us"]) for profile in self.profiles[step])


def distance(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The share of tokens that are equal before the first difference, and the mean |d log p| of these."""
    equal, total, differences = 0, 0, []
    rows = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True)
    for tokens, others, logs, other_logs in rows:
        pairs = enumerate(zip(tokens, others, strict=True))
        same = next((i for i, (token, another) in pairs if token != another), len(tokens))
        equal, total = equal + same, total + len(tokens)
        differences += [abs(a - b) for a, b in zip(logs[: same + 1], other_logs, strict=False)]
    return equal / total, sum(differences) / max(1, len(differences))


def run_model(
    model: str,
    experts: Sequence[str],
    rounds: int,
    batches: Sequence[int],
    prompts: Sequence[int],
    processes: int,
    starts: bool,
    caches: Path | None,
) -> dict[Contestant, Measured]:
    """What was measured of all contestants of a model."""
    kinds = [(kind, ours) for kind in experts for ours in (True, False)]
    measured = {kind: Measured() for kind in kinds}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = caches or Path(name)

        for start in ("cold", "warm") if starts else ():
            for kind in kinds:
                if kind[0] == "deep_gemm":
                    with Engine(model, *kind, folder, batches) as engine:
                        engine.wait_ready()
                        measured[kind].seconds[start] = sum(engine.seconds.values())
        engines = [
            (kind, stack.enter_context(Engine(model, *kind, folder, batches)))
            for _ in range(processes)
            for kind in kinds
        ]
        for _, engine in engines:
            engine.wait_ready()
        for batch in batches:
            _measure_decode(engines, measured, batch, rounds)
        for prompt in prompts:
            _measure_prefill(engines, measured, prompt, rounds)
        for kind, engine in engines:
            counters = engine.ask("counters")
            if bool(counters and counters["loads"]) != kind[1]:
                raise RuntimeError(f"{engine.name}: kernels of this package loaded: {counters}")
            measured[kind].counters = counters
    return measured


def _measure_decode(
    engines: Sequence[tuple[Contestant, Engine]],
    measured: dict[Contestant, Measured],
    batch: int,
    rounds: int,
) -> None:
    for kind, engine in engines:
        told = engine.ask("tokens", batch=batch, steps=_TOKENS)
        measured[kind].tokens.setdefault(batch, []).append(told)
    for kind, engine in engines:
        if not kind[1] and len(measured[kind].tokens[batch]) == 1:  # how far are two runs from each other?
            measured[kind].tokens[batch].append(engine.ask("tokens", batch=batch, steps=_TOKENS))
    for _, engine in engines:
        # A step gives at least one token, and with a draft at most two.
        engine.ask("begin", batch=batch, tokens=2 * (_TURN * (rounds + 1) + _PROFILED))
    step = "batch", batch
    _take_turns(engines, measured, step, [{"request": "decode", "steps": _TURN}] * (rounds + 1))
    for kind, engine in engines:
        measured[kind].profiles.setdefault(step, []).append(engine.ask("profile", steps=_PROFILED))
    for _, engine in engines:
        engine.ask("end")


def _measure_prefill(
    engines: Sequence[tuple[Contestant, Engine]],
    measured: dict[Contestant, Measured],
    prompt: int,
    rounds: int,
) -> None:
    step = "prompt", prompt
    lengths = [list(range(top, top - _PROMPTS, -1)) for top in range(prompt, 0, -_PROMPTS)][: rounds + 2]
    turns = [{"request": "prefill", "lengths": some} for some in lengths[:-1]]
    _take_turns(engines, measured, step, turns)
    for kind, engine in engines:
        told = engine.ask("profile_prefill", lengths=lengths[-1])
        measured[kind].profiles.setdefault(step, []).append(told)


def _take_turns(
    engines: Sequence[tuple[Contestant, Engine]],
    measured: dict[Contestant, Measured],
    step: Step,
    turns: Sequence[dict[str, Any]],
) -> None:
    """Every turn has one request, which all engines get."""
    cores = sorted(os.sched_getaffinity(0))
    for number, turn in enumerate(turns):
        for kind, engine in engines:
            engine.run_on(cores[number % len(cores)])
            wall = engine.ask(**turn)["wall_us"]
            if number:  # the first turn warms up
                measured[kind].wall_us.setdefault(step, []).append(wall)


def run_engine(
    session: Session,
    models: Sequence[str] = tuple(MODELS),
    experts: Sequence[str] = EXPERTS,
    rounds: int = 10,
    batches: Sequence[int] = (1, 8, 32, 64, 256),
    prompts: Sequence[int] = (256, 1024, 4000),
    processes: int = 1,
    starts: bool = True,
    caches: Path | None = None,
) -> None:
    """The rows of these models; a model that fails counts as failed, and the others go on.

    `caches`: a folder that keeps compiled kernels from one run to the next; cold starts need an empty folder.
    """
    for model in models:
        try:
            measured = run_model(model, experts, rounds, batches, prompts, processes, starts, caches)
        except RuntimeError as error:
            session.fail(f"engine {model}", error)
            continue
        for kind in experts:
            _store(session, model, kind, measured[kind, True], measured[kind, False])


def _store(session: Session, model: str, experts: str, ours: Measured, theirs: Measured) -> None:
    name = f"vllm {experts}"
    for step in ours.profiles:
        kind, size = step
        shape = {"model": model, "experts": experts, kind: size}
        row = Row("engine", {**shape, "time": "gpu"}, ours.gpu_us(step))
        row.peers[name] = theirs.gpu_us(step)
        row.notes = _notes(ours, theirs, step) | {"counters": ours.counters}
        session.store(row)
        one, other = ours.wall_us[step], theirs.wall_us[step]
        row = Row("engine", {**shape, "time": "wall"}, statistics.median(one))
        # Only times of the same turn can be compared, since each turn has another core.
        row.peers[name] = row.us * statistics.median(b / a for a, b in zip(one, other, strict=True))
        row.notes = {"ours": list(map(four_digits, one)), "theirs": list(map(four_digits, other))}
        session.store(row)
    for start, seconds in ours.seconds.items():
        shape = {"model": model, "experts": experts, "start": start, "time": "to first token"}
        row = Row("engine", shape, seconds * 1e6)
        row.peers[name] = theirs.seconds[start] * 1e6
        session.store(row)


def _notes(ours: Measured, theirs: Measured, step: Step) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    kind, size = step
    if kind == "batch":
        one, other = ours.tokens[size], theirs.tokens[size]
        for text, pair in (("", (one[0], other[0])), ("theirs again: ", (other[0], other[1]))):
            equal, mean = distance(*pair)
            notes |= {f"{text}equal tokens": four_digits(equal), f"{text}mean |d log p|": four_digits(mean)}
    for name, measured in (("ours", ours), ("theirs", theirs)):
        top = measured.profiles[step][0]["kernels_us"]
        notes[f"kernels of {name}"] = {kernel: four_digits(us) for kernel, us in list(top.items())[:6]}
    return notes


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main() -> None:
    """Measure, and store the rows of these models in the results file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--experts", default=",".join(EXPERTS))
    parser.add_argument("--batches", type=_sizes, default="1,8,32,64,256")
    parser.add_argument("--prompts", type=_sizes, default="256,1024,4000")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1, help="of each contestant")
    parser.add_argument("--no-starts", action="store_true", help="do not time cold and warm starts")
    parser.add_argument("--caches", type=Path, help="keeps compiled kernels between runs (default: nowhere)")
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/DEVICE.json)")
    parser.add_argument("--commit", help="what is measured, where this is not a git clone")
    options = parser.parse_args()
    demand_gpu(parser)
    facts = environment(options.commit or git_commit())
    file = ResultsFile(options.out or RESULTS / f"{facts['device']}.json", facts)
    session = Session(file, replays=1, failures=[])
    run_engine(
        session,
        options.models.split(","),
        options.experts.split(","),
        options.rounds,
        options.batches,
        options.prompts,
        options.processes,
        not options.no_starts,
        options.caches,
    )
    sys.exit("\n".join(session.failures) or None)


if __name__ == "__main__":
    main()
