"""The kernels that calls can reach: kernels of the models in tests/configs, and of problems of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from moe_fp8.jit.build import BuildReport, build
from moe_fp8.jit.store import KernelStore
from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.problems import (
    GemmProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    KGroupedGemmProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
)
from moe_fp8.specs import KernelSpec, kernel_spec
from moe_fp8.warmup import Plan, PlanOptions, describe, plan
from tests.model_configs import NAMES, in_blocks

_HEADS = (8, 16, 32, 64)


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
    for k, accumulate, sms in itertools.product((1024, 65536), (False, True), (1, 132)):
        yield KGroupedGemmProblem(7168, 2048, k, 8, accumulate, sms)
        yield KGroupedGemmProblem(7168, 2048, k, 1, num_sms=sms, out_dtype="bfloat16")


def indexer_problems() -> Iterator[Problem]:
    for heads, compressed, fill in itertools.product(_HEADS, (False, True), (False, True)):
        for queries in (1, 64, 4096):
            yield MqaLogitsProblem(queries, 8192, heads, 128, compressed, fill)
    for heads, next_n, block_size, batch in itertools.product(_HEADS, range(1, 9), (32, 64, 128), (1, 256)):
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
        for experts in (None, 32):
            for rounded in (False, True):
                yield SiluMulQuantizeProblem(m, 2048, experts, power_of_two, rounded)


def route_problems() -> Iterator[Problem]:
    for num_experts, dtype in itertools.product(
        range(128, MAX_EXPERTS + 1, 128), ("bfloat16", "float16", "float32")
    ):
        yield RouteTopkProblem(64, num_experts, 8, dtype)


def model_plans() -> list[Plan]:
    """A plan of every model that `tests/configs` has in the hub's spelling."""
    ranks = {"qwen3_30b": 1, "qwen3_235b": 4, "glm_45": 4, "ernie_45_21b": 4}
    return [
        plan(describe(in_blocks(name)), PlanOptions(tp=tp, ep=tp, next_n=4))
        for name in NAMES
        if not name.endswith("_transformers")
        for tp in (ranks.get(name, 8),)
    ]


def reachable() -> list[KernelSpec]:
    problems = itertools.chain(
        gemm_problems(), indexer_problems(), topk_problems(), quantize_problems(), route_problems()
    )
    planned = [spec for one in model_plans() for spec in one.specs]
    return list(dict.fromkeys([*planned, *map(kernel_spec, problems)]))


@dataclass(frozen=True)
class ReachableKernels:
    """All reachable kernels, compiled: the build's report, and the store that it has filled."""

    report: BuildReport
    store: KernelStore

    def cubin(self, spec: KernelSpec) -> bytes:
        """The cubin of one of the kernels; raises KeyError for any other spec."""
        artifact = self.store.get(self.store.key(spec))
        if artifact is None:
            raise KeyError(str(spec))
        return artifact.cubin


def compile_reachable() -> ReachableKernels:
    """Compile all reachable kernels; it takes about a minute on two cores. The store is kept in memory."""
    store = KernelStore(None)
    return ReachableKernels(build(reachable(), store, progress=False), store)
