"""Classes compile, plan and warmup: what a server does before its first request."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.warmup import PlanOptions, load_model, plan

from . import inputs
from .compare import Session
from .logits import num_sms
from .peer import DeepGemm
from .results import ROOT, Row, four_digits

_COMPILES = 3
#: Widths of weights that no other class times, so the peer has no kernel for them yet.
_NEW_WIDTHS = (4416, 4672, 4928)
_MODEL = ROOT / "tests" / "configs" / "deepseek_v32.json"
#: Options of the planner, and of the startup script with dashes.
_OPTIONS: dict[str, Any] = {"tp": 8, "ep": 8}


def run_compile(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Time NVRTC on one core for every kernel of DeepSeek-V3.2's plan, and the peer's first call of a shape.

    A figure is the least of three, because other work on the host only adds time. Each of the three comes
    from its own pass over all kernels.
    """
    specs = plan(load_model(_MODEL), PlanOptions(**_OPTIONS, next_n=2, num_sms=num_sms())).specs[::step]
    least = [math.inf] * len(specs)
    for _ in range(_COMPILES):
        for i, spec in enumerate(specs):
            try:
                least[i] = min(least[i], compile_kernel(spec).compile_seconds)
            except Exception as error:
                session.fail(f"compile {spec}", error)
                return
    by_name: dict[str, list[float]] = {}
    for spec, seconds in zip(specs, least, strict=True):
        by_name.setdefault(spec.name, []).append(seconds)
    first_call = None if peer is None else min(_first_call_us(peer, n) for n in _NEW_WIDTHS)
    for name, times in by_name.items():
        row = Row("compile", {"kernel": name, "num_kernels": len(times)}, statistics.median(times) * 1e6)
        row.notes["max_us"] = four_digits(max(times) * 1e6)
        if first_call is not None and peer is not None and name == "gemm_fp8":
            row.peers[peer.name] = first_call
        session.store(row)


def _first_call_us(peer: DeepGemm, n: int) -> float:
    """Microseconds of the peer's first call of a shape that no class times."""
    a, a_scale = inputs.activations(64, 3072)
    b, b_scale = inputs.weights(n, 3072)
    scale = peer.aligned(a_scale)
    out = torch.empty(64, n, device=inputs.DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    peer.gemm(a, scale, b, b_scale, out)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


#: The servers that class plan plans for, with the limits of the planner's options that differ from their
#: defaults.
_SERVERS: tuple[dict[str, int], ...] = (
    {"tp": 8, "ep": 8, "next_n": 1},
    {"tp": 1, "ep": 32, "next_n": 4},
    {"tp": 8, "ep": 8, "next_n": 1, "max_tokens": 2_000_000},
)

#: Plans once, as a new process does, and prints the seconds of imports and of the plan.
_PLAN = """
import json, sys, time
start = time.perf_counter()
from moe_fp8.warmup import PlanOptions, load_model, plan
imported = time.perf_counter()
made = plan(load_model(sys.argv[1]), PlanOptions(**json.loads(sys.argv[2])))
print(json.dumps([imported - start, time.perf_counter() - imported, len(made.specs)]))
"""


def run_plan(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Plans of DeepSeek-V3.2 on one core, each the first plan of a new process; the least of three."""
    for options in _SERVERS[::step]:
        runs = []
        try:
            for _ in range(_COMPILES):
                command = [sys.executable, "-c", _PLAN, str(_MODEL), json.dumps(options)]
                runs.append(json.loads(_run(command, dict(os.environ), cores=1)))
        except (RuntimeError, ValueError) as error:
            session.fail(f"plan {options}", error)
            return
        imports, seconds, kernels = min(runs, key=lambda run: run[1])
        row = Row("plan", {"model": _MODEL.stem, "max_tokens": 16384, **options}, seconds * 1e6)
        row.notes = {"kernels": kernels, "import_seconds": four_digits(imports), "cores": 1}
        session.store(row)


#: Kernel launches with which engines make the peer compile at startup, for DeepSeek-V3 at TP8 and 8,192
#: tokens, according to the engines' sources. Our warmup launches no kernel.
_ENGINES_LAUNCHES = "vLLM 0.33.0 relax 2,498, full 66,014; SGLang 0.5.23 131,072"

_KEPT = ("kernels", "compiled", "loaded", "device", "plan_seconds", "build_seconds", "load_seconds")


def run_warmup(session: Session, peer: DeepGemm | None, step: int) -> None:
    """The startup script for DeepSeek-V3.2 with TP8 and EP8, in fresh processes.

    It runs with an empty store (with two compilers, with one compiler for each core, and in eight processes
    at once), with a full store on all cores and on one core, and with a bundle and no store.
    """
    cores = len(os.sched_getaffinity(0))
    model = ["--model", str(_MODEL)]
    for name, value in _OPTIONS.items():
        model += [f"--{name.replace('_', '-')}", str(value)]
    script = [sys.executable, "-m", "moe_fp8.warmup", "--quiet", *model]
    runs = [("empty", jobs, 1, cores) for jobs in sorted({min(2, cores), cores})]
    runs += [("empty", cores, 8, cores), ("full", cores, 1, cores), ("full", cores, 1, 1)]
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(Path(folder, "bundle"))
        for store, jobs, ranks, used in (*runs, ("bundle", cores, 1, cores)):
            environment = dict(os.environ)
            cache = Path(folder, {"bundle": "none", "full": f"{cores}-1"}.get(store, f"{jobs}-{ranks}"))
            try:
                if store == "bundle":
                    # The bundle takes its kernels from the full store, so nothing is compiled for it.
                    build = [sys.executable, "-m", "moe_fp8.cli", "build", "--quiet", *model]
                    _run([*build, "--bundle", bundle, "--cache-dir", f"{folder}/{cores}-1"], environment)
                    environment["MOE_FP8_BUNDLE"] = bundle
                command = [*script, "--cache-dir", str(cache), "--jobs", str(jobs)]
                started = time.perf_counter()
                summaries = [json.loads(out) for out in _run_all([command] * ranks, environment, used)]
            except (RuntimeError, ValueError) as error:
                session.fail(f"warmup store={store}", error)
                return
            seconds = time.perf_counter() - started
            shape: dict[str, Any] = {"model": _MODEL.stem, **_OPTIONS, "store": store}
            row = Row("warmup", {**shape, "jobs": jobs, "ranks": ranks, "cores": used}, seconds * 1e6)
            row.notes = {name: summaries[0].get(name) for name in _KEPT}
            row.notes["compiled by all ranks"] = sum(summary.get("compiled", 0) for summary in summaries)
            row.notes["engines' launches"] = _ENGINES_LAUNCHES
            session.store(row)


def _run(command: list[str], environment: dict[str, str], cores: int | None = None) -> str:
    return _run_all([command], environment, cores)[0]


def _run_all(commands: list[list[str]], environment: dict[str, str], cores: int | None = None) -> list[str]:
    """The outputs of the commands, which run at once on the first `cores` cores, or on all.

    Raises RuntimeError with the end of the error output of a command that fails.
    """
    if cores is not None:
        own = sorted(os.sched_getaffinity(0))[:cores]
        commands = [["taskset", "--cpu-list", ",".join(map(str, own)), *command] for command in commands]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for command in commands
    ]
    outputs = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}: {errors.strip()[-500:]}")
    return [output for output, _ in outputs]
