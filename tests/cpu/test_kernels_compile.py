"""Every kernel that a call can reach compiles for sm_90a without a GPU, and keeps its values in registers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_fp8.jit.build import BuildReport, build
from moe_fp8.jit.store import KernelStore
from moe_fp8.problems import (
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
)
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup import Plan, PlanOptions, load_model, plan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

#: Register file of one SM, in 32-bit registers: what one block may use at most.
REGISTER_FILE = 65_536

HEADS = (8, 16, 32, 64)


def gemm_problems() -> Iterator[Problem]:
    """Row counts on both sides of every tile boundary, for few and many tiles, experts and columns."""
    rows = sorted({r + d for r in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096) for d in (-1, 0, 1)} - {0})
    widths = (192, 576, 2112, 4096, 7168, 24576)
    out_dtypes = ("bfloat16", "float32")
    for m, n, out_dtype in itertools.product(rows, widths, out_dtypes):
        for k in (128, 2048, 7168):
            yield GemmProblem("dense", m, n, k, out_dtype=out_dtype)
        for layout, experts in itertools.product(("m_indices", "psum", "offsets", "masked"), (1, 8, 64, 256)):
            yield GemmProblem(layout, m * experts, n, 2048, experts, m, out_dtype)
            yield GemmProblem(layout, m, n, 2048, experts, None, out_dtype)


def indexer_problems() -> Iterator[Problem]:
    for heads, compressed, fill in itertools.product(HEADS, (False, True), (False, True)):
        for queries in (1, 64, 4096):
            yield MqaLogitsProblem(queries, 8192, heads, 128, compressed, fill)
    for heads, next_n, block_size, batch in itertools.product(HEADS, range(1, 9), (32, 64, 128), (1, 256)):
        yield PagedMqaLogitsProblem(batch, next_n, heads, 128, block_size)
        yield PagedMqaMetadataProblem(batch, next_n)


def topk_problems() -> Iterator[Problem]:
    for rows, columns, dtype in itertools.product(
        (1, 32, 64, 128, 4096), (4096, 1 << 20), ("bfloat16", "float32")
    ):
        yield IndexerTopkProblem(rows, columns, dtype)


def quantize_problems() -> Iterator[Problem]:
    for dtype, power_of_two, m in itertools.product(
        ("bfloat16", "float16", "float32"), (False, True), (1, 65536)
    ):
        yield QuantizeProblem(m, 7168, dtype, power_of_two)
        for head_dim in (32, 64, 128):
            yield IndexerCacheProblem(m, head_dim, dtype, power_of_two)


def model_plans() -> list[Plan]:
    parallelism = {"qwen3_30b": (1, 1), "qwen3_235b": (4, 4), "glm_45": (4, 4)}
    plans = []
    for path in sorted(CONFIGS.glob("*.json")):
        tp, ep = parallelism.get(path.stem, (8, 8))
        plans.append(plan(load_model(path), PlanOptions(tp=tp, ep=ep, next_n=4)))
    return plans


def reachable() -> list[KernelSpec]:
    problems = itertools.chain(gemm_problems(), indexer_problems(), topk_problems(), quantize_problems())
    planned = [spec for one in model_plans() for spec in one.specs]
    return list(dict.fromkeys([*planned, *map(kernel_spec, problems)]))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    return build(reachable(), KernelStore(tmp_path_factory.mktemp("kernels")), progress=False)


def test_all_compile(report: BuildReport) -> None:
    names = {row.spec.name for row in report.rows}
    assert names == {path.stem for path in Path(_kernels()).glob("*.cuh")}, (
        "an entry file that no problem reaches"
    )
    assert report.compiled == len(report.rows) > 0
    assert len({row.key for row in report.rows}) == len(report.rows)


def test_none_spills(report: BuildReport) -> None:
    spilling = [
        f"{row.spec}: {row.spill_bytes} B spilled, {row.local_bytes} B local"
        for row in report.rows
        if row.spill_bytes or row.local_bytes
    ]
    assert not spilling, "\n".join(spilling)


def test_none_warns(report: BuildReport) -> None:
    warnings = [f"{row.spec}: {warning}" for row in report.rows for warning in row.warnings]
    assert not warnings, "\n".join(warnings)


def test_each_fits_one_multiprocessor(report: BuildReport) -> None:
    too_large = [
        f"{row.spec}: {row.registers} x {row.spec.num_threads}"
        for row in report.rows
        if row.registers * row.spec.num_threads > REGISTER_FILE
    ]
    assert not too_large, "\n".join(too_large)


def test_register_files_are_handed_round_whole(report: BuildReport) -> None:
    # One warpgroup gives registers back and others wait for them: in vain if the block did not get them all.
    rows = [row for row in report.rows if row.spec.name in ("mqa_logits_fp8", "paged_mqa_logits_fp8")]
    assert rows
    assert {row.registers * row.spec.num_threads for row in rows} == {REGISTER_FILE}


def _kernels() -> Path:
    import moe_fp8.kernels

    return Path(moe_fp8.kernels.__path__[0])
