"""Classes host, compile and warmup: what the CPU does before a kernel runs."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import moe_fp8
from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.warmup import PlanOptions, load_model, plan

from . import inputs
from .compare import Session
from .logits import num_sms
from .peer import DeepGemm
from .results import ROOT, Row, four_digits
from .shapes import PagedShape, expert_counts
from .timing import Call

_CALLS = 200
_ROUNDS = 100
_COMPILES = 3
#: Widths of weights that no class times: the peer has no kernel for them yet.
_NEW_WIDTHS = (4416, 4672, 4928)
_MODEL = ROOT / "tests" / "configs" / "deepseek_v32.json"
_TP, _EP = 8, 8


@torch.inference_mode()
def run_host(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Host time of one eager call, in inference mode as engines make it: enqueued without waiting; small
    shapes keep the queue short."""
    a, a_scale = inputs.activations(64, 2048)
    b, b_scale = inputs.weights(576, 2048)
    out = torch.empty(64, 576, device=inputs.DEVICE, dtype=torch.bfloat16)
    theirs: Call | None = None
    if peer is not None:
        theirs = partial(peer.gemm, a, peer.aligned(a_scale), b, b_scale, out)
    _eager(
        session,
        "gemm_fp8",
        partial(moe_fp8.gemm_fp8, a, a_scale, b, b_scale, out=out, constant_weights=True),
        peer,
        theirs,
    )

    counts = expert_counts(8, 16, "spread")
    experts_a = inputs.expert_activations(8, 64, 2048)
    experts_b = inputs.weights(576, 2048, 8)
    masked_m = torch.tensor(counts, device=inputs.DEVICE, dtype=torch.int32)
    out3 = torch.empty(8, 64, 576, device=inputs.DEVICE, dtype=torch.bfloat16)
    if peer is not None:
        scale = peer.aligned(experts_a[1])
        theirs = partial(peer.grouped_masked, experts_a[0], scale, *experts_b, out3, masked_m, 16)
    masked = partial(
        moe_fp8.grouped_gemm_fp8_masked, *experts_a, *experts_b, masked_m, expected_m=16, out=out3
    )
    _eager(session, "grouped_gemm_fp8_masked", masked, peer, theirs)

    x = torch.randn(64, 2048, device=inputs.DEVICE, dtype=torch.bfloat16)
    _eager(session, "quantize_fp8", partial(moe_fp8.quantize_fp8, x, out=moe_fp8.quantize_fp8(x)), None, None)

    keys = torch.randn(64, 128, device=inputs.DEVICE, dtype=torch.bfloat16)
    cache = torch.zeros(2, 64, 1, 132, device=inputs.DEVICE, dtype=torch.uint8)
    slots = torch.arange(64, device=inputs.DEVICE)
    write = partial(moe_fp8.indexer_quantize_and_cache, keys, cache, slots)
    _eager(session, "indexer_quantize_and_cache", write, None, None)

    paged = inputs.paged_inputs(PagedShape(4, 1024))
    schedule = moe_fp8.paged_mqa_logits_metadata(paged.lengths, block_size=64, num_sms=num_sms())
    arguments = (paged.q, paged.kv_cache, paged.weights, paged.lengths, paged.block_table)
    width = paged.max_context_len
    logits = torch.empty(4, width, device=inputs.DEVICE)
    if peer is not None:
        their_schedule = peer.paged_metadata(paged.lengths, 64, num_sms())
        theirs = partial(peer.paged_mqa_logits, *arguments, their_schedule, width)
    call = partial(moe_fp8.paged_mqa_logits_fp8, *arguments, schedule, max_context_len=width, out=logits)
    _eager(session, "paged_mqa_logits_fp8", call, peer, theirs)


def _eager(session: Session, op: str, ours: Call, peer: DeepGemm | None, theirs: Call | None) -> None:
    try:
        calls = [ours] if theirs is None else [ours, theirs]
        times: list[list[float]] = [[] for _ in calls]
        for call in calls:
            _loop(call)
        for _ in range(_ROUNDS):
            for call, samples in zip(calls, times, strict=True):
                samples.append(_loop(call))
    except Exception as error:
        session.fail(f"host {op}", error)
        return
    row = Row("host", {"op": op}, statistics.median(times[0]))
    if peer is not None and theirs is not None:
        row.peers[peer.name] = statistics.median(times[1])
    session.store(row)


def _loop(call: Call) -> float:
    """Microseconds of host time a call; the device starts idle and is waited for outside the timing."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / _CALLS * 1e6


def run_compile(session: Session, peer: DeepGemm | None, step: int) -> None:
    """NVRTC on one core: every kernel of DeepSeek-V3.2's plan; the peer's first call of a new shape.

    The least of three, a pass over all of them each, since what else the host does only adds.
    """
    specs = plan(load_model(_MODEL), PlanOptions(tp=_TP, ep=_EP, next_n=2, num_sms=num_sms())).specs[::step]
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
    """The peer's first call of a shape that no class times, in microseconds."""
    a, a_scale = inputs.activations(64, 3072)
    b, b_scale = inputs.weights(n, 3072)
    scale = peer.aligned(a_scale)
    out = torch.empty(64, n, device=inputs.DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    peer.gemm(a, scale, b, b_scale, out)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


#: Kernel launches that engines make at startup to have the peer compile, for DeepSeek-V3 at TP8 and 8,192
#: tokens, as their sources have it; ours launches none.
_ENGINES_LAUNCHES = "vLLM 0.33.0 relax 2,498, full 66,014; SGLang 0.5.23 131,072"


def run_warmup(session: Session, peer: DeepGemm | None, step: int) -> None:
    """The startup script for DeepSeek-V3.2, TP8 EP8, in fresh processes.

    An empty store, with two compilers and with one a core; a full store; a bundle and no store.
    """
    cores = len(os.sched_getaffinity(0))
    model = ["--model", str(_MODEL), "--tp", str(_TP), "--ep", str(_EP)]
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(Path(folder, "bundle"))
        runs = [("empty", jobs) for jobs in sorted({min(2, cores), cores})]
        for store, jobs in (*runs, ("full", cores), ("bundle", cores)):
            environment = dict(os.environ)
            cache = Path(folder, "none" if store == "bundle" else str(jobs))
            if store == "bundle":
                # From the full store: nothing is compiled for it.
                build = [sys.executable, "-m", "moe_fp8.cli", "build", "--quiet", *model, "--bundle", bundle]
                _run([*build, "--cache-dir", str(Path(folder, str(cores)))], environment)
                environment["MOE_FP8_BUNDLE"] = bundle
            command = [sys.executable, "-m", "moe_fp8.warmup", "--quiet", *model, "--cache-dir", str(cache)]
            started = time.perf_counter()
            try:
                summary = json.loads(_run([*command, "--jobs", str(jobs)], environment))
            except (RuntimeError, ValueError) as error:
                session.fail(f"warmup store={store}", error)
                return
            seconds = time.perf_counter() - started
            shape = {"model": _MODEL.stem, "tp": _TP, "ep": _EP, "store": store, "jobs": jobs}
            row = Row("warmup", shape, seconds * 1e6)
            kept = (
                "kernels",
                "compiled",
                "loaded",
                "device",
                "plan_seconds",
                "build_seconds",
                "load_seconds",
            )
            row.notes = {name: summary.get(name) for name in kept}
            row.notes["cores"] = cores
            row.notes["engines' launches"] = _ENGINES_LAUNCHES
            session.store(row)


def _run(command: list[str], environment: dict[str, str]) -> str:
    """What it prints; RuntimeError with the end of its complaint where it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
