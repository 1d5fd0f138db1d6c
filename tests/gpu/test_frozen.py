"""After a plan is loaded and frozen strictly, the ops find a kernel for any call of the model's server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

import moe_fp8
from moe_fp8.warmup import Plan, PlanOptions, load_model, load_plan, plan
from tests import cache_cases, cases
from tests.gemm_addend_cases import call, named_case
from tests.k_grouped_cases import k_grouped_case

CONFIG = Path(__file__).parents[1] / "configs" / "deepseek_v32.json"
OPTIONS = {
    "tp": 8, "ep": 8, "max_tokens": 1024, "max_batch": 64, "next_n": 2, "block_size": 64,
    "weight_gradients": True,
}  # fmt: skip
DRAWS = 4


@pytest.fixture(scope="module")
def frozen(fresh_module_runtime: None) -> Plan:
    planned = plan(
        load_model(CONFIG),
        PlanOptions(**OPTIONS, num_sms=torch.cuda.get_device_properties(0).multi_processor_count),
    )
    load_plan(planned)
    moe_fp8.jit.freeze("strict")
    return planned


@pytest.fixture(autouse=True)
def _nothing_compiled_or_loaded(frozen: Plan) -> Iterator[None]:
    before = moe_fp8.jit.counters()
    yield
    after = moe_fp8.jit.counters()
    assert (after.compiles, after.loads) == (before.compiles, before.loads)


def gemm_shapes(planned: Plan, layout: str) -> list[tuple[int, int, int, int]]:
    """(n, k, experts, most rows) of each GEMM of the layout."""
    most: dict[tuple[int, int, int], int] = {}
    for row in planned.rows:
        if row.layout == layout and row.n is not None and row.k is not None:
            shape = (row.n, row.k, row.num_experts or 1)
            most[shape] = max(most.get(shape, 0), row.rows[-1][1])
    return [(*shape, rows) for shape, rows in most.items()]


def run_dense(planned: Plan, device: str, rng: random.Random) -> None:
    for n, k, _, most in gemm_shapes(planned, "dense"):
        case = cases.dense_case(most, n, k, device)
        for m in (1, *(rng.randint(1, most) for _ in range(DRAWS)), most):
            q, scale = moe_fp8.quantize_fp8(torch.randn(m, k, device=device, dtype=torch.bfloat16))
            moe_fp8.gemm_fp8(q, scale, case.b, case.b_scale)


def run_contiguous(planned: Plan, layout: str, device: str, rng: random.Random) -> None:
    for n, k, experts, most in gemm_shapes(planned, layout):
        rows = [rng.randint(0, 2 * min(most, 256) // experts + 1) for _ in range(experts)]
        case = cases.contiguous_case(layout, rows, n, k, device)
        for hint in (None, 1, *(rng.randint(1, most) for _ in range(DRAWS)), 1 << 20):
            moe_fp8.grouped_gemm_fp8_contiguous(
                case.a, case.a_scale, case.b, case.b_scale, **{layout: case.index}, expected_m=hint
            )


def run_masked(planned: Plan, device: str, rng: random.Random) -> None:
    for n, k, experts, most in gemm_shapes(planned, "masked"):
        case = cases.masked_case([rng.randint(0, most) for _ in range(experts)], most, n, k, device)
        for hint in (None, 1, *(rng.randint(1, most) for _ in range(DRAWS))):
            moe_fp8.grouped_gemm_fp8_masked(
                case.a, case.a_scale, case.b, case.b_scale, case.index, expected_m=hint
            )


def run_silu_mul(planned: Plan, device: str, rng: random.Random) -> None:
    for row in planned.rows:
        if row.op != "silu_mul_quantize":
            continue
        assert row.k is not None
        most = min(row.rows[-1][1], 4096)
        for m in (1, rng.randint(1, most), most):
            leading = (m,) if row.num_experts is None else (row.num_experts, m)
            counts = [rng.randint(0, m) for _ in range(row.num_experts or 0)]
            moe_fp8.silu_mul_quantize(
                torch.randn(*leading, 2 * row.k, device=device, dtype=torch.bfloat16),
                masked_m=torch.tensor(counts, dtype=torch.int32, device=device) if counts else None,
                power_of_two=rng.random() < 0.5,
                limit=rng.choice((None, 7.0)),
            )


def run_weight_gradients(planned: Plan, device: str, rng: random.Random) -> None:
    for row in planned.rows:
        if row.op != "k_grouped_gemm_fp8":
            continue
        assert row.n is not None and row.k is not None
        if row.num_experts is None:
            dense = named_case("dense of rows", (row.n,), row.k, 128 * rng.randint(1, 8), device)
            c = call(dense, out_dtype=torch.float32)
            call(dense, c=c, out=c)
            call(dense)
        sizes = [128 * rng.randint(0, 2) for _ in range(row.num_experts or 1)]
        case = k_grouped_case(sizes, row.n, row.k, device, after=128)
        out = moe_fp8.k_grouped_gemm_fp8(*case.operands())
        moe_fp8.k_grouped_gemm_fp8(*case.operands(), c=out, out=out)


def run_router(planned: Plan, device: str, rng: random.Random) -> None:
    for row in planned.rows:
        if row.op != "route_topk":
            continue
        assert row.num_experts is not None
        most = row.rows[-1][1]
        for tokens, dtype in product((1, rng.randint(1, most), most), (torch.bfloat16, torch.float32)):
            logits = torch.randn(tokens, row.num_experts, device=device, dtype=dtype)
            moe_fp8.route_topk(logits, 8, scoring="sigmoid", num_expert_group=8, topk_group=4)
            moe_fp8.route_topk(logits, 8, ids_dtype=torch.int64)


def run_prefill(planned: Plan, device: str, rng: random.Random) -> None:
    indexer, options = planned.model.indexer, planned.options
    assert indexer is not None
    for _ in range(DRAWS):
        m, keys = rng.randint(1, options.max_tokens), rng.randint(1, 20_000)
        case = cases.mqa_case(m, m + keys, indexer.num_heads, "causal", device, dim=indexer.head_dim)
        logits = moe_fp8.mqa_logits_fp8(*case.arguments(), out_dtype=rng.choice((None, torch.bfloat16)))
        moe_fp8.indexer_topk(logits, topk=2048, ks=case.ks, ke=case.ke)
        workspace = moe_fp8.indexer_workspace_bytes(
            num_queries=m, num_keys=m + keys, topk=2048, max_bytes=64 << 20
        )
        memory = torch.empty(workspace, dtype=torch.uint8, device=device)
        moe_fp8.indexer_select(
            case.q, case.k, case.k_scale, case.weights, case.ks, case.ke, topk=2048, workspace=memory
        )
        rows = cache_cases.cache_case(m, indexer.head_dim, options.block_size).to(device)
        moe_fp8.indexer_quantize_and_cache(rows.k, rows.kv_cache, rows.slot_mapping)


def run_decode(planned: Plan, device: str, rng: random.Random) -> None:
    indexer, options = planned.model.indexer, planned.options
    assert indexer is not None
    for next_n in range(1, options.next_n + 1):
        for batch in (1, rng.randint(2, options.max_batch), options.max_batch):
            lengths = [rng.randint(next_n, 3000) for _ in range(batch)]
            case = cases.paged_case(
                lengths, next_n, indexer.num_heads, options.block_size, device, dim=indexer.head_dim
            )
            moe_fp8.paged_indexer_select(
                case.q,
                case.kv_cache,
                case.weights,
                case.context_lens,
                case.block_table,
                topk=2048,
                max_context_len=4096,
                num_sms=options.num_sms,
            )


def test_dense_and_quantize(frozen: Plan) -> None:
    run_dense(frozen, "cuda", random.Random(1))


@pytest.mark.parametrize("layout", ["m_indices", "psum", "offsets"])
def test_contiguous(frozen: Plan, layout: str) -> None:
    run_contiguous(frozen, layout, "cuda", random.Random(2))


def test_masked(frozen: Plan) -> None:
    run_masked(frozen, "cuda", random.Random(3))


def test_silu_mul(frozen: Plan) -> None:
    run_silu_mul(frozen, "cuda", random.Random(6))


def test_weight_gradients(frozen: Plan) -> None:
    run_weight_gradients(frozen, "cuda", random.Random(8))


def test_router(frozen: Plan) -> None:
    run_router(frozen, "cuda", random.Random(7))


def test_prefill_indexer(frozen: Plan) -> None:
    run_prefill(frozen, "cuda", random.Random(4))


def test_decode_indexer(frozen: Plan) -> None:
    run_decode(frozen, "cuda", random.Random(5))


def test_what_no_plan_has_raises(frozen: Plan) -> None:
    case = cases.mqa_case(4, 9, 8, "causal", "cuda", dim=32)
    with pytest.raises(moe_fp8.JitMissError):
        moe_fp8.mqa_logits_fp8(*case.arguments())
