"""Selections on the GPU give the same bits for every workspace, and use no memory besides the workspace."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from moe_fp8 import (
    get_num_sms,
    indexer_select,
    indexer_topk,
    indexer_workspace_bytes,
    mqa_logits_fp8,
    paged_indexer_select,
    paged_mqa_logits_fp8,
    paged_mqa_logits_metadata,
)
from moe_fp8.ops.indexer.select import selection_plan
from tests import cases, exact_cases

TOPK = 64


def _workspace(size: int) -> torch.Tensor:
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("kind", ["causal", "random"])
@pytest.mark.parametrize("in_order", [False, True])
def test_prefill_in_chunks(kind: str, in_order: bool) -> None:
    m, n = 700, 9000
    case = cases.mqa_case(m, n, 64, kind, "cuda")
    logits = mqa_logits_fp8(*case.arguments())
    expected = indexer_topk(logits, topk=TOPK, ks=case.ks, ke=case.ke, sorted=in_order)
    assert torch.equal(indexer_select(*case.arguments(), topk=TOPK, sorted=in_order), expected)
    for budget in (20 << 20, 5 << 20, 1 << 20, 64 << 10):
        plan = selection_plan(m, n, TOPK, budget)
        chosen = indexer_select(*case.arguments(), topk=TOPK, sorted=in_order, workspace=_workspace(budget))
        assert torch.equal(chosen, expected), plan


def test_prefill_equals_the_reference() -> None:
    on_cpu, on_gpu = (exact_cases.mqa(90, 3000, 32, "random", device) for device in ("cpu", "cuda"))
    expected = indexer_select(*on_cpu.arguments(), topk=TOPK)
    for budget in (None, 500_000, 200_000):
        workspace = None if budget is None else _workspace(budget)
        assert torch.equal(
            indexer_select(*on_gpu.arguments(), topk=TOPK, workspace=workspace).cpu(), expected
        )


@pytest.mark.parametrize("lengths", [[1001, 3], [[1000, 1001], [2, 3]]], ids=["request", "token"])
def test_a_compiled_selection_writes_only_to_its_workspace(lengths: list[Any]) -> None:
    case = cases.paged_case(lengths, 2, 64, 64, "cuda")
    tensors = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    sms = get_num_sms()
    selection = partial(paged_indexer_select, topk=TOPK, max_context_len=1024, num_sms=sms)
    expected = selection(*tensors)
    size = indexer_workspace_bytes(num_queries=4, num_keys=1024, topk=TOPK, next_n=2, num_sms=sms)
    memory = torch.full((4096 + 2 * size,), 7, dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(selection, fullgraph=True)
        assert torch.equal(compiled(*tensors, workspace=memory[4096 : 4096 + size]), expected)
    assert (memory[:4096] == 7).all() and (memory[4096 + size :] == 7).all()


def test_ties_at_zero_do_not_displace_a_key() -> None:
    """The call is large enough for the kernel whose zeros are not exact: positive logits come before them."""
    m, n, topk = 1024, 16384, 64
    case = cases.negative_scores(cases.mqa_case(m, n, 32, "causal", "cuda"))
    case.weights.abs_()
    positive = torch.arange(5, n - m, 509, device="cuda")  # every query sees these
    assert len(positive) < topk
    case.k.view(torch.uint8)[positive] &= 0x7F
    chosen = indexer_select(*case.arguments(), topk=topk)
    assert torch.equal(chosen, indexer_select(*case.arguments(), topk=topk, workspace=_workspace(4 << 20)))
    assert (chosen >= 0).all() and (chosen < case.ke[:, None]).all()
    assert (chosen.sort(1).values.diff(dim=1) > 0).all(), "no key twice"
    assert (torch.isin(chosen, positive).sum(1) == len(positive)).all()


def _decode(case: cases.PagedCase, columns: int, budget: int | None, in_order: bool = False) -> torch.Tensor:
    return paged_indexer_select(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        topk=TOPK,
        max_context_len=columns,
        num_sms=132,
        sorted=in_order,
        workspace=None if budget is None else _workspace(budget),
    )


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_decode_in_chunks(next_n: int, block_size: int) -> None:
    columns = 5000
    case = cases.paged_case([0, 3, 4999, 700, 2561, 64], next_n, 64, block_size, "cuda")
    logits = torch.full((6 * next_n, columns), float("nan"), device="cuda")
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=block_size, num_sms=132, next_n=next_n)
    paged_mqa_logits_fp8(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        metadata,
        max_context_len=columns,
        out=logits,
    )
    ends = exact_cases.token_lengths(case).flatten().int()
    for in_order in (False, True):
        expected = indexer_topk(logits, topk=TOPK, ke=ends, sorted=in_order)
        for budget in (None, 100_000, 40_000):
            assert torch.equal(_decode(case, columns, budget, in_order), expected)


@pytest.mark.sanitizer
def test_small() -> None:
    case = cases.paged_case([0, 700, 300], 1, 32, 64, "cuda")
    assert torch.equal(_decode(case, 700, None), _decode(case, 700, 10_000))


def test_decode_replays_with_other_lengths() -> None:
    case = cases.paged_case([900] * 5, 1, 64, 64, "cuda")
    out = _decode(case, 900, 40_000)
    workspace = _workspace(40_000)
    arguments = (case.q, case.kv_cache, case.weights, case.context_lens, case.block_table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_indexer_select(
            *arguments, topk=TOPK, max_context_len=900, num_sms=132, workspace=workspace, out=out
        )
    for lengths in ([900, 0, 5, 300, 899], [1, 900, 64, 65, 0]):
        case.context_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, _decode(case, 900, None))


def test_a_million_keys_stay_within_the_budget() -> None:
    m, n, budget = 512, 1 << 20, 64 << 20
    k = torch.randint(0, 2, (n, 128), dtype=torch.uint8, device="cuda").mul_(0x38).view(torch.float8_e4m3fn)
    q = torch.randn(m, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(m, 64, device="cuda")
    k_scale = torch.rand(n, device="cuda")
    ks = torch.zeros(m, dtype=torch.int32, device="cuda")
    ke = torch.arange(n - m + 1, n + 1, dtype=torch.int32, device="cuda")
    workspace = _workspace(indexer_workspace_bytes(num_queries=m, num_keys=n, topk=2048, max_bytes=budget))
    out = torch.empty(m, 2048, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    gc.collect()  # tensors of earlier tests must be freed now, not during the measurement
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    indexer_select(q, k, k_scale, weights, ks, ke, topk=2048, workspace=workspace, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert workspace.numel() <= budget
    some = [0, 255, 511]
    logits = mqa_logits_fp8(q[some], k, k_scale, weights[some], ks[some], ke[some])
    assert torch.equal(out[some], indexer_topk(logits, topk=2048, ke=ke[some]))
