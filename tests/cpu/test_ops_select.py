"""Selection in chunks equals selection in one piece and logits with top-k, within the promised bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

from moe_fp8 import (
    ArgumentError,
    indexer_select,
    indexer_topk,
    indexer_workspace_bytes,
    mqa_logits_fp8,
    paged_indexer_select,
)
from moe_fp8.ops.indexer.select import selection_plan
from tests import exact_cases

TOPK = 5


def _budgets(rows: int, keys: int, topk: int, **paged: int) -> list[int | None]:
    """None, and budgets down to the smallest; some budgets leave rows whole, and some divide keys."""
    whole = indexer_workspace_bytes(num_queries=rows, num_keys=keys, topk=topk, **paged)
    least = _least(rows, keys, topk, **paged)
    return [None, whole, *sorted({least, *(least + (whole - least) * i // 5 for i in range(1, 5))})]


def _least(rows: int, keys: int, topk: int, **paged: int) -> int:
    with pytest.raises(ArgumentError) as caught:
        indexer_workspace_bytes(num_queries=rows, num_keys=keys, topk=topk, max_bytes=1, **paged)
    return int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))


def _workspace(size: int | None) -> torch.Tensor | None:
    """`size` bytes; they must not be read before they are written."""
    if size is None:
        return None
    storage = torch.full((size + 512,), 0xFF, dtype=torch.uint8)
    start = -storage.data_ptr() % 256
    return storage[start : start + size]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", ["causal", "random", "empty"])
def test_prefill_does_not_depend_on_the_workspace(kind: str, in_order: bool) -> None:
    m, n = 40, 2900
    case = exact_cases.mqa(m, n, 8, kind)
    logits = mqa_logits_fp8(*case.arguments(), fill=True)
    expected = indexer_topk(logits, topk=TOPK, ks=case.ks, ke=case.ke, sorted=in_order)
    divided = 0
    for budget in _budgets(m, n, TOPK):
        plan = selection_plan(m, n, TOPK, budget)
        divided += plan.carried > 0
        chosen = indexer_select(*case.arguments(), topk=TOPK, sorted=in_order, workspace=_workspace(budget))
        assert torch.equal(chosen, expected), plan
    assert divided


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_decode_does_not_depend_on_the_workspace(next_n: int, per_token: bool) -> None:
    lengths: list[int] = [0, 3, 2600, 257, 1024, 5]
    given = [[max(length - t, 0) for t in range(next_n)] for length in lengths] if per_token else lengths
    case = exact_cases.paged(given, next_n, 8, 64)
    columns, rows = 2700, len(lengths) * next_n
    logits = torch.full((rows, columns), float("nan"))
    exact_cases.paged_logits(case, logits)
    ends = exact_cases.token_lengths(case).flatten().int()
    expected = indexer_topk(logits, topk=TOPK, ke=ends)
    divided = 0
    for budget in _budgets(rows, columns, TOPK, next_n=next_n, num_sms=7):
        plan = selection_plan(rows, columns, TOPK, budget, next_n, 7)
        divided += plan.carried > 0
        chosen = paged_indexer_select(
            case.q,
            case.kv_cache,
            case.weights,
            case.context_lens,
            case.block_table,
            topk=TOPK,
            max_context_len=columns,
            num_sms=7,
            workspace=_workspace(budget),
        )
        assert torch.equal(chosen, expected), plan
    assert divided


@pytest.mark.parametrize(
    "rows, keys, topk", [(1, 1, 1), (1, 5000, 2048), (4096, 131072, 2048), (64, 1 << 20, 512)]
)
def test_plans_fit_their_budget_and_repeat(rows: int, keys: int, topk: int) -> None:
    for budget in _budgets(rows, keys, topk):
        plan = selection_plan(rows, keys, topk, budget)
        if budget is not None:
            assert plan.num_bytes <= budget
            assert plan.carried == 0 or plan.columns < keys
            assert selection_plan(rows, keys, topk, plan.num_bytes) == plan
        assert (
            indexer_workspace_bytes(num_queries=rows, num_keys=keys, topk=topk, max_bytes=budget)
            == plan.num_bytes
        )


@pytest.mark.parametrize("rows, keys, topk", [(245, 16323, 1500), (512, 31000, 2048)])
def test_chunks_with_carried_keys_are_no_wider_than_all_keys(rows: int, keys: int, topk: int) -> None:
    # A wider row may need a top-k kernel that no plan of these keys has.
    least, whole = _least(rows, keys, topk), indexer_workspace_bytes(num_queries=2, num_keys=keys, topk=topk)
    plans = [selection_plan(rows, keys, topk, least + (whole - least) * i // 500) for i in range(501)]
    assert {plan.carried > 0 for plan in plans} == {False, True}
    assert max(plan.columns + topk for plan in plans if plan.carried) <= keys


def test_a_million_keys_fit_64_mib() -> None:
    assert (
        indexer_workspace_bytes(num_queries=4096, num_keys=1 << 20, topk=2048, max_bytes=64 << 20) <= 64 << 20
    )


def test_equal_keys_have_equal_logits() -> None:
    """Among these the lower column wins, in any workspace and at any place of a call."""
    queries, heads, keys = 4, 64, 1001
    for seed in range(20):
        gen = torch.Generator().manual_seed(seed)
        q = torch.randn(queries, heads, 128, generator=gen).to(torch.float8_e4m3fn)
        k = torch.randn(keys, 128, generator=gen).to(torch.float8_e4m3fn)
        k.view(torch.uint8)[[700, keys - 1]] = k.view(torch.uint8)[0].clone()
        k_scale, weights = torch.ones(keys), torch.rand(queries, heads, generator=gen)
        k_scale[[0, 700, keys - 1]] = 8.0
        ks = torch.zeros(queries, dtype=torch.int32)
        chosen = indexer_select(q, k, k_scale, weights, ks, ks + keys, topk=1)
        assert chosen.flatten().tolist() == [0] * queries


def test_no_queries_and_no_keys() -> None:
    q, k, k_scale, weights, ks, ke = exact_cases.mqa(4, 5, 8, "causal").arguments()
    assert indexer_select(q[:0], k, k_scale, weights[:0], ks[:0], ke[:0], topk=3).shape == (0, 3)
    zero = torch.zeros_like(ks)
    assert (indexer_select(q, k[:0], k_scale[:0], weights, zero, zero, topk=3) == -1).all()


def test_no_keys_in_any_workspace() -> None:
    case = exact_cases.mqa(600, 5, 8, "empty")
    q, k, k_scale, weights, ks, _ = case.arguments()
    zero = torch.zeros_like(ks)
    for budget in _budgets(600, 0, 64):
        out = torch.full((600, 64), 123, dtype=torch.int32)
        indexer_select(
            q, k[:0], k_scale[:0], weights, zero, zero, topk=64, workspace=_workspace(budget), out=out
        )
        assert (out == -1).all()


def test_bounds_at_the_ends_of_32_bits_do_not_wrap_around() -> None:
    """In any workspace they are the nearest bounds that there are."""
    case, least, most = exact_cases.mqa(4, 900, 8, "random"), -(2**31), 2**31 - 1
    case.ks.copy_(torch.tensor([least, 0, least, 890]))
    case.ke.copy_(torch.tensor([900, least, most, most]))
    cut = indexer_topk(
        mqa_logits_fp8(*case.arguments(), fill=True),
        topk=TOPK,
        ks=case.ks.clamp(min=0),
        ke=case.ke.clamp(0, 900),
    )
    for budget in _budgets(4, 900, TOPK):
        chosen = indexer_select(*case.arguments(), topk=TOPK, workspace=_workspace(budget))
        assert torch.equal(chosen.sort().values, cut.sort().values)


@pytest.mark.parametrize("length", [-(2**31), 1 - 2**31, -1])
def test_negative_lengths_do_not_wrap_around(length: int) -> None:
    """No token sees a key, in any workspace."""
    case = exact_cases.paged([900, 700, 5], 3, 8, 64)
    operands = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    select = partial(paged_indexer_select, *operands, topk=16, max_context_len=900, num_sms=7)
    expected = select()
    expected[3:6] = -1
    case.context_lens[1] = length
    for budget in _budgets(9, 900, 16, next_n=3, num_sms=7):
        assert torch.equal(select(workspace=_workspace(budget)), expected)


def test_lengths_beyond_the_table_find_no_leftovers() -> None:
    case = exact_cases.paged([900, 700, 5], 1, 8, 64)
    expected = None
    for budget in _budgets(3, 700, 16, num_sms=7):
        chosen = paged_indexer_select(
            case.q,
            case.kv_cache,
            case.weights,
            case.context_lens,
            case.block_table[:, :11],
            topk=16,
            max_context_len=700,
            num_sms=7,
            workspace=_workspace(budget),
        )
        assert (chosen < 700).all()
        expected = chosen if expected is None else expected
        assert torch.equal(chosen, expected)


@pytest.mark.parametrize("name", ["k_scale", "weights", "ks", "ke"])
def test_arguments_that_are_too_long_are_refused(name: str) -> None:
    case = exact_cases.mqa(4, 500, 8, "causal")
    arguments = dict(zip(("q", "k", "k_scale", "weights", "ks", "ke"), case.arguments(), strict=True))
    arguments[name] = torch.cat([arguments[name], arguments[name]])
    with pytest.raises(ArgumentError, match=name):
        indexer_select(**arguments, topk=TOPK)


def test_bad_workspaces_are_named() -> None:
    case = exact_cases.mqa(4, 500, 8, "causal")
    whole = indexer_workspace_bytes(num_queries=4, num_keys=500, topk=TOPK)
    good = _workspace(whole + 256)
    assert good is not None
    wrong: list[Any] = [good[:100], good[1:], good[8:], good.view(torch.int8), good.view(2, -1), good[::2]]
    for bad in (*wrong, whole):
        with pytest.raises(ArgumentError, match="workspace"):
            indexer_select(*case.arguments(), topk=TOPK, workspace=bad)


def test_an_out_that_is_no_tensor_is_named() -> None:
    case, out = exact_cases.mqa(4, 500, 8, "causal"), cast(Any, [0])
    with pytest.raises(ArgumentError, match="indexer_select: out: expected a tensor, got list"):
        indexer_select(*case.arguments(), topk=TOPK, out=out)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, TOPK, dtype=torch.int32),
        torch.zeros(4, TOPK + 1, dtype=torch.int32),
        torch.zeros(4, TOPK, dtype=torch.int64),
        torch.zeros(TOPK, 4, dtype=torch.int32).T,
    ],
    ids=["rows", "topk", "dtype", "stride"],
)
def test_an_out_of_another_layout_is_refused(out: torch.Tensor) -> None:
    mqa, case = exact_cases.mqa(4, 500, 8, "causal"), exact_cases.paged([90, 5, 3, 70], 1, 8, 64)
    expected = rf"out: expected contiguous int32 \[4, {TOPK}\]"
    with pytest.raises(ArgumentError, match=f"^indexer_select: {expected}"):
        indexer_select(*mqa.arguments(), topk=TOPK, out=out)
    cached = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    with pytest.raises(ArgumentError, match=f"^paged_indexer_select: {expected}"):
        paged_indexer_select(*cached, topk=TOPK, max_context_len=90, num_sms=7, out=out)


def test_errors_name_the_selection_that_was_called() -> None:
    mqa, case = exact_cases.mqa(4, 500, 8, "causal"), exact_cases.paged([900, 5], 1, 8, 64)
    cached = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    ops: dict[str, Callable[..., object]] = {
        "indexer_select": partial(indexer_select, *mqa.arguments()),
        "paged_indexer_select": partial(paged_indexer_select, *cached, max_context_len=900, num_sms=7),
        "indexer_workspace_bytes": partial(indexer_workspace_bytes, num_queries=4, num_keys=500),
    }
    good = _workspace(1 << 16)
    assert good is not None
    for name, op in ops.items():
        wrong: list[tuple[str, dict[str, Any]]] = [("topk", {"topk": 0})]
        if name == "indexer_workspace_bytes":
            wrong.append(("max_bytes", {"topk": TOPK, "max_bytes": 1}))
        else:
            given = good[:100], good.view(torch.int8), good[1:]
            wrong += [("workspace", {"topk": TOPK, "workspace": bad}) for bad in given]
        for argument, options in wrong:
            with pytest.raises(ArgumentError) as caught:
                op(**options)
            assert (caught.value.op, caught.value.argument) == (name, argument)
