"""Class engine: decode steps of a real vLLM with and without the plug-in, in alternating processes.

vLLM must be importable. The contestants are vLLM's two kinds of experts, each alone and with the plug-in
(MOE_FP8_ENGINE=1): "deep_gemm" is DeepGEMM for experts and dense layers, "triton" is Triton experts with
CUTLASS dense layers. (The indexer of DeepSeek-V3.2 needs DeepGEMM in both.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compare import Session
from .device import environment
from .results import RESULTS, ROOT, ResultsFile, Row, four_digits, git_commit
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
    session: Session,
    models: Sequence[str] = tuple(MODELS),
    experts: Sequence[str] = EXPERTS,
    rounds: int = 2,
    batches: str = "1,8,32,64,256",
) -> None:
    """Every contestant once a round; the least of the rounds counts for each figure."""
    for model in models:
        for kind in experts:
            told: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    for number in range(rounds):
                        for ours in (True, False):
                            told[ours].append(run(model, kind, ours, Path(folder), number, batches))
                except RuntimeError as error:
                    session.fail(f"engine {model}, {kind}", error)
                    continue
            _store(session, model, kind, told[True], told[False])


def _store(
    session: Session, model: str, experts: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> None:
    name = f"vllm {experts}"
    for batch in ours[0]["batches"]:
        for figure in ("gpu_us", "wall_us"):
            shape = {"model": model, "experts": experts, "batch": int(batch), "time": figure[:-3]}
            row = Row("engine", shape, _least(ours, batch, figure))
            row.peers[name] = _least(theirs, batch, figure)
            if figure == "gpu_us":
                row.notes = _notes(ours, theirs, batch)
            session.store(row)
    for number, start in enumerate(("cold", "warm")[: len(ours)]):
        shape = {"model": model, "experts": experts, "start": start, "time": "to first token"}
        row = Row("engine", shape, ours[number]["seconds"]["all to first token"] * 1e6)
        row.peers[name] = theirs[number]["seconds"]["all to first token"] * 1e6
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
    """Measure, and store the rows of these models in the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--experts", default=",".join(EXPERTS))
    parser.add_argument("--batches", default="1,8,32,64,256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/DEVICE.json)")
    parser.add_argument("--commit", help="what is measured, where this is not a git clone")
    options = parser.parse_args()
    facts = environment(options.commit or git_commit())
    file = ResultsFile(options.out or RESULTS / f"{facts['device']}.json", facts)
    session = Session(file, replays=1, failures=[])
    run_engine(
        session, options.models.split(","), options.experts.split(","), options.rounds, options.batches
    )
    sys.exit("\n".join(session.failures) or None)


if __name__ == "__main__":
    main()
