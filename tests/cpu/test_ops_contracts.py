"""Checked mode names the expert and row of the first broken contract; unchecked mode reads no contents."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import (
    ContractError,
    grouped_gemm_fp8_contiguous,
    grouped_gemm_fp8_masked,
    mqa_logits_fp8,
    paged_mqa_logits_fp8,
    paged_mqa_logits_metadata,
)
from moe_fp8.ops import registry
from moe_fp8.settings import parse_settings
from tests import cases

pytestmark = pytest.mark.usefixtures("checked_mode")


def _index(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _contiguous(layout: str, values: list[int]) -> torch.Tensor:
    m = len(values) if layout == "m_indices" else 256
    a, a_scale = cases.activations(m, 128, cases.generator(0, "cpu"))
    b, b_scale = cases.weights(3, 64, 128, cases.generator(0, "cpu"))
    return grouped_gemm_fp8_contiguous(a, a_scale, b, b_scale, **{layout: _index(values)})


@pytest.mark.parametrize(
    "layout, values",
    [
        ("offsets", [0, 3, 3, 256]),
        ("offsets", [5, 9, 9, 9]),
        ("psum", [3, 130, 256]),
        ("psum", [0, 0, 0]),
        ("psum", [128, 128, 129]),
        ("m_indices", [0] * 5 + [-1] * 123 + [2] * 128),
        ("m_indices", [-1] * 256),
        ("m_indices", [1, -1, 1] + [-1] * 125 + [0] * 3),
        ("m_indices", [2] * 200 + [-1] * 56 + [1]),
    ],
)
def test_good_layouts_pass(layout: str, values: list[int]) -> None:
    _contiguous(layout, values)


@pytest.mark.parametrize(
    "layout, values, expert, row",
    [
        ("offsets", [0, 3, 2, 256], 1, 2),
        ("offsets", [0, 3, 3, 257], 2, 257),
        ("offsets", [-1, 3, 3, 256], 0, -1),
        ("psum", [3, 100, 256], 1, 100),
        ("psum", [3, 130, 257], 2, 257),
        ("psum", [-1, 0, 0], 0, -1),
        ("m_indices", [0] * 5 + [1] * 251, 1, 5),
        ("m_indices", [0] * 130 + [2] * 126, 2, 130),
        ("m_indices", [0] * 5 + [-1] + [1] * 250, 1, 6),
        ("m_indices", [0] * 128 + [3] * 128, 3, 128),
        ("m_indices", [0] * 128 + [-2] * 128, -2, 128),
    ],
)
def test_bad_layouts_are_located(layout: str, values: list[int], expert: int, row: int) -> None:
    with pytest.raises(ContractError) as caught:
        _contiguous(layout, values)
    error = caught.value
    assert (error.argument, error.expert, error.row) == (layout, expert, row)
    assert str(expert) in str(error)


@pytest.mark.parametrize("counts, expert", [([0, 9], 1), ([-1, 3], 0)])
def test_masked_m_within_the_buffer(counts: list[int], expert: int) -> None:
    case = cases.masked_case((1, 1), 8, 64, 128)
    with pytest.raises(ContractError, match=f"for expert {expert}") as caught:
        grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, _index(counts))
    assert (caught.value.argument, caught.value.expert) == ("masked_m", expert)


@pytest.mark.parametrize("ks, ke", [([0, 5], [3, 4]), ([0, -1], [3, 4]), ([0, 0], [3, 10])])
def test_query_ranges(ks: list[int], ke: list[int]) -> None:
    case = cases.mqa_case(2, 9, 8)
    with pytest.raises(ContractError, match="at row 1") as caught:
        mqa_logits_fp8(case.q, case.k, case.k_scale, case.weights, _index(ks), _index(ke))
    assert caught.value.row == 1


def test_compressed_rows_fit_the_output() -> None:
    case = cases.mqa_case(2, 9, 8)
    with pytest.raises(ContractError, match="max_seqlen_k") as caught:
        mqa_logits_fp8(
            case.q, case.k, case.k_scale, case.weights, _index([0, 2]), _index([4, 7]), max_seqlen_k=4
        )
    assert caught.value.row == 1


@pytest.mark.parametrize(
    "change, argument, row",
    [
        ("long", "context_lens", 1),
        ("negative", "context_lens", 1),
        ("page", "block_table", 2),
        ("narrow", "block_table", 2),
    ],
)
def test_paged_contexts(change: str, argument: str, row: int) -> None:
    case = cases.paged_case([3, 0, 200], 1, 8, 64)
    context_lens, block_table = case.context_lens, case.block_table
    if change == "long":
        context_lens[1] = 201
    elif change == "negative":
        context_lens[1] = -1
    elif change == "page":
        block_table[2, 3] = case.kv_cache.shape[0]
    else:
        block_table = block_table[:, :3]
    metadata = paged_mqa_logits_metadata(context_lens, block_size=64, num_sms=2)
    with pytest.raises(ContractError) as caught:
        paged_mqa_logits_fp8(
            case.q, case.kv_cache, case.weights, context_lens, block_table, metadata, max_context_len=200
        )
    assert (caught.value.argument, caught.value.row) == (argument, row)


def test_good_paged_contexts_pass() -> None:
    case = cases.paged_case([3, 0, 200], 1, 8, 64)
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=2)
    paged_mqa_logits_fp8(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        metadata,
        max_context_len=200,
    )


def test_contents_are_not_read_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "settings", lambda: parse_settings({}))
    assert not registry.checked(torch.zeros(1))
    monkeypatch.setattr(registry, "settings", lambda: parse_settings({"MOE_FP8_CHECKED": "1"}))
    assert registry.checked(torch.zeros(1))
