"""benchmarks/repetition.py counts the faults of a fake op, and its cases say which elements an op writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import inputs, repeated, repeated_indexer, repetition, report
from benchmarks.compare import Session
from benchmarks.repeated import CASES
from benchmarks.repeated_gemm import QuantizeShape
from benchmarks.repeated_indexer import CacheShape
from benchmarks.repeated_moe import MoeShape
from benchmarks.repetition import Case, Repetition, Work, repeat
from benchmarks.results import RepetitionRow, ResultsFile
from benchmarks.shapes import (
    DenseShape,
    GroupedShape,
    KGroupedShape,
    MqaShape,
    PagedShape,
    SiluMulShape,
    TopkShape,
)
from moe_fp8 import heuristics
from moe_fp8.ops.registry import OPS
from moe_fp8.problems import GemmProblem, GemmSiluMulProblem, IndexerTopkProblem, MqaLogitsProblem
from tests import graph_cases
from tests.cpu.benchmark_rows import ENVIRONMENT

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FakeShape:
    rows: int = 4
    columns: int = 6


def fake(
    is_wrong: Callable[[int], bool],
    damage: Callable[[Tensor], object] = lambda out: out[2, 5].fill_(-1),
    defined: Tensor | None = None,
) -> Case:
    """A case that writes 0, 1, 2...; in calls that `is_wrong` names, `damage` then spoils the output.

    `is_wrong` takes the number of a call, counted from 0.
    """

    def make(shape: FakeShape) -> Work:
        calls = iter(range(1_000_000))

        def call(out: Tensor) -> None:
            out.copy_(torch.arange(shape.rows * shape.columns).view_as(out))
            if is_wrong(next(calls)):
                damage(out)

        return Work(call, (shape.rows, shape.columns), torch.float32, CPU, defined)

    return Case("fake", FakeShape(), make)


def never(call: int) -> bool:
    return False


def test_what_repeats_is_counted_and_not_reported() -> None:
    found = repeat(fake(never), 0, seed=3)
    assert found == Repetition(9, 9, 0, found.seconds, 3, {})
    assert str(found) == f"0 of 9 outputs differ (9 calls in {found.seconds:.1f} s, seed 3)"


def test_every_wrong_call_is_counted() -> None:
    found = repeat(fake(lambda call: call in (4, 5, 8)), 0, seed=0)
    assert (found.calls, found.compared, found.differing) == (9, 9, 3)
    assert found.by_traffic == {"rest": 3} and not found.first_was_wrong
    assert "3 of 9 outputs differ" in str(found) and "3 beside rest" in str(found)
    assert found.example == (
        "1 element, the first at (2, 5): -1 (0xbf800000), in the first call 17 (0x41880000); row 2; column 5 "
        "(eager, beside rest)"
    )


@pytest.mark.parametrize("others", [(), (3, 6)])
def test_a_wrong_first_result_is_known_by_the_majority(others: tuple[int, ...]) -> None:
    found = repeat(fake(lambda call: call == 0 or call in others), 0, seed=0)
    assert found.differing == 1 + len(others) and found.first_was_wrong
    assert found.by_traffic == {"rest": found.differing}
    assert "in the first call -1" in found.example and "this one was wrong" in str(found)


def test_calls_go_on_for_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count(0.0, 0.01)
    monkeypatch.setattr(repetition.time, "monotonic", lambda: next(seconds))
    found = repeat(fake(lambda call: call % 8 == 1), 0.2, seed=0)
    assert found.calls > 100 and 0 < found.differing < found.compared / 7
    assert 0.2 <= found.seconds < 0.25


def test_what_is_not_defined_may_hold_anything_and_the_rest_must_be_written() -> None:
    defined = torch.ones(4, 1, dtype=torch.bool)
    defined[2] = False
    assert repeat(fake(lambda call: call == 4, defined=defined), 0, seed=0).differing == 0

    def make(shape: FakeShape) -> Work:
        return Work(lambda out: out[:, 0].zero_(), (4, 6), torch.bfloat16, CPU)

    assert repeat(Case("lazy", FakeShape(), make), 0, seed=0).differing > 0


def test_an_example_of_many_elements_names_some() -> None:
    def damage(out: Tensor) -> None:
        out[1:, 3:] = torch.nan

    case = replace(fake(lambda call: call == 2, damage), shape=FakeShape(20, 30))
    assert repeat(case, 0, seed=0).example == (
        "513 elements, the first at (1, 3): nan (0x7fc00000), in the first call 33 (0x42040000); "
        "19 rows, 1, 2, 3, 4, 5, 6... 19; 27 columns, 3, 4, 5, 6, 7, 8... 29 (eager, beside rest)"
    )


def test_large_outputs_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_AT_ONCE", 100)
    defined = torch.ones(10, 3, dtype=torch.bool)
    defined[8, 2] = False
    for some, what in (
        (None, "2 elements, the first at (8, 2)"),
        (defined, "1 element, the first at (9, 2)"),
    ):
        case = fake(lambda call: call == 7, lambda out: out[8:, 2].zero_(), some)
        found = repeat(replace(case, shape=FakeShape(10, 3)), 0, seed=0)
        assert found.differing == 1 and what in found.example


class Recorder:
    """Plays graphs, the other stream and the kernel between calls."""

    def __init__(self) -> None:
        self.into: list[Callable[[], object]] | None = None
        self.started: list[str] = []
        self.captured: list[Recorded] = []
        self.num_between = 0

    def start(self, kind: str, pieces: int) -> None:
        self.started += [kind] * pieces

    def between(self) -> None:
        self.do(self._count)

    def _count(self) -> None:
        self.num_between += 1

    def do(self, action: Callable[[], object]) -> None:
        if self.into is None:
            action()
        else:
            self.into.append(action)

    @contextmanager
    def graph(self, graph: Recorded) -> Iterator[None]:
        self.captured.append(graph)
        self.into = graph.actions
        yield
        self.into = None


class Recorded:
    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []

    def replay(self) -> None:
        for action in self.actions:
            action()


def test_rounds_beside_traffic_and_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    case = fake(lambda call: call % 10 == 9)

    def make(shape: FakeShape) -> Work:
        work = case.make(shape)
        return replace(work, call=lambda out: recorder.do(partial(work.call, out)))

    monkeypatch.setattr(repetition, "_units", lambda size, device: 3)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    traffic: Any = recorder
    found = repeat(replace(case, make=make), 0.2, 0, traffic)
    assert found.calls % 24 == 1 and found.differing == found.calls // 10
    assert (
        set(found.by_traffic) == {"writes", "sparse writes", "reads", "rest"} == {*recorder.started, "rest"}
    )
    # Each of the three units has one graph of calls alone, and one graph with another kernel after each call.
    assert sorted(len(graph.actions) for graph in recorder.captured) == [8] * 3 + [16] * 3
    assert recorder.num_between > found.calls / 4


#: Shapes that the CPU reference computes at once; all terms that distinguish kernels stay.
SMALL: dict[type, dict[str, int]] = {
    DenseShape: {"m": 5, "n": 64, "k": 128},
    GroupedShape: {"num_experts": 3, "rows_per_expert": 5, "n": 64, "k": 128},
    KGroupedShape: {"num_experts": 6, "tokens_per_expert": 256, "m": 5, "n": 64},
    QuantizeShape: {"m": 4, "k": 256},
    SiluMulShape: {"m": 4, "intermediate": 128},
    MqaShape: {"num_queries": 6, "context": 150},
    PagedShape: {"batch": 3, "context": 150},
    CacheShape: {"pages": 2},
    MoeShape: {"tokens": 5, "topk": 2, "num_experts": 4, "hidden": 128, "intermediate": 128},
    TopkShape: {"rows": 3, "columns": 300, "k": 16},
}


def small(case: Case) -> Case:
    sizes, options = dict(SMALL[type(case.shape)]), dict(case.options)
    if isinstance(case.shape, DenseShape) and "config" in options:
        # K is large enough for this config to divide.
        sizes["k"] = 512 * heuristics.gemm_config(_problem(case)).parts
    if "topk" in options:
        options["topk"] = 16
    if "groups" in options:
        options["groups"] = 2
    if "max_bytes" in options:
        sizes["context"], options["max_bytes"] = 700, 16_000  # still several chunks
    return replace(case, shape=replace(case.shape, **sizes), options=options)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "DEVICE", CPU)
    monkeypatch.setattr(repeated_indexer, "num_sms", lambda: 4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_case_says_which_elements_are_written(case: Case, on_cpu: None) -> None:
    torch.manual_seed(0)
    case = small(case)
    work = case.make(case.shape, **case.options)
    results = []
    for byte in (0x7F, 0xFF):
        out = torch.empty(work.shape, dtype=work.dtype)
        out.view(torch.uint8).fill_(byte)
        work.call(out)
        results.append(out.view(torch.uint8).view(*work.shape, work.dtype.itemsize))
    written = (results[0] == results[1]).all(-1)
    defined = torch.tensor(True) if work.defined is None else work.defined
    assert torch.equal(written, defined.expand(work.shape)) and written.any()


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_the_reference_repeats(op: str, on_cpu: None) -> None:
    case = next(case for case in CASES if case.op == op)
    assert repeat(small(case), 0, seed=1).differing == 0


class OpsCalled(TorchDispatchMode):
    """The names of this package's ops that were called; on a CPU each call goes through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "moe_fp8":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_cases_call_every_op(on_cpu: None) -> None:
    called = OpsCalled()
    for case in map(small, CASES):
        work = case.make(case.shape, **case.options)
        with called:
            work.call(torch.zeros(work.shape, dtype=work.dtype))
    assert called.names == OPS.keys()


def test_cases_of_graphs_call_every_op() -> None:
    called = OpsCalled()
    for case in graph_cases.CASES.values():
        given = case.inputs(0, "cpu")
        with called:
            case.call(given)
    assert called.names == OPS.keys()


def test_names_tell_cases_apart() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    some = [case.terms for case in repeated.chosen("context=200000, m=1191,")]
    assert [(terms["op"], terms.get("m")) for terms in some] == [
        ("gemm_fp8", 1191),
        ("gemm_fp8", 1191),
        ("mqa_logits_fp8", None),
    ]


def _problem(case: Case) -> GemmProblem:
    shape, options = case.shape, case.options
    if isinstance(shape, DenseShape):
        return GemmProblem("dense", shape.m, shape.n, shape.k, config=options.get("config"))
    rows = shape.rows_per_expert
    return GemmProblem(
        shape.layout,
        max(shape.counts()) if shape.layout == "masked" else rows * shape.num_experts,
        shape.n,
        shape.k,
        shape.num_experts,
        rows,
        config=options.get("config"),
    )


def test_cases_have_every_family_of_gemm_tiles() -> None:
    gemms = [case for case in CASES if isinstance(case.shape, DenseShape | GroupedShape)]
    used: dict[str, set[heuristics.GemmConfig]] = {}
    for case in gemms:
        problem = _problem(case)
        used.setdefault(problem.layout, set()).add(heuristics.gemm_config(problem))
    every = set().union(*used.values())
    assert {config.block_m for config in every} == {8, 16, 32, 64, 128, 192}
    assert {config.block_n for config in every} == {64, 96, 128, 192, 256}
    assert {config.split for config in every} == {1, 2, 3, 4}
    assert {config.block_m for config in every if config.alternate} == {8, 16, 32}
    assert any(config.pair > 1 for config in used["dense"]) and any(
        config.divided for config in used["dense"]
    )
    for layout in ("m_indices", "psum", "offsets", "masked"):
        assert len(used[layout]) >= 2
    fp32 = {_problem(case).layout for case in gemms if case.options.get("out_dtype") == "float32"}
    assert fp32 == {"dense", "m_indices", "offsets", "masked"}


def test_cases_have_every_tile_of_the_gemm_that_ends_in_silu() -> None:
    shapes = [case.shape for case in CASES if case.op == "grouped_gemm_silu_mul_fp8"]
    problems = [
        GemmSiluMulProblem(shape.tokens * shape.topk, 2 * shape.intermediate, shape.hidden, shape.num_experts)
        for shape in shapes
    ]
    assert {heuristics.silu_mul_config(problem.rows) for problem in problems} == {
        *heuristics.silu_mul_configs()
    }


def test_cases_have_every_kernel_of_the_indexer() -> None:
    mqa = [(case.shape, case.options) for case in CASES if case.op == "mqa_logits_fp8"]
    for terms in (False, True):
        some = [
            (shape, options)
            for shape, options in mqa
            if heuristics.mqa_config(
                MqaLogitsProblem(shape.num_queries, shape.context, shape.heads, shape.head_dim)
            ).terms
            is terms
        ]
        assert {shape.heads for shape, _ in some} == {8, 16, 32, 64}
        assert {shape.head_dim for shape, _ in some} == {32, 64, 128}
        for option in ("fill", "compressed", "out_dtype"):
            assert {option in options for _, options in some} == {False, True}
    paged = [case.shape for case in CASES if case.op == "paged_mqa_logits_fp8"]
    assert {shape.next_n for shape in paged} == {1, 2, 4, 8}
    assert {shape.block_size for shape in paged} == {32, 64, 128}
    assert {shape.heads for shape in paged} == {8, 16, 32, 64}
    assert {shape.head_dim for shape in paged} == {32, 64, 128}
    chosen = [case.shape for case in CASES if case.op == "indexer_topk"]
    configs = [heuristics.topk_config(IndexerTopkProblem(shape.rows, shape.columns)) for shape in chosen]
    assert {config.cluster for config in configs} == {1, 2, 4, 8}
    assert {config.num_threads for config in configs} == {512, 1024}


def test_the_class_stores_rows_and_fails_what_differs(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(shape: FakeShape) -> Work:
        raise RuntimeError("no memory")

    wrong = fake(lambda call: call == 5)
    cases = [fake(never), replace(wrong, op="fake two"), Case("no op", FakeShape(), broken)]
    monkeypatch.setattr(repeated, "CASES", cases)
    path = tmp_path / "h200.json"
    session = Session(ResultsFile(path, ENVIRONMENT), replays=1, failures=[])
    repeated.run_repetition(session, None, 1, seconds=0, seed=7)
    assert [failure.split(":")[1].strip() for failure in session.failures] == [
        "OutputsDiffer",
        "RuntimeError",
    ]
    rows = json.loads(path.read_text())["rows"]
    assert rows[0].pop("seconds") >= 0
    assert rows[0] == {
        "class": "repetition",
        "shape": {"op": "fake", "rows": 4, "columns": 6},
        "calls": 9,
        "compared": 9,
        "differing": 0,
        "seed": 7,
        **{name: fact for name, fact in ENVIRONMENT.items() if name != "device"},
    }
    assert rows[1]["differing"] == 1 and "(2, 5)" in rows[1]["notes"]["example"]
    with pytest.raises(ValueError, match="no case"):
        repeated.run_repetition(session, None, 1, only="nothing")


def test_rows_of_a_case_are_replaced_seed_by_seed_and_summed_by_op(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"

    def add(commit: str, *rows: tuple[str, int, int, int]) -> None:
        date = {"a": "2026-01-01", "b": "2026-01-02"}[commit]
        results = ResultsFile(path, {**ENVIRONMENT, "commit": commit, "date": date})
        for op, m, seed, calls in rows:
            results.add(RepetitionRow({"op": op, "m": m}, calls, calls - 1, m == 5, 0.6, seed))

    add("a", ("gemm", 5, 0, 1000), ("gemm", 5, 1, 100), ("topk", 7, 0, 10))
    add("b", ("gemm", 5, 1, 2000), ("gemm", 6, 1, 300))
    device = json.loads(path.read_text())
    assert sorted(row["calls"] for row in device["rows"]) == [10, 300, 1000, 2000]
    text = report.full([device])
    assert "| op | cases | seeds | calls | compared | differing |" in text
    assert "| gemm | 2 | 2 | 3,300 | 3,297 | 2 |\n| topk | 1 | 1 | 10 | 9 | 0 |\n" in text
    assert "| all | 3 | 2 | 3,310 | 3,306 | 2 |" in text
    assert "Measured 2026-01-01 `a`; 2026-01-02 `b` (driver 1, CUDA 13.0, PyTorch 2)." in text
    assert "dense" not in report.summary([device])
    assert report.repetition([device]).startswith(
        "From 2026-01-01 to 2026-01-02 the ops have been called 3,310 times, mostly during other memory "
        "traffic. 3,306 outputs were compared bit for bit, and 2 differed"
    )
