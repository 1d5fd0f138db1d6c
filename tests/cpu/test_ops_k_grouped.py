"""k_grouped_gemm_fp8 against float64, and as the weight gradient of experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from moe_fp8 import ArgumentError, ContractError, jit, k_grouped_gemm_fp8, quantize_fp8
from tests import cases
from tests.k_grouped_cases import check, check_both_modes, k_grouped_case

SIZES = [(128,), (256, 0, 128, 384), (0, 0, 128), (128,) * 9, (0, 640, 0)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("m, n", [(5, 64), (130, 192)])
def test_experts_against_float64(sizes: tuple[int, ...], m: int, n: int) -> None:
    case = k_grouped_case(sizes, m, n)
    out = k_grouped_gemm_fp8(*case.operands())
    assert out.is_contiguous()
    check(case, out)
    check_both_modes(case)


def test_columns_of_no_expert_are_not_read() -> None:
    check_both_modes(k_grouped_case((128, 0, 256), 9, 64, before=256, after=384))


def test_no_expert_has_columns() -> None:
    case = k_grouped_case((0, 0), 5, 64, before=128, after=128)
    assert not k_grouped_gemm_fp8(*case.operands()).any()
    addend = case.addend()
    assert torch.equal(k_grouped_gemm_fp8(*case.operands(), c=addend), addend)


def test_operands_without_columns_add_nothing() -> None:
    a, b = (torch.zeros(rows, 0, dtype=torch.float8_e4m3fn) for rows in (5, 64))
    offsets, out, addend = torch.zeros(3, dtype=torch.int32), torch.ones(2, 5, 64), torch.randn(2, 5, 64)
    operands = a, torch.zeros(5, 0), b, torch.zeros(64, 0), offsets
    before = jit.counters().scale_conversions
    assert not k_grouped_gemm_fp8(*operands, out=out).any()
    assert torch.equal(k_grouped_gemm_fp8(*operands, c=addend), addend)
    assert jit.counters().scale_conversions == before


@pytest.mark.parametrize("num_experts, m", [(0, 5), (3, 0)])
def test_nothing_to_compute(num_experts: int, m: int) -> None:
    b = k_grouped_case((128,), 1, 64)
    a = torch.zeros(m, 128, dtype=torch.float8_e4m3fn)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    out = k_grouped_gemm_fp8(a, torch.zeros(m, 1), b.b, b.b_scale, offsets)
    assert out.shape == (num_experts, m, 64)


def test_an_addend_of_its_own_stays_as_it_is() -> None:
    case = k_grouped_case((128, 0, 256), 7, 64)
    addend = case.addend()
    kept, out = addend.clone(), case.poisoned()
    assert k_grouped_gemm_fp8(*case.operands(), c=addend, out=out) is out
    check(case, out, kept)
    fresh = k_grouped_gemm_fp8(*case.operands(), c=addend)
    assert torch.equal(fresh, out) and torch.equal(addend, kept)
    strided = torch.stack([addend, addend], -1)[..., 0]
    assert torch.equal(k_grouped_gemm_fp8(*case.operands(), c=strided), out)
    assert k_grouped_gemm_fp8(*case.operands(), c=addend, out=addend) is addend
    assert torch.equal(addend, out)


def test_wrong_operands_leave_the_output_as_it_was() -> None:
    case = k_grouped_case((128, 256), 8, 64)
    out = torch.ones(case.out_shape())
    a, *others = case.operands()
    with pytest.raises(ArgumentError, match="b: expected shape"):
        k_grouped_gemm_fp8(a[:, :256], *others, c=case.addend(), out=out)
    assert torch.equal(out, torch.ones_like(out))


def test_b_without_rows_is_refused() -> None:
    case = k_grouped_case((128, 256), 8, 64)
    with pytest.raises(ArgumentError, match=r"b: expected shape .* N a positive multiple of 64"):
        k_grouped_gemm_fp8(case.a, case.a_scale, case.b[:0], case.b_scale[:0], case.offsets)


@pytest.mark.parametrize("change", [lambda c: c[:1], lambda c: c.double(), lambda c: c[0]])
def test_an_addend_has_the_form_of_the_output(change: object) -> None:
    assert callable(change)
    case = k_grouped_case((128, 128), 5, 64)
    with pytest.raises(ArgumentError) as caught:
        k_grouped_gemm_fp8(*case.operands(), c=change(case.addend()))
    assert (caught.value.op, caught.value.argument) == ("k_grouped_gemm_fp8", "c")


@pytest.mark.parametrize("argument", ["a_scale", "b_scale"])
def test_scales_of_another_layout_are_converted_and_counted(
    argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = k_grouped_case((128, 256), 6, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    operands = dict(zip(names, case.operands(), strict=True))
    expected = k_grouped_gemm_fp8(**operands)
    before = jit.counters().scale_conversions
    with caplog.at_level(logging.DEBUG, logger="moe_fp8"):
        out = k_grouped_gemm_fp8(**{**operands, argument: operands[argument].contiguous()})
    assert torch.equal(out, expected)
    assert jit.counters().scale_conversions == before + 1
    assert f"k_grouped_gemm_fp8: {argument} " in caplog.text
    both = (case.a, case.a_scale.contiguous(), case.b, case.b_scale.contiguous(), case.offsets)
    assert torch.equal(k_grouped_gemm_fp8(*both), expected)
    assert jit.counters().scale_conversions == before + 3


def _weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, c: torch.Tensor | None = None
) -> torch.Tensor:
    """dy [T, M] and x [T, N] of tokens sorted by expert -> [E, M, N]."""
    left, right = quantize_fp8(dy.T.contiguous()), quantize_fp8(x.T.contiguous())
    return k_grouped_gemm_fp8(*left, *right, offsets, c=c)


def test_weight_gradients_of_experts() -> None:
    gen = cases.generator(0, "cpu")
    dy, x = torch.randn(512, 96, generator=gen), torch.randn(512, 64, generator=gen)
    dy[200:256] = 0  # padding of the first expert
    out = _weight_gradient(dy.bfloat16(), x.bfloat16(), torch.tensor([0, 256, 256, 512], dtype=torch.int32))
    expected = torch.stack([dy[:200].T @ x[:200], torch.zeros(96, 64), dy[256:].T @ x[256:]])
    # Quantizing both operands costs 3.7e-2.
    assert cases.relative_error(out, expected) < 5e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_equal_eager_ones(dynamic: bool) -> None:
    gen = cases.generator(0, "cpu")
    compiled = torch.compile(_weight_gradient, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    offsets = torch.tensor([0, 128, 128, 256], dtype=torch.int32)
    for tokens in (256, 512):
        dy = torch.randn(tokens, 96, generator=gen).bfloat16()
        x = torch.randn(tokens, 64, generator=gen).bfloat16()
        for c in (None, torch.randn(3, 96, 64, generator=gen)):
            assert torch.equal(compiled(dy, x, offsets, c), _weight_gradient(dy, x, offsets, c))


def test_meta_tensors_give_shapes() -> None:
    a, a_scale = quantize_fp8(torch.empty(7, 256, device="meta"))
    b, b_scale = quantize_fp8(torch.empty(64, 256, device="meta"))
    out = k_grouped_gemm_fp8(a, a_scale, b, b_scale, torch.empty(4, dtype=torch.int32, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((3, 7, 64), torch.float32, "meta")


@pytest.mark.usefixtures("checked_mode")
@pytest.mark.parametrize("ends", [(0, 128, 128, 512), (128, 128, 128, 384), (512, 512, 512, 512)])
def test_good_offsets_pass(ends: tuple[int, ...]) -> None:
    k_grouped_gemm_fp8(*_with_offsets(ends))


@pytest.mark.usefixtures("checked_mode")
@pytest.mark.parametrize(
    "ends, expert",
    [
        ((0, 256, 128, 512), 1),
        ((0, 128, 256, 640), 2),
        ((-128, 128, 256, 512), 0),
        ((0, 128, 200, 512), 1),
        ((64, 128, 256, 512), 0),
        ((0, 128, 256, 511), 2),
    ],
)
def test_bad_offsets_are_located(ends: tuple[int, ...], expert: int) -> None:
    with pytest.raises(ContractError, match=f"for expert {expert}") as caught:
        k_grouped_gemm_fp8(*_with_offsets(ends))
    assert (caught.value.argument, caught.value.expert) == ("offsets", expert)


def _with_offsets(ends: Sequence[int]) -> tuple[torch.Tensor, ...]:
    case = k_grouped_case((512,), 5, 64)
    return *case.operands()[:4], torch.tensor(ends, dtype=torch.int32)


@pytest.mark.usefixtures("checked_mode")
@pytest.mark.parametrize("argument", ["a_scale", "b_scale"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scales_count_in_the_columns_of_experts_only(argument: str, bad: float) -> None:
    case = k_grouped_case((128, 0, 256), 6, 64, before=256, after=128)
    k_grouped_gemm_fp8(*case.operands())  # the other columns' scales are NaN
    getattr(case, argument)[3, 4] = bad
    with pytest.raises(ContractError, match=rf"{argument}: .* got {bad} at \[3, 4\], row 3") as caught:
        k_grouped_gemm_fp8(*case.operands())
    assert (caught.value.argument, caught.value.row) == (argument, 3)
