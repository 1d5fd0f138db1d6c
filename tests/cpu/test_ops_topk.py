"""indexer_topk on the CPU against its definition in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_fp8 import ArgumentError, ContractError, indexer_topk
from moe_fp8.ops.indexer.topk import topk_chunk_op
from tests import topk_cases
from tests.topk_cases import TopkCase

DTYPES = (torch.float32, torch.bfloat16)
I32 = torch.int32


def _check(case: TopkCase, k: int, by_value: bool = False) -> None:
    columns, values = topk_cases.expected(case, k, by_value)
    got_values = torch.full((case.logits.shape[0], k), 7, dtype=case.logits.dtype)
    got = indexer_topk(case.logits, topk=k, ks=case.starts, ke=case.ends, sorted=by_value, values=got_values)
    assert (got.dtype, got.tolist()) == (I32, columns)
    exact = torch.tensor(values, dtype=case.logits.dtype).reshape(got_values.shape)
    assert torch.equal(got_values.nan_to_num(nan=1e30), exact.nan_to_num(nan=1e30))


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("of_ranges", ["full", "causal", "random"])
@pytest.mark.parametrize("kind", topk_cases.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_follows_the_definition(dtype: torch.dtype, kind: str, of_ranges: str, by_value: bool) -> None:
    for k in (1, 7, 64, 300):
        _check(topk_cases.topk_case(11, 257, dtype, kind, of_ranges, seed=k), k, by_value)


@pytest.mark.parametrize("stride, offset", [(100, 0), (103, 1), (4096, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_strides(dtype: torch.dtype, stride: int, offset: int) -> None:
    case = topk_cases.topk_case(4, 100, dtype, "normal", "full", stride=stride, offset=offset)
    _check(case, 9, True)


def test_one_row_for_all() -> None:
    row = torch.randn(1, 20)
    assert indexer_topk(row.expand(3, -1), topk=5).tolist() == indexer_topk(row, topk=5).tolist() * 3


def test_values_agree_with_torch() -> None:
    # No two logits are equal, because torch.topk does not say which equal logits it takes.
    logits = torch.stack([torch.randperm(1000).float() - 500 for _ in range(5)])
    values = torch.empty(5, 64)
    columns = indexer_topk(logits, topk=64, sorted=True, values=values)
    best, at = logits.topk(64)
    assert torch.equal(values, best)
    assert torch.equal(columns.long(), at)


@pytest.mark.parametrize("by_value", [False, True])
def test_what_columns_are_called(by_value: bool) -> None:
    case = topk_cases.topk_case(5, 60, torch.float32, "ties", "random")
    plain = indexer_topk(case.logits, topk=9, ks=case.starts, ke=case.ends, sorted=by_value)
    carried = torch.randint(0, 1 << 20, (5, 20), dtype=I32)
    got = torch.empty(5, 9, dtype=I32)
    topk_chunk_op(case.logits, 9, case.starts, case.ends, by_value, got, None, 700, carried)
    for row in range(5):
        names = [
            -1 if j < 0 else 700 + j if j < 40 else int(carried[row, j - 40]) for j in plain[row].tolist()
        ]
        assert got[row].tolist() == names


def test_columns_behind_the_last_key_need_no_name() -> None:
    """The last chunk of nearly 2^31 keys may have room for more keys."""
    logits, first = torch.tensor([[1.0, 3.0, 2.0, 9.0, 9.0]]), 2**31 - 4
    got = torch.empty(1, 4, dtype=I32)
    topk_chunk_op(logits, 4, None, torch.tensor([3], dtype=I32), True, got, None, first, None)
    assert got.tolist() == [[first + 1, first + 2, first, -1]]
    with pytest.raises(ArgumentError, match="first_column"):
        topk_chunk_op(logits, 4, None, None, True, got, None, -1, None)


def test_all_columns_may_be_carried() -> None:
    carried, got = torch.tensor([[40, 30, 20]], dtype=I32), torch.empty(1, 2, dtype=I32)
    topk_chunk_op(torch.tensor([[1.0, 3.0, 2.0]]), 2, None, None, True, got, None, 700, carried)
    assert got.tolist() == [[30, 20]]


def test_equal_values_go_to_the_lower_columns() -> None:
    logits = torch.tensor([[1.0, 0.0, -0.0, 2.0, 0.0, -0.0]])
    assert indexer_topk(logits, topk=4).tolist() == [[0, 1, 2, 3]]
    assert indexer_topk(logits, topk=5, sorted=True).tolist() == [[3, 0, 1, 2, 4]]


def test_nan_is_above_infinity_and_minus_infinity_a_value() -> None:
    logits = torch.tensor([[math.inf, -math.inf, math.nan, -math.nan, 3.0]])
    assert indexer_topk(logits, topk=2).tolist() == [[2, 3]]
    assert indexer_topk(logits, topk=6, sorted=True).tolist() == [[2, 3, 0, 4, 1, -1]]


def test_ranges_are_clamped() -> None:
    logits = torch.arange(8.0).expand(4, 8)
    starts = torch.tensor([-3, 5, 9, 6], dtype=I32)
    ends = torch.tensor([2, 100, 12, 1], dtype=I32)
    got = indexer_topk(logits, topk=3, ks=starts, ke=ends)
    assert got.tolist() == [[0, 1, -1], [5, 6, 7], [-1] * 3, [-1] * 3]


def test_no_rows_and_no_columns() -> None:
    assert indexer_topk(torch.empty(0, 9), topk=4).shape == (0, 4)
    values = torch.zeros(2, 3)
    assert indexer_topk(torch.empty(2, 0), topk=3, values=values).tolist() == [[-1] * 3] * 2
    assert (values == -math.inf).all()


def test_the_most_columns_that_can_be_chosen() -> None:
    columns = torch.randperm(5000)
    chosen = indexer_topk(columns[None].float(), topk=4096)
    assert torch.equal(chosen[0].long(), (columns >= 5000 - 4096).nonzero()[:, 0])


def test_a_given_out_is_returned() -> None:
    out = torch.zeros(2, 3, dtype=I32)
    assert indexer_topk(torch.randn(2, 9), topk=3, out=out) is out


def _arguments() -> dict[str, Any]:
    ranges = {"ks": torch.zeros(3, dtype=I32), "ke": torch.full((3,), 9, dtype=I32)}
    return {"logits": torch.randn(3, 9), "topk": 4, **ranges, "out": torch.zeros(3, 4, dtype=I32)}


BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "rank": ("logits", lambda: torch.randn(9)),
    "dtype": ("logits", lambda: torch.randn(3, 9).half()),
    "columns apart": ("logits", lambda: torch.randn(3, 18)[:, ::2]),
    "k of 0": ("topk", lambda: 0),
    "a large k": ("topk", lambda: 4097),
    "starts as int64": ("ks", lambda: torch.zeros(3, dtype=torch.int64)),
    "too few starts": ("ks", lambda: torch.zeros(2, dtype=I32)),
    "ends as a column": ("ke", lambda: torch.zeros(3, 1, dtype=I32)),
    "ends apart": ("ke", lambda: torch.zeros(6, dtype=I32)[::2]),
    "out of another width": ("out", lambda: torch.zeros(3, 5, dtype=I32)),
    "out as int64": ("out", lambda: torch.zeros(3, 4, dtype=torch.int64)),
    "rows of out apart": ("out", lambda: torch.zeros(3, 8, dtype=I32)[:, :4]),
    "values of another dtype": ("values", lambda: torch.zeros(3, 4, dtype=torch.bfloat16)),
    "values of another width": ("values", lambda: torch.zeros(3, 3)),
}


@pytest.mark.parametrize("name, make", BAD.values(), ids=BAD.keys())
def test_a_bad_argument_is_named(name: str, make: Callable[[], Any]) -> None:
    arguments = {**_arguments(), name: make()}
    with pytest.raises(ArgumentError) as caught:
        indexer_topk(arguments.pop("logits"), **arguments)
    assert caught.value.argument == name


@pytest.mark.parametrize("without_out", [{"topk": 0}, {"logits": torch.randn(9)}])
def test_what_out_is_allocated_from_is_checked_first(without_out: dict[str, Any]) -> None:
    arguments = {"logits": torch.randn(3, 9), "topk": 4, **without_out}
    with pytest.raises(ArgumentError):
        indexer_topk(arguments.pop("logits"), **arguments)


@pytest.mark.usefixtures("checked_mode")
@pytest.mark.parametrize("start, end", [(5, 4), (-1, 4), (0, 10), (10, 10)])
def test_checked_mode_names_the_row(start: int, end: int) -> None:
    logits = torch.randn(3, 9)
    starts = torch.tensor([0, 9, start], dtype=I32)
    ends = torch.tensor([9, 9, end], dtype=I32)
    with pytest.raises(ContractError, match="row 2") as caught:
        indexer_topk(logits, topk=4, ks=starts, ke=ends)
    assert caught.value.row == 2
    indexer_topk(logits[:2], topk=4, ks=starts[:2], ke=ends[:2])
    if start > 9 or end > 9:
        alone = {"ks": starts} if end <= 9 else {"ke": ends}
        with pytest.raises(ContractError, match="row 2"):
            indexer_topk(logits, topk=4, **alone)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_equals_an_eager_one(dynamic: bool) -> None:
    def layer(logits: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(logits.shape[0], 5)
        return indexer_topk(logits * 2, topk=5, ke=ends, sorted=True, values=values), values

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 6):
        logits, ends = torch.randn(rows, 20), torch.arange(rows, dtype=I32) * 3
        for got, wanted in zip(compiled(logits, ends), layer(logits, ends), strict=True):
            assert torch.equal(got, wanted)


def test_meta_tensors_give_shapes() -> None:
    out = indexer_topk(torch.empty(3, 9, device="meta"), topk=4)
    assert (out.shape, out.dtype, out.device.type) == ((3, 4), I32, "meta")
