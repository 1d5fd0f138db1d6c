"""Every class of the benchmarks on the CPU: it builds its inputs, checks results and stores rows.

The reference ops play the peer. Only the clock is replaced.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from benchmarks import (
    compare,
    full_size,
    gemm,
    host,
    inputs,
    k_grouped,
    logits,
    moe_layer,
    random_shapes,
    serve,
    silu_mul,
    startup,
    topk,
    vllm_layer,
)
from benchmarks.compare import Session
from benchmarks.results import ROOT, ResultsFile
from benchmarks.shapes import (
    DenseShape,
    GroupedShape,
    KGroupedShape,
    MoeLayerShape,
    MqaShape,
    PagedShape,
    SiluMulShape,
    TopkShape,
)
from server_example.settings import SHAKESPEARE
from tests.cpu.benchmark_peer import ReferencePeer
from tests.cpu.benchmark_rows import ENVIRONMENT, read_rows


def _rotating(call: Any) -> list[int]:
    """The identities of the operands that differ between input sets: the first one, and those in FP8."""
    return [
        operand.data_ptr() if isinstance(operand, Tensor) else id(operand)
        for place, operand in enumerate(getattr(call, "args", ()))
        if place == 0 or (isinstance(operand, Tensor) and operand.dtype == torch.float8_e4m3fn)
    ]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The harness on the CPU: CPU tensors, a small L2, and a clock that says 1, 2, 3... microseconds.

    Gives the number of input sets of each row that was timed. All contestants have as many, and no two calls
    of a contestant read the same operands.
    """
    sets: list[int] = []

    def replay(calls: list[Any], num_calls: int) -> list[Any]:
        for call in calls:
            call()
        assert num_calls >= 8 and num_calls % len(calls) == 0
        for operands in zip(*map(_rotating, calls), strict=True):
            assert len(set(operands)) == len(calls), "two calls have the same input"
        return calls

    def alternate(replays: list[Any], turns: int) -> list[float]:
        (count,) = {len(calls) for calls in replays}
        sets.append(count)
        return [float(i + 1) for i in range(len(replays))]

    monkeypatch.setattr(inputs, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(compare, "Replay", replay)
    monkeypatch.setattr(compare, "alternate", alternate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (compare, gemm, k_grouped, logits, silu_mul, topk):
        monkeypatch.setattr(module, "l2_bytes", lambda: 1)
    for module in (logits, host, startup):
        monkeypatch.setattr(module, "num_sms", lambda: 4)
    monkeypatch.setattr(gemm, "_MASKED_ROWS", 8)
    monkeypatch.setattr(gemm, "CUBLAS", [])
    return sets


SMALL = {
    "dense": (gemm, "DENSE", [DenseShape(3, 192, 256), DenseShape(1, 64, 128)]),
    "contiguous": (
        gemm,
        "CONTIGUOUS",
        [
            GroupedShape("m_indices", 3, 5, 192, 256, "zipf"),
            GroupedShape("psum", 4, 2, 64, 128, "routed"),
            GroupedShape("offsets", 4, 2, 64, 128, "routed"),
        ],
    ),
    "masked": (gemm, "MASKED", [GroupedShape("masked", 3, 4, 192, 256, "spread")]),
    "k_grouped": (
        k_grouped,
        "K_GROUPED",
        [KGroupedShape(3, 256, 70, 64), KGroupedShape(6, 512, 5, 128, "zipf", empty=2)],
    ),
    "mqa_logits": (logits, "MQA_LOGITS", [MqaShape(5, 40, heads=8)]),
    "paged_mqa_logits": (
        logits,
        "PAGED_MQA_LOGITS",
        [PagedShape(3, 90, heads=8), PagedShape(2, 300, next_n=2, heads=8)],
    ),
    "paged_metadata": (logits, "PAGED_METADATA", [PagedShape(3, 700)]),
}


@pytest.mark.parametrize("cls", SMALL)
def test_class_runs_against_a_peer(
    cls: str, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, constant, shapes = SMALL[cls]
    monkeypatch.setattr(module, constant, shapes)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    getattr(module, f"run_{cls}")(session, ReferencePeer(), 1)
    assert session.failures == []
    rows = read_rows(tmp_path / "h200.json")
    assert len(rows) == len(shapes)
    # The metadata of paged logits have no inputs to speak of.
    assert on_cpu == [1 if cls == "paged_metadata" else 2] * len(shapes)
    for row in rows:
        assert row["class"] == cls
        assert row["us"] == 1.0 and row["peers"] == {"reference": 2.0} and row["ratio"] == 2.0
        expected = {"reference rel_error"}
        if row["class"] == "dense":
            expected |= {"batch-invariant rel_error", "batch-invariant us"}
        assert row["notes"].keys() == expected, "the peer was left out"
        assert 0 <= row["rel_error"] < 3e-3


def test_a_layer_runs_beside_the_engines(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(weights: tuple[Tensor, ...], topk: int, num_experts: int, expert_map: Tensor | None) -> Any:
        assert (expert_map is None) == (num_experts == weights[0].shape[0])

        def layer(x: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
            return moe_fp8.fused_moe(x, ids, topk_weights, *weights, expert_map=expert_map)

        return {"reference": layer, "wrong": lambda x, topk_weights, ids: x}

    shapes = [
        MoeLayerShape("small", tokens, routing, 256, 128, 8, local, 2)
        for local, routing, tokens in ((8, "uniform", 5), (2, "zipf", 1), (2, "zipf", 40))
    ]
    monkeypatch.setattr(moe_layer, "MOE_LAYER", shapes)
    monkeypatch.setattr(vllm_layer, "load", load)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    moe_layer.run_moe_layer(session, None, 1)
    assert session.failures == []
    rows = read_rows(tmp_path / "h200.json")
    assert len(rows) == len(shapes) and on_cpu == [8] * len(shapes)
    for row in rows:
        assert row["peers"] == {"reference": 3.0} and row["notes"]["interleaved us"] == 2.0
        assert "WrongResult" in row["notes"]["wrong left out"]
        assert 0 <= row["rel_error"] < moe_layer.TOLERANCE
        weight_bytes = 3 * 256 * 128
        assert row["notes"]["floor us"] <= row["shape"]["local_experts"] * weight_bytes / 4550e3


def test_a_servers_step_runs_as_a_graph_and_eagerly(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "_BATCHES", (1, 3))
    monkeypatch.setattr(serve, "_STEPS", 2)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    serve.run_serve(session, None, 1)
    rows = read_rows(tmp_path / "h200.json")
    assert [row["shape"]["batch"] for row in rows] == [1, 3]
    assert all(row["us"] > 0 and row["peers"]["eager"] > 0 for row in rows)


def test_a_step_of_full_size_runs_as_a_graph_and_eagerly(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(full_size, "_MODEL", SHAKESPEARE / "config.json")
    monkeypatch.setattr(full_size, "_LAYERS", {"num_hidden_layers": 2})
    monkeypatch.setattr(full_size, "_BATCHES", (1, 3))
    monkeypatch.setattr(full_size, "_CONTEXT", 200)
    monkeypatch.setattr(full_size, "_STEPS", 2)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    full_size.run_full_size(session, None, 1)
    rows = read_rows(tmp_path / "h200.json")
    shape = {"model": "deepseek_v32", "layers": 2, "context": 200}
    assert [row["shape"] for row in rows] == [{**shape, "batch": batch} for batch in (1, 3)]
    assert all(row["us"] > 0 and row["peers"]["eager"] > 0 for row in rows)
    assert all(row["notes"] == {"shares": {}} for row in rows), "there is no kernel on a CPU"


def test_weight_gradients_of_experts_without_tokens() -> None:
    shape = KGroupedShape(8, 1024, 64, 64, "zipf", empty=2)
    counts = shape.counts()
    assert len(counts) == 8 and sum(counts) == 6 * 1024 and not any(count % 128 for count in counts)
    assert counts[3] == counts[7] == 0 and counts.count(0) == 2
    assert k_grouped.k_grouped_bytes([256, 0], 64, 128) == 256 * 192 * 1.03125 + 8 * 64 * 128


def test_silu_mul_runs_beside_its_parts(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = [SiluMulShape(5, 256), SiluMulShape(4, 128, num_experts=3, buffer_rows=8)]
    monkeypatch.setattr(silu_mul, "SILU_MUL_QUANTIZE", shapes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    silu_mul.run_silu_mul_quantize(session, None, 1)
    assert session.failures == [] and on_cpu == [2, 2]
    rows, masked = read_rows(tmp_path / "h200.json")
    assert rows["peers"] == {"torch + quantize_fp8": 2.0} and rows["notes"]["copy us"] == 3.0
    assert masked["peers"] == {} and masked["notes"]["copy us"] == 2.0
    assert rows["gbs"] == pytest.approx(5 * (5 * 256 + 8) / 1e3, rel=1e-3)
    assert masked["gbs"] == pytest.approx(12 * (5 * 128 + 4) / 1e3, rel=1e-3)
    assert all(1e-2 < row["rel_error"] < 4e-2 for row in (rows, masked))


def test_topk_runs_beside_torch(on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(topk, "TOPK", [TopkShape(3, 50, 8), TopkShape(9, 50, 8, "causal")])
    monkeypatch.setattr(random_shapes, "TOPK", [TopkShape(2, 70, 9, "causal")])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    results = ResultsFile(tmp_path / "h200.json", ENVIRONMENT)
    session = Session(results, replays=1, failures=[], sets=("listed", "development"))
    topk.run_topk(session, None, 1)
    assert session.failures == [] and on_cpu == [2, 2, 2]
    rows = read_rows(tmp_path / "h200.json")
    assert [row["shape"].get("set") for row in rows] == [None, None, "development"]
    for row in rows:
        assert row["peers"] == {"torch.topk": 2.0} and row["rel_error"] == 0


def test_topk_knows_a_wrong_choice() -> None:
    logits = torch.arange(10.0)[None]
    for columns, error in (([7, 8, 9], 0.0), ([6, 8, 9], math.inf), ([8, 9, 9], math.inf)):
        assert topk._error(torch.tensor([columns], dtype=torch.int32), logits, 3) == error


def test_host_class_times_every_op(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_CALLS", "_ROUNDS", "_NEW_CALLS", "_NEW_ROUNDS"):
        monkeypatch.setattr(host, name, 2)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    host.run_host(session, ReferencePeer(), 1)
    assert session.failures == []
    rows = read_rows(tmp_path / "h200.json")
    ops = {
        "gemm_fp8": ["reference"],
        "grouped_gemm_fp8_masked": ["reference"],
        "quantize_fp8": [],
        "indexer_quantize_and_cache": [],
        "paged_mqa_logits_fp8": ["reference"],
    }
    kinds = ("again", "new address", "new m")
    expected = [({"op": op, "call": kind}, peers) for op, peers in ops.items() for kind in kinds]
    assert [(row["shape"], sorted(row["peers"])) for row in rows] == expected


def test_calls_of_class_host_are_as_new_as_their_row_says(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "_NEW_CALLS", 3)
    monkeypatch.setattr(host, "_NEW_ROUNDS", 2)
    seen: dict[str, list[tuple[int, int]]] = {}

    def eager(session: Any, op: Any, kind: str, peer: Any, rounds: Any, before: Any) -> None:
        if op.name == "gemm_fp8":
            made = [op.ours(*where).args[0] for calls in (before, *rounds) for where in calls]
            seen[kind] = [(a.shape[0], a.data_ptr()) for a in made]

    monkeypatch.setattr(host, "_eager", eager)
    host.run_host(Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), 1, []), None, 1)
    assert len(set(seen["again"])) == 1
    *usual, moved = seen["new address"][:-6], seen["new address"][-6:]
    assert {m for m, _ in moved} == {64} and len({address for _, address in moved}) == 6
    assert not set(moved) & set(usual[0]) and all(address % 16 == 0 for _, address in moved)
    before, timed = [m for m, _ in seen["new m"][:6]], [m for m, _ in seen["new m"][6:]]
    assert len(set(timed)) == 6 and not set(timed) & {64, *before}


def test_compile_plan_and_warmup_run_without_a_gpu(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    monkeypatch.setattr(startup, "_COMPILES", 1)
    startup.run_compile(session, None, 24)
    startup.run_plan(session, None, 1)
    monkeypatch.setattr(startup, "_MODEL", ROOT / "tests" / "configs" / "qwen3_30b.json")
    # Few kernels, since they are compiled twice: at TP8 only the dense layers can be served.
    monkeypatch.setattr(startup, "_OPTIONS", {"tp": 8, "max_tokens": 16, "max_batch": 4})
    startup.run_warmup(session, None, 1)
    assert session.failures == []
    rows = read_rows(tmp_path / "h200.json")
    compiled = [row for row in rows if row["class"] == "compile"]
    assert "gemm_fp8" in {row["shape"]["kernel"] for row in compiled}
    assert all(0 < row["us"] <= row["notes"]["max_us"] for row in compiled)
    planned = [row for row in rows if row["class"] == "plan"]
    assert len(planned) == 3 and all(row["us"] > 0 and row["notes"]["kernels"] > 50 for row in planned)
    *empties, full, full_on_one_core, bundle = (row for row in rows if row["class"] == "warmup")
    assert [row["shape"]["ranks"] for row in empties] == [1, 8]
    # All ranks together compile each kernel once.
    assert all(row["notes"]["compiled by all ranks"] == row["notes"]["kernels"] > 0 for row in empties)
    assert [row["notes"]["compiled"] for row in (full, full_on_one_core, bundle)] == [0, 0, 0]
    assert bundle["shape"]["store"] == "bundle"
