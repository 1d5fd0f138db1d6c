"""Edges of the ops: arguments on the meta device, empty tensors, sizes below 0, gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8.errors import ArgumentError, TileError
from tests import cases

FP8, I32 = torch.float8_e4m3fn, torch.int32


def _fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(FP8)


def _operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fp8(4, 128), torch.ones(1, 4).t(), _fp8(64, 128), torch.ones(1, 1)


@pytest.mark.parametrize("at", range(4))
def test_an_argument_on_the_meta_device_is_refused(at: int) -> None:
    operands = list(_operands())
    operands[at] = operands[at].to("meta")
    out = torch.full((4, 64), 7.0).bfloat16()
    with pytest.raises(ArgumentError, match="device"):
        moe_fp8.gemm_fp8(*operands, out=out)
    assert (out == 7).all()


def test_arguments_that_are_all_on_the_meta_device_pass() -> None:
    out = moe_fp8.gemm_fp8(*(operand.to("meta") for operand in _operands()))
    assert out.is_meta and out.shape == (4, 64)


def test_ops_record_no_gradients() -> None:
    y, rows = torch.randn(4, 8).bfloat16(), torch.zeros(2, 1, dtype=I32)
    out = moe_fp8.moe_combine(y, rows, torch.ones(2, 1, requires_grad=True))
    assert not out.requires_grad
    weights = torch.nn.Parameter(torch.randn(2, 128, 128).bfloat16())
    assert not any(part.requires_grad for part in moe_fp8.quantize_fp8_blocks(weights))


_selection = partial(moe_fp8.indexer_workspace_bytes, num_queries=100, num_keys=100000, topk=2048)
_layer = partial(
    moe_fp8.moe_workspace_bytes, num_tokens=4, topk=8, num_experts=4, hidden_size=256, intermediate_size=128
)


@pytest.mark.parametrize(
    "size",
    [
        partial(_selection, max_bytes=0),
        partial(_selection, max_bytes=-(10**9)),
        partial(_selection, next_n=0),
        partial(_selection, topk=9000),
        partial(_selection, num_queries=-1),
        partial(_selection, num_keys=-1),
        partial(_selection, max_bytes=1e6),
        partial(_selection, topk=2048.0),
        partial(_selection, num_queries=100.0),
        partial(_layer, num_tokens=-1),
        partial(_layer, num_tokens=4.0),
        partial(_layer, hidden_size=256.0),
        partial(_layer, hidden_size=100),
        partial(_layer, intermediate_size=0),
    ],
)
def test_sizes_of_workspaces_that_do_not_exist(size: Callable[[], int]) -> None:
    with pytest.raises(ArgumentError):
        size()
    assert _selection() > 0 and _layer() > 0


def test_rows_before_the_first_expert_keep_their_values() -> None:
    q, scale = torch.full((4, 128), 7.0).to(FP8), torch.full((4, 1), 5.0)
    weights = moe_fp8.interleave_gate_up(_fp8(1, 256, 128))
    moe_fp8.grouped_gemm_silu_mul_fp8(
        _fp8(4, 128),
        torch.ones(1, 4).t(),
        weights,
        torch.ones(1, 2, 1),
        offsets=torch.tensor([2, 3], dtype=I32),
        out=(q, scale),
    )
    outside = torch.tensor([0, 1, 3])
    assert (q.float()[outside] == 7).all() and (scale[outside] == 5).all() and scale[2] != 5


def test_no_experts_with_a_config() -> None:
    a, a_scale = _fp8(128, 128), torch.ones(1, 128).t()
    call = partial(
        moe_fp8.grouped_gemm_fp8_contiguous,
        a,
        a_scale,
        _fp8(0, 64, 128),
        torch.ones(0, 1, 1),
        psum=torch.zeros(0, dtype=I32),
    )
    assert call(config="128x128").shape == (128, 64)
    with pytest.raises(TileError):
        call(config="1x1")


def test_combine_of_no_rows_is_zero() -> None:
    rows = torch.full((2, 2), -1, dtype=I32)
    assert (moe_fp8.moe_combine(torch.empty(0, 8).bfloat16(), rows, torch.ones(2, 2)) == 0).all()


def test_combine_leaves_out_rows_that_do_not_exist() -> None:
    y = torch.ones(2, 8).bfloat16()
    rows = torch.tensor([[0, 2], [-7, 2**31 - 1], [1, 0]], dtype=I32)
    assert moe_fp8.moe_combine(y, rows)[:, 0].tolist() == [1, 0, 2]


def test_an_empty_map_has_no_experts() -> None:
    found = moe_fp8.moe_permute(
        torch.randn(2, 128).bfloat16(),
        torch.zeros(2, 1, dtype=I32),
        num_experts=2,
        expert_map=torch.empty(0, dtype=I32),
    )
    assert (found.rows == -1).all() and (found.offsets == 0).all()


def test_scaling_factors_beyond_float32() -> None:
    for factor in (1e39, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="scaling_factor"):
            moe_fp8.route_topk(torch.randn(2, 8), topk=2, scaling_factor=factor)
    largest = -torch.finfo(torch.float32).max
    weights, _ = moe_fp8.route_topk(torch.zeros(2, 1), topk=1, scaling_factor=largest)
    assert weights.tolist() == [[largest]] * 2


@pytest.mark.parametrize("scale", [torch.ones(4), torch.ones(1, 1, 4, 4), torch.ones(4, 4).double()])
def test_scales_that_cannot_be_converted(scale: Tensor) -> None:
    with pytest.raises(ArgumentError, match="scale"):
        moe_fp8.to_mn_major(scale)


def test_weights_that_are_interleaved_or_quantized_offline() -> None:
    weights = _fp8(2, 32, 16)
    moved = moe_fp8.interleave_gate_up(weights.mT.contiguous().mT)
    assert torch.equal(moved.view(torch.uint8), moe_fp8.interleave_gate_up(weights).view(torch.uint8))
    assert moe_fp8.interleave_gate_up(_fp8(0, 32, 16)).shape == (0, 32, 16)
    with pytest.raises(ArgumentError, match="dtype"):
        moe_fp8.quantize_fp8_blocks(torch.ones(128, 128).double())


def test_columns_beyond_32_bits_are_refused_before_they_are_allocated() -> None:
    with pytest.raises(ArgumentError, match="num_sms"):
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(1, dtype=I32), block_size=64, num_sms=2**40)


def test_a_layer_without_tokens_checks_its_output() -> None:
    layer = _fp8(1, 256, 128), torch.ones(1, 2, 1), _fp8(1, 128, 128), torch.ones(1, 1, 1)
    x, ids = torch.empty(0, 128).bfloat16(), torch.empty(0, 1, dtype=I32)
    assert moe_fp8.fused_moe(x, ids, None, *layer).shape == (0, 128)
    with pytest.raises(ArgumentError, match="out"):
        moe_fp8.fused_moe(x, ids, None, *layer, out=torch.ones(7, dtype=torch.int64))


_LOGITS, _IDS = torch.zeros(4, 16), torch.zeros(4, 2, dtype=I32)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("topk", lambda: moe_fp8.route_topk(_LOGITS, 8.0)),
        ("num_expert_group", lambda: moe_fp8.route_topk(_LOGITS, 8, num_expert_group=4.0)),
        ("topk_group", lambda: moe_fp8.route_topk(_LOGITS, 8, num_expert_group=4, topk_group=2.0)),
        ("num_experts", lambda: moe_fp8.moe_permute(torch.zeros(4, 128).bfloat16(), _IDS, num_experts=4.0)),
        ("next_n", lambda: moe_fp8.paged_mqa_logits_metadata(_IDS[0], block_size=64, num_sms=4, next_n=1.0)),
        ("block_size", lambda: moe_fp8.paged_mqa_logits_metadata(_IDS[0], block_size=64.0, num_sms=4)),
    ],
)
def test_floats_are_no_sizes(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match="expected an integer") as caught:
        call()
    assert caught.value.argument == name


def test_a_config_is_a_text() -> None:
    case = cases.dense_case(3, 64, 256)
    with pytest.raises(ArgumentError, match="gemm_fp8: config: expected a text, got 3"):
        moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, config=3)  # type: ignore[arg-type]


def test_a_selection_names_its_own_out() -> None:
    arguments = cases.mqa_case(4, 9, 8).arguments()
    out = torch.empty(4, 5, dtype=I32, device="meta")
    with pytest.raises(ArgumentError, match="device") as caught:
        moe_fp8.indexer_select(*arguments, topk=5, out=out)
    assert (caught.value.op, caught.value.argument) == ("indexer_select", "out")


def test_ranges_beyond_the_keys_are_cut_as_in_the_kernel() -> None:
    case = cases.mqa_case(3, 6, 8)
    case.ks.copy_(torch.tensor([-3, 2, 0]))
    case.ke.copy_(torch.tensor([2, 9, 6]))
    cut = case.ks.clamp(min=0), case.ke.clamp(max=6)
    expected = moe_fp8.mqa_logits_fp8(case.q, case.k, case.k_scale, case.weights, *cut, fill=True)
    assert torch.equal(moe_fp8.mqa_logits_fp8(*case.arguments(), fill=True), expected)
    narrow = moe_fp8.mqa_logits_fp8(*case.arguments(), max_seqlen_k=4)
    assert torch.equal(narrow[1], expected[1, 2:6]) and torch.equal(narrow[2], expected[2, :4])


def test_experts_and_rows_that_do_not_exist_are_left_out() -> None:
    x = torch.randn(2, 128).bfloat16()
    given = moe_fp8.moe_permute(x, torch.tensor([[0, 7], [1, -1]], dtype=I32), num_experts=2)
    assert given.offsets.tolist() == [0, 1, 2] and given[3].tolist() == [[0, -1], [1, -1]]
    numbers = torch.tensor([2, 0, 1], dtype=I32)
    ids = torch.tensor([[1, -2], [2, 0]], dtype=I32)
    given = moe_fp8.moe_permute(x, ids, num_experts=2, expert_map=numbers)
    assert given.offsets.tolist() == [0, 1, 2] and given[3].tolist() == [[0, -1], [1, -1]]
    y = torch.ones(2, 8).bfloat16()
    assert moe_fp8.moe_combine(y, torch.tensor([[0, 2], [1, -1]], dtype=I32)).tolist() == y.tolist()


@pytest.mark.parametrize("kind", [np.int32, lambda size: torch.tensor(size, dtype=torch.int32)])
def test_sizes_of_other_libraries_do_not_overflow(kind: Callable[[int], int]) -> None:
    layer = partial(
        moe_fp8.moe_workspace_bytes, topk=8, num_experts=8, hidden_size=7168, intermediate_size=2048
    )
    assert layer(num_tokens=kind(32768)) == layer(num_tokens=32768) > 1 << 32
    selection = partial(moe_fp8.indexer_workspace_bytes, topk=2048)
    expected = selection(num_queries=4096, num_keys=163840)
    assert selection(num_queries=4096, num_keys=kind(163840)) == expected > 1 << 31
    bounded = selection(num_queries=4096, num_keys=kind(163840), max_bytes=4 << 30)
    assert bounded == selection(num_queries=4096, num_keys=163840, max_bytes=4 << 30)


@pytest.mark.parametrize("size", [1.5, None, "7", torch.tensor(1.5), np.float32(10.5)])
def test_a_size_that_is_no_integer_is_refused(size: Any) -> None:
    with pytest.raises(ArgumentError, match="num_queries: expected an integer"):
        moe_fp8.indexer_workspace_bytes(num_queries=size, num_keys=1000, topk=8)
    with pytest.raises(ArgumentError, match="hidden_size: expected an integer"):
        moe_fp8.moe_workspace_bytes(
            num_tokens=1, topk=1, num_experts=1, hidden_size=size, intermediate_size=128
        )


def test_outputs_are_tensors() -> None:
    with pytest.raises(ArgumentError, match="got NoneType, NoneType"):
        moe_fp8.quantize_fp8(torch.ones(2, 128), out=(None, None))  # type: ignore[arg-type]
    ids = torch.zeros(1, 1, dtype=I32)
    with pytest.raises(ArgumentError, match="out: expected"):
        moe_fp8.moe_permute(torch.ones(1, 128).bfloat16(), ids, num_experts=2, out=(1, 2, 3, 4))  # type: ignore[arg-type]


def test_gates_and_ups_of_lazy_views_are_interleaved() -> None:
    w13 = torch.randn(1, 16, 8)
    assert torch.equal(moe_fp8.interleave_gate_up(torch._neg_view(w13)), -moe_fp8.interleave_gate_up(w13))
    with pytest.raises(ArgumentError, match="a dense tensor"):
        moe_fp8.interleave_gate_up(w13.to_sparse())
