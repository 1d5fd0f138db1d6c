"""Class engine: decode steps of a real vLLM with and without the plug-in, in alternating processes.

vLLM must be importable. The contestants are vLLM's two kinds of experts, each alone and with the plug-in
(MOE_FP8_ENGINE=1): "deep_gemm" is DeepGEMM for experts and dense layers, "triton" is Triton experts with
CUTLASS dense layers. (The indexer of DeepSeek-V3.2 needs DeepGEMM in both.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .compare import Session
from .peer import DeepGemm
from .results import ROOT, Row, four_digits
from .vllm_server import MODELS

EXPERTS = ("deep_gemm", "triton")

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


def run(model: str, experts: str, ours: bool, folder: Path, number: int, batches: str) -> dict[str, Any]:
    """One engine in a fresh process. Raises RuntimeError with the end of its output if it fails."""
    dense = experts == "deep_gemm" or model == "deepseek_v32"
    environment = {
        **os.environ,
        **_ENVIRONMENT,
        "VLLM_USE_DEEP_GEMM": str(int(dense)),
        "VLLM_MOE_USE_DEEP_GEMM": str(int(experts == "deep_gemm")),
        "MOE_FP8_ENGINE": str(int(ours)),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "MOE_FP8_CACHE_DIR": str(folder / "moe_fp8"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "STARTED": str(time.time()),
    }
    out = folder / f"{model}-{experts}-{int(ours)}-{number}.json"
    command = [sys.executable, "-m", "benchmarks.vllm_server", "--model", model, "--batches", batches]
    command += ["--folder", str(folder / model), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0 or not out.exists():
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
    told: dict[str, Any] = json.loads(out.read_text())
    told["seconds"]["all to first token"] = sum(told["seconds"].values())
    return told


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


def run_engine(
    session: Session, peer: DeepGemm | None, step: int, models: str = ",".join(MODELS), rounds: int = 2,
    batches: str = "1,8,32,64,256",
) -> None:  # fmt: skip
    """Every contestant once a round; the least of the rounds counts for each figure."""
    for model in models.split(","):
        told: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds):
                for experts in EXPERTS:
                    for ours in (True, False):
                        try:
                            made = run(model, experts, ours, Path(folder), number, batches)
                        except RuntimeError as error:
                            session.fail(f"engine {model} {experts} ours={ours}", error)
                            continue
                        told.setdefault((experts, ours), []).append(made)
        _store(session, model, told)


def _store(session: Session, model: str, told: dict[tuple[str, bool], list[dict[str, Any]]]) -> None:
    for experts in EXPERTS:
        ours, theirs = told.get((experts, True)), told.get((experts, False))
        if not ours or not theirs:
            continue
        name = f"vllm {experts}"
        for batch in ours[0]["batches"]:
            for figure in ("gpu_us", "wall_us"):
                shape = {"model": model, "experts": experts, "batch": int(batch), "time": figure[:-3]}
                row = Row("engine", shape, _least(ours, batch, figure))
                row.peers[name] = _least(theirs, batch, figure)
                if figure == "gpu_us":
                    row.notes = _notes(ours, theirs, batch)
                session.store(row)
        for figure in ("all to first token", "engine"):
            for number, what in ((0, "cold"), (len(ours) - 1, "warm")):
                shape = {"model": model, "experts": experts, "start": what, "time": figure}
                row = Row("engine", shape, ours[number]["seconds"][figure] * 1e6)
                row.peers[name] = theirs[min(number, len(theirs) - 1)]["seconds"][figure] * 1e6
                row.notes = {"counters": ours[number].get("counters"), "vllm": ours[number]["vllm"]}
                session.store(row)


def _least(runs: list[dict[str, Any]], batch: str, figure: str) -> float:
    return min(float(one["batches"][batch][figure]) for one in runs)


def _notes(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], batch: str) -> dict[str, Any]:
    one, other = ours[0]["batches"][batch], theirs[0]["batches"][batch]
    equal, mean = distance(one, other)
    notes: dict[str, Any] = {"equal tokens": four_digits(equal), "mean |d log p|": four_digits(mean)}
    if len(theirs) > 1:
        equal, mean = distance(other, theirs[1]["batches"][batch])
        notes["theirs again: equal tokens"] = four_digits(equal)
        notes["theirs again: mean |d log p|"] = four_digits(mean)
    for name, runs in (("ours", ours), ("theirs", theirs)):
        top = runs[0]["batches"][batch]["kernels_us"]
        notes[f"kernels of {name}"] = {kernel: four_digits(us) for kernel, us in list(top.items())[:6]}
    return notes


def main() -> None:
    """Run single engines and print what they tell, for work on the plug-in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--contestants", default="deep_gemm+ours,deep_gemm,triton+ours,triton")
    parser.add_argument("--batches", default="1,8,32,64,256")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "engine"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    base: dict[str, Any] = {}
    for contestant in options.contestants.split(","):
        experts, _, plug_in = contestant.partition("+")
        made = run(options.model, experts, bool(plug_in), options.folder, 0, options.batches)
        print(contestant, made["seconds"], made.get("counters"))
        for batch, one in made["batches"].items():
            finite = all(math.isfinite(log) for logs in one["logprobs"] for log in logs)
            compared = distance(base[batch], one) if batch in base else ""
            print(f"  {batch}: gpu {one['gpu_us']:.0f} wall {one['wall_us']:.0f} {finite} {compared}")
            base.setdefault(batch, one)


if __name__ == "__main__":
    main()
