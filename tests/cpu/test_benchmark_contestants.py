"""How a shape's contestants are checked, chosen and recorded; and the sets of shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from benchmarks import (
    compare,
    cublas,
    gemm,
    silu_mul,
    topk,
)
from benchmarks.compare import Session
from benchmarks.peer import DeepGemm
from benchmarks.results import ResultsFile
from benchmarks.shapes import (
    DenseShape,
    SiluMulShape,
    TopkShape,
)
from tests.cpu.benchmark_peer import ReferencePeer
from tests.cpu.benchmark_rows import ENVIRONMENT, read_rows
from tests.cpu.test_benchmark_classes import on_cpu

__all__ = ["on_cpu"]


@pytest.mark.parametrize("damage", ["wrong", "unwritten"])
def test_a_wrong_result_is_not_timed(
    damage: str, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: Tensor, out: Tensor, constant_weights: bool) -> None:
        if damage == "wrong":
            out.normal_()

    monkeypatch.setattr(gemm, "DENSE", [DenseShape(3, 192, 256)])
    monkeypatch.setattr(moe_fp8, "gemm_fp8", broken)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    gemm.run_dense(session, None, 1)
    assert len(session.failures) == 1 and "WrongResult" in session.failures[0]
    assert not (tmp_path / "h200.json").exists()


def test_a_wrong_peer_is_left_out_with_the_reason(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken(ReferencePeer):
        def gemm(self, *arguments: Any) -> None:
            arguments[-1].zero_()

    monkeypatch.setattr(gemm, "DENSE", [DenseShape(3, 192, 256)])
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    gemm.run_dense(session, Broken(), 1)
    (row,) = read_rows(tmp_path / "h200.json")
    assert row["peers"] == {} and row["ratio"] is None
    assert "relative error 1" in row["notes"]["reference left out"]


def test_development_shapes_are_rows_of_their_own_set(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gemm, "DENSE", [DenseShape(3, 192, 256)])
    monkeypatch.setattr(gemm.random_shapes, "DENSE", [DenseShape(5, 64, 128), DenseShape(6, 64, 128)])
    path = tmp_path / "h200.json"

    def run(commit: str, *sets: str) -> list[tuple[str, str]]:
        results = ResultsFile(path, {**ENVIRONMENT, "commit": commit})
        session = Session(results, replays=20, failures=[], sets=sets)
        gemm.run_dense(session, ReferencePeer(), 1)
        assert session.failures == []
        return [(row["shape"].get("set", "listed"), row["commit"]) for row in read_rows(path)]

    assert run("a", "development") == [("development", "a")] * 2
    assert run("b", "listed") == [("listed", "b"), *[("development", "a")] * 2]
    assert run("c", "listed", "development") == [("listed", "c"), *[("development", "c")] * 2]


@pytest.mark.parametrize(("name", "draw"), [("unseen", "dense"), ("few_rounds", "few_rounds_dense")])
def test_shapes_are_drawn_from_the_measured_commit(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, draw: str
) -> None:
    monkeypatch.setattr(gemm.unseen_shapes, draw, lambda commit: [DenseShape(len(commit), 64, 128)])
    path = tmp_path / "h200.json"
    results = ResultsFile(path, {**ENVIRONMENT, "commit": "c" * 40})
    gemm.run_dense(Session(results, replays=1, failures=[], sets=(name,)), None, 1)
    (row,) = read_rows(path)
    assert row["shape"] == {"m": 40, "n": 64, "k": 128, "set": name} and row["commit"] == "c" * 40


@pytest.mark.parametrize(("l2", "warm"), [(2 * 5 * (5 * 256 + 8), True), (2 * 5 * (5 * 256 + 8) - 1, False)])
def test_inputs_that_stay_in_the_l2_give_no_bandwidth(
    l2: int, warm: bool, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(silu_mul, "SILU_MUL_QUANTIZE", [SiluMulShape(5, 256)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compare, "l2_bytes", lambda: l2)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    silu_mul.run_silu_mul_quantize(session, None, 1)
    (row,) = read_rows(tmp_path / "h200.json")
    assert on_cpu == [2] and row["us"] == 1.0
    assert (row["gbs"] is None) == (row["ceiling_share"] is None) == warm


@pytest.mark.parametrize(("l2", "warm"), [(2 * 4 * 3 * 64, True), (2 * 4 * 3 * 64 - 1, False)])
def test_an_output_that_all_sets_share_does_not_keep_a_row_cold(
    l2: int, warm: bool, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(topk, "TOPK", [TopkShape(3, 64, 32)])
    monkeypatch.setattr(compare, "l2_bytes", lambda: l2)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    topk.run_topk(session, None, 1)
    (row,) = read_rows(tmp_path / "h200.json")
    assert on_cpu == [2] and (row["gbs"] is None) == warm


def test_cublas_is_a_peer_and_a_ceiling(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def block_scaled(
        a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any
    ) -> Tensor:
        groups = a.shape[1] // 128
        assert a.shape[0] % 4 == 0
        # torch 2.11 checks the same before it calls cuBLASLt
        assert a_scale.shape == (a.shape[0], groups) and a_scale.stride() == (1, a.shape[0])
        padded = -(-groups // 4) * 4
        assert b_scale.shape == (padded, -(-b.shape[1] // 128)) and b_scale.stride() == (1, padded)
        assert (a_kind.name, b_kind.name) == ("BlockWise1x128", "BlockWise128x128")
        return moe_fp8.gemm_fp8(a, a_scale, b.t(), b_scale[:groups].t().contiguous())

    def tensor_scaled(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        assert options["scale_a"].numel() == options["scale_b"].numel() == 1
        return (a.float() @ b.float()).bfloat16()

    monkeypatch.setattr(gemm, "DENSE", [DenseShape(3, 192, 256), DenseShape(1, 64, 128)])
    monkeypatch.setattr(gemm, "CUBLAS", [cublas.scaled_mm, cublas.per_tensor])
    monkeypatch.setattr(cublas.functional, "scaled_mm", block_scaled)
    monkeypatch.setattr(torch, "_scaled_mm", tensor_scaled)
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    gemm.run_dense(session, ReferencePeer(), 1)
    assert session.failures == [] and on_cpu == [2, 2]
    for row in read_rows(tmp_path / "h200.json"):
        scaled_mm = next(name for name in row["peers"] if name.startswith("scaled_mm-"))
        assert row["peers"] == {"reference": 2.0, scaled_mm: 3.0}
        assert row["ratio"] == 2.0, "the ratio is against the best peer"
        assert row["notes"]["cublaslt per-tensor us"] == 4.0


def test_deep_gemm_runs_with_programmatic_dependent_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[bool] = []
    module = SimpleNamespace(
        __version__="2.8.1", set_pdl=given.append, set_mk_alignment_for_contiguous_layout=lambda rows: None
    )
    (tmp_path / "deep_gemm").mkdir()
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    assert DeepGemm(tmp_path).pdl and given == [True]
    module.__version__ = "2.5.0"
    with pytest.raises(RuntimeError, match="or newer"):
        DeepGemm(tmp_path)


def test_a_torch_without_scaled_mm_is_recorded(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gemm, "DENSE", [DenseShape(3, 192, 256)])
    monkeypatch.setattr(gemm, "CUBLAS", [cublas.scaled_mm])
    monkeypatch.delattr(cublas.functional, "ScalingType")
    session = Session(ResultsFile(tmp_path / "h200.json", ENVIRONMENT), replays=1, failures=[])
    gemm.run_dense(session, ReferencePeer(), 1)
    assert session.failures == []
    (row,) = read_rows(tmp_path / "h200.json")
    assert row["peers"] == {"reference": 2.0}
    (note,) = [text for name, text in row["notes"].items() if name.endswith("left out")]
    assert "ScalingType" in note
