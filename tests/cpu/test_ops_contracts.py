"""Checked mode names the op, expert and row of the first broken contract, and leaves a replay file."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import (
    ArgumentError,
    ContractError,
    grouped_gemm_fp8_contiguous,
    grouped_gemm_fp8_masked,
    grouped_gemm_silu_mul_fp8,
    mqa_logits_fp8,
    paged_mqa_logits_fp8,
    paged_mqa_logits_metadata,
)
from moe_fp8.ops.indexer import contracts
from tests import cases, moe_cases

pytestmark = pytest.mark.usefixtures("checked_mode")


def _index(values: list[Any]) -> torch.Tensor:
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
        ("m_indices", [1] * 5 + [0] * 123, 0, 5),
        ("m_indices", [0] * 128 + [-2] * 128, -2, 128),
    ],
)
def test_bad_layouts_are_located(layout: str, values: list[int], expert: int, row: int) -> None:
    with pytest.raises(ContractError) as caught:
        _contiguous(layout, values)
    error = caught.value
    assert (error.argument, error.expert, error.row) == (layout, expert, row)
    assert str(expert) in str(error)


def test_the_fused_gemm_is_named() -> None:
    a, a_scale = cases.activations(256, 128, cases.generator(0, "cpu"))
    b, b_scale = cases.weights(3, 256, 128, cases.generator(0, "cpu"))
    with pytest.raises(ContractError) as caught:
        grouped_gemm_silu_mul_fp8(a, a_scale, b, b_scale, offsets=_index([0, 3, 2, 256]))
    error = caught.value
    assert (error.op, error.argument, error.expert) == ("grouped_gemm_silu_mul_fp8", "offsets", 1)
    b_scale[2, 1, 0] = float("nan")
    with pytest.raises(ContractError) as caught:
        grouped_gemm_silu_mul_fp8(a, a_scale, b, b_scale, offsets=_index([0, 3, 9, 256]))
    error = caught.value
    assert (error.op, error.argument, error.expert, error.row) == (
        "grouped_gemm_silu_mul_fp8", "w13_scale", 2, 128,
    )  # fmt: skip


@pytest.mark.parametrize(
    "ends, expert", [([100, 128, 128], None), ([0, 0, 100], None), ([100, 129, 256], 1), ([100, 128, 129], 2)]
)
def test_experts_without_rows_may_end_behind_rows_that_are_not_padded(
    ends: list[int], expert: int | None
) -> None:
    a, a_scale = cases.activations(100, 128, cases.generator(0, "cpu"))
    b, b_scale = cases.weights(3, 64, 128, cases.generator(0, "cpu"))
    if expert is None:
        grouped_gemm_fp8_contiguous(a, a_scale, b, b_scale, psum=_index(ends))
        return
    with pytest.raises(ContractError) as caught:
        grouped_gemm_fp8_contiguous(a, a_scale, b, b_scale, psum=_index(ends))
    assert (caught.value.argument, caught.value.expert) == ("psum", expert)


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
    operands = case.q, torch.ones_like(case.k), torch.ones_like(case.k_scale), torch.ones_like(case.weights)
    mqa_logits_fp8(*operands, _index([0, 5]), _index([4, 9]), max_seqlen_k=4)  # wherever a row begins
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scales_of_dense_rows_and_blocks(bad: float) -> None:
    case = cases.dense_case(5, 192, 256)
    for scale, argument, at, row in ((case.a_scale, "a_scale", 3, 3), (case.b_scale, "b_scale", 1, 128)):
        before = scale[at, 1].clone()
        scale[at, 1] = bad
        message = rf"gemm_fp8: {argument}: .* got {bad} at \[{at}, 1\], row {row};"
        with pytest.raises(ContractError, match=message) as caught:
            moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale)
        assert (caught.value.op, caught.value.expert, caught.value.row) == ("gemm_fp8", None, row)
        scale[at, 1] = before
    moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale)


def _grouped(case: cases.GemmCase) -> torch.Tensor:
    assert case.index is not None
    operands = case.a, case.a_scale, case.b, case.b_scale
    if case.layout == "masked":
        return grouped_gemm_fp8_masked(*operands, case.index)
    return grouped_gemm_fp8_contiguous(*operands, **{case.layout: case.index})


LAYOUTS = ("m_indices", "psum", "offsets")

GROUPED = {
    **{layout: cases.contiguous_case(layout, (3, 0, 130), 192, 256, total=600) for layout in LAYOUTS},
    "masked": cases.masked_case((3, 0, 8), 8, 192, 256),
}


@pytest.mark.parametrize("layout", GROUPED)
def test_scales_count_in_the_rows_of_experts_only(layout: str) -> None:
    """Rows of no expert hold NaN in these cases; the last row of each expert does not."""
    case = GROUPED[layout]
    _grouped(case)
    for expert, _, end in case.runs:
        a_scale = case.a_scale.clone()
        at = (expert, end - 1, 1) if layout == "masked" else (end - 1, 1)
        a_scale[at] = float("inf")
        with pytest.raises(ContractError, match=f"row {end - 1} of expert {expert}") as caught:
            _grouped(dataclasses.replace(case, a_scale=a_scale))
        error = caught.value
        assert (error.argument, error.expert, error.row) == ("a_scale", expert, end - 1)
    b_scale = case.b_scale.clone()
    b_scale[2, 1, 0] = float("nan")
    with pytest.raises(ContractError) as caught:
        _grouped(dataclasses.replace(case, b_scale=b_scale))
    assert (caught.value.argument, caught.value.expert, caught.value.row) == ("b_scale", 2, 128)


def test_scales_that_are_converted_are_checked_too(checked_mode: Path) -> None:
    case = cases.dense_case(5, 64, 256)
    a_scale = case.a_scale.contiguous()
    a_scale[4, 0] = float("nan")
    with pytest.raises(ContractError) as caught:
        moe_fp8.gemm_fp8(case.a, a_scale, case.b, case.b_scale)
    assert caught.value.row == 4
    (file,) = checked_mode.iterdir()
    assert json.loads(file.read_text())["arguments"]["a_scale"]["stride"] == [2, 1]


def test_silu_counts_within_the_buffer() -> None:
    with pytest.raises(ContractError, match="for expert 1") as caught:
        moe_fp8.silu_mul_quantize(torch.zeros(2, 4, 256).bfloat16(), masked_m=_index([4, 5]))
    assert (caught.value.op, caught.value.argument) == ("silu_mul_quantize", "masked_m")


@pytest.mark.parametrize("mapped", [False, True])
def test_scales_of_tokens_with_an_expert(mapped: bool) -> None:
    x, scale = moe_fp8.quantize_fp8(torch.randn(4, 256))
    scale[1, 0] = scale[2, 1] = float("nan")
    numbers = _index([-1, 0, 1, -1, 5]) if mapped else None
    # No token but the last has an expert of this rank.
    ids = torch.tensor([[1, 2], [0, 9], [-1, 4], [2, 0]] if mapped else [[0, 1], [-1, 2], [7, -5], [1, 0]])
    moe_fp8.moe_permute(x, ids, num_experts=2, x_scale=scale, expert_map=numbers)
    ids[2, 0] = 1
    with pytest.raises(ContractError, match="token 2") as caught:
        moe_fp8.moe_permute(x, ids, num_experts=2, x_scale=scale, expert_map=numbers)
    assert (caught.value.argument, caught.value.row) == ("x_scale", 2)


def test_combined_rows_exist() -> None:
    y = torch.zeros(4, 64).bfloat16()
    moe_fp8.moe_combine(y, _index([[0, -7], [3, 1]]))
    with pytest.raises(ContractError, match=r"4 at \[1, 0\]") as caught:
        moe_fp8.moe_combine(y, _index([[0, -7], [4, 1]]))
    assert caught.value.row == 1


def test_scales_of_keys_that_a_query_sees() -> None:
    case = cases.mqa_case(4, 30, 8, "random", seed=2)
    seen = torch.zeros(30, dtype=torch.bool)
    for start, end in zip(case.ks.tolist(), case.ke.tolist(), strict=True):
        seen[start:end] = True
    assert seen.any() and not seen.all()
    mqa_logits_fp8(*case.arguments())  # other keys have NaN
    for key in seen.nonzero()[[0, -1], 0].tolist():
        k_scale = case.k_scale.clone()
        k_scale[key] = float("inf")
        bad = dataclasses.replace(case, k_scale=k_scale)
        for op in (mqa_logits_fp8, partial(moe_fp8.indexer_select, topk=4)):
            with pytest.raises(ContractError, match=f"key {key}") as caught:
                op(*bad.arguments())
            assert (caught.value.argument, caught.value.row) == ("k_scale", key)
    assert caught.value.op == "indexer_select"
    empty = int((case.ke == case.ks).int().argmax())
    case.weights[empty] = float("nan")
    mqa_logits_fp8(*case.arguments())
    busy = int((case.ke > case.ks).int().argmax())
    case.weights[busy, 3] = float("nan")
    with pytest.raises(ContractError, match="weights") as caught:
        mqa_logits_fp8(*case.arguments())
    assert caught.value.row == busy


def _paged(case: cases.PagedCase, **changes: torch.Tensor) -> torch.Tensor:
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=2, next_n=case.next_n)
    operands = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    return paged_mqa_logits_fp8(*operands, changes.get("metadata", metadata), max_context_len=200)


@pytest.mark.parametrize("padding", [0, 32])
def test_scales_of_cached_keys(padding: int) -> None:
    """Behind the end of a context, and in pages of no context, scales are NaN in these cases."""
    case = cases.paged_case([3, 0, 200], 2, 8, 64, page_padding=padding)
    _paged(case)
    page = int(case.block_table[2, 3])
    scales = case.kv_cache.as_strided((64 * 4,), (1,), page * case.kv_cache.stride(0) + 64 * 128)
    scales.view(torch.float32)[7] = float("inf")  # position 199, the last one
    operands = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    select = partial(moe_fp8.paged_indexer_select, topk=4, max_context_len=200, num_sms=2)
    for op, name in ((lambda *_: _paged(case), "paged_mqa_logits_fp8"), (select, "paged_indexer_select")):
        with pytest.raises(ContractError, match="position 199 of request 2") as caught:
            op(*operands)
        error = caught.value
        assert (error.op, error.argument, error.row) == (name, "kv_cache", 2)
        assert f"page {page}, token 7" in str(error)


def test_scales_of_a_cache_within_a_larger_buffer() -> None:
    """As a layer's part of one allocation for all layers, whose other parts may hold anything."""
    case = cases.paged_case([3, 0, 200], 2, 8, 64)
    room = torch.full((2, *case.kv_cache.shape), 0xFF, dtype=torch.uint8)  # each scale is NaN
    room[1] = case.kv_cache
    _paged(dataclasses.replace(case, kv_cache=room[1]))


def test_weights_of_paged_tokens() -> None:
    case = cases.paged_case([3, 1, 200], 2, 8, 64)
    case.weights[2] = float("nan")  # the first token of request 1 sees nothing
    _paged(case)
    case.weights[3, 1] = float("nan")
    with pytest.raises(ContractError, match="weights") as caught:
        _paged(case)
    assert caught.value.row == 3


@pytest.mark.parametrize(
    ("schedule", "row"),
    [
        ([[0, 0], [2, 0], [2, 0]], 2),  # of the first two requests
        ([[1, 0], [2, 0], [3, 0]], 0),
        ([[0, 0], [2, 1], [2, 0]], 2),
        ([[0, 0], [4, 0], [3, 0]], 2),
        ([[-1, 1], [2, 0], [3, 0]], 0),  # the kernel begins at chunk 1 of request 0
        ([[-1, 0], [-1, 1], [3, 0]], 0),
    ],
)
def test_a_schedule_that_leaves_out_chunks(schedule: list[list[int]], row: int) -> None:
    case = cases.paged_case([3, 0, 200], 1, 8, 64)
    with pytest.raises(ContractError, match="metadata") as caught:
        _paged(case, metadata=_index(schedule))
    assert caught.value.row == row


@pytest.mark.parametrize("lengths", [[200, 0, 3], [3, 70, 200], [3, 0, 200, 7]])
def test_a_schedule_of_other_lengths_is_warned_about(
    lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As engines make them: of longer lengths, and of requests that are left out of the call."""
    case = cases.paged_case([3, 0, 200], 1, 8, 64)
    contracts._say_uneven.cache_clear()
    _paged(case)
    assert not caplog.records
    _paged(case, metadata=paged_mqa_logits_metadata(_index(lengths), block_size=64, num_sms=2))
    assert "not that of its lengths" in caplog.text


@pytest.mark.parametrize("wrong", ["w13_scale", "w2_scale"])
def test_a_layer_names_its_own_argument(wrong: str) -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    x, ids, weights = layer.inputs()
    given = {name: getattr(layer, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
    given[wrong][0, 0, 0] = float("nan")
    with pytest.raises(ContractError, match=f"fused_moe: {wrong}: expected") as caught:
        moe_fp8.fused_moe(x, ids, weights, **given)
    assert (caught.value.op, caught.value.argument) == ("fused_moe", wrong)
    assert caught.value.replay_file is not None and caught.value.replay_file in str(caught.value)


def test_a_layer_names_what_is_missing_and_wrong_numbers() -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    x, ids, weights = layer.inputs()
    operands = ids, weights, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale
    with pytest.raises(ArgumentError, match="fused_moe: x_scale: expected fp32"):
        moe_fp8.fused_moe(moe_fp8.quantize_fp8(x)[0], *operands)
    with pytest.raises(ArgumentError, match="fused_moe: limit: expected a positive number"):
        moe_fp8.fused_moe(x, *operands, limit=-1.0)
