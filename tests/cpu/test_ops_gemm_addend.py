"""`c` of the GEMMs: the product is added to it, in place or in an output of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import moe_fp8
from moe_fp8 import (
    ArgumentError,
    ContractError,
    gemm_fp8,
    grouped_gemm_fp8_contiguous,
    grouped_gemm_fp8_masked,
)
from tests import cases
from tests.gemm_addend_cases import addend, call, check_sum, named_case

NAMES = ("dense", "m_indices", "psum", "offsets", "masked")


@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_added(name: str) -> None:
    case = named_case(name, (3, 0, 130, 1), 192, 256)
    c = addend(case)
    kept, out = c.clone(), case.poisoned(torch.float32)
    assert call(case, c=c, out=out) is out
    check_sum(case, out, c)
    assert torch.equal(c, kept)
    fresh = call(case, c=c)
    assert fresh.dtype is torch.float32 and torch.equal(fresh, out)
    assert torch.equal(call(case, c=torch.stack([c, c], -1)[..., 0]), out)
    assert call(case, c=c, out=c) is c
    assert torch.equal(c, out)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_adds(mode: str) -> None:
    case = named_case("dense", (5,), 64, 128)
    operands = addend(case), case.a, case.a_scale, case.b, case.b_scale
    traced = make_fx(lambda c, *others: gemm_fp8(*others, c=c), tracing_mode=mode)(*operands)
    assert torch.equal(traced(*operands), gemm_fp8(*operands[1:], c=operands[0]))


def test_an_addend_with_gradients_is_copied_without_them() -> None:
    case = named_case("dense", (3,), 64, 128)
    out = call(case, c=addend(case).requires_grad_())
    assert not out.requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_bf16_is_not_added_to(name: str, in_place: bool) -> None:
    case = named_case(name, (3, 2), 64, 128)
    out = torch.ones(case.out_shape(), dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="out: expected dtype float32, since c is added"):
        call(case, c=out if in_place else addend(case), out=out)
    assert torch.equal(out, torch.ones_like(out))
    with pytest.raises(ArgumentError, match=r"out_dtype=torch\.float32"):
        call(case, c=addend(case), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change", [lambda c: c[:1], lambda c: c.mT, lambda c: c.double(), lambda c: c.bfloat16()]
)
def test_an_addend_has_the_form_of_the_output(name: str, change: Callable[[Tensor], Tensor]) -> None:
    case = named_case(name, (3, 2), 64, 128)
    with pytest.raises(ArgumentError) as caught:
        call(case, c=change(addend(case)))
    assert caught.value.argument == "c"


@pytest.mark.parametrize("name", NAMES)
def test_wrong_operands_leave_the_output_as_it_was(name: str) -> None:
    case = named_case(name, (3, 2), 64, 256)
    out = torch.ones(case.out_shape())
    with pytest.raises(ArgumentError, match="b_scale: expected shape"):
        call(case, c=addend(case), out=out, b_scale=case.b_scale[..., :1])
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("name", NAMES)
def test_contents_that_checked_mode_refuses_leave_the_output_as_it_was(name: str, checked_mode: Path) -> None:
    case = named_case(name, (3, 2), 64, 256)
    case.a_scale[..., 0, 0] = float("nan")
    out = torch.ones(case.out_shape())
    with pytest.raises(ContractError):
        call(case, c=addend(case), out=out)
    assert torch.equal(out, torch.ones_like(out))
    assert len([*checked_mode.iterdir()]) == 1


def test_without_rows_or_experts_the_output_is_the_addend() -> None:
    case = cases.dense_case(5, 64, 128)
    c = addend(case)
    offsets = torch.zeros(1, dtype=torch.int32)
    none = case.b[None][:0], case.b_scale[None][:0]
    assert torch.equal(grouped_gemm_fp8_contiguous(case.a, case.a_scale, *none, offsets=offsets, c=c), c)
    masked = cases.masked_case((0, 0), 4, 64, 128)
    c = addend(masked)
    operands = masked.a, masked.a_scale, masked.b, masked.b_scale, masked.index
    assert torch.equal(grouped_gemm_fp8_masked(*operands, c=c), c)
    assert gemm_fp8(case.a[:0], case.a_scale[:0], case.b, case.b_scale, c=torch.zeros(0, 64)).shape == (0, 64)


def test_the_stride_of_a_single_row_does_not_matter() -> None:
    case = cases.dense_case(1, 64, 128)
    operands = case.a, case.a_scale, case.b, case.b_scale
    c = addend(case)
    expected = gemm_fp8(*operands, c=c)
    out = c.as_strided((1, 64), (1, 1))
    assert torch.equal(gemm_fp8(*operands, c=c, out=out), expected) and torch.equal(c, expected)


def test_on_the_meta_device_an_addend_has_any_strides() -> None:
    case = cases.dense_case(5, 64, 128)
    operands = [one.to("meta") for one in (case.a, case.a_scale, case.b, case.b_scale)]
    c = torch.empty(64, 5, device="meta").t()
    assert gemm_fp8(*operands, c=c).shape == (5, 64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_equal_eager_ones(dynamic: bool) -> None:
    gen = cases.generator(0, "cpu")
    b, b_scale = cases.weights(3, 64, 256, gen)

    def layer(x: Tensor, offsets: Tensor, c: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        q, scale = moe_fp8.quantize_fp8(x)
        dense = gemm_fp8(q, scale, b[0], b_scale[0], c=c)
        grouped = grouped_gemm_fp8_contiguous(q, scale, b, b_scale, offsets=offsets, c=dense)
        gemm_fp8(q, scale, b[1], b_scale[1], c=total, out=total)
        return dense, grouped, total + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for m in (6, 9):
        x = torch.randn(m, 256, generator=gen).bfloat16()
        offsets = torch.tensor([0, 2, 2, m], dtype=torch.int32)
        c = torch.randn(m, 64, generator=gen)
        totals = [torch.ones(m, 64), torch.ones(m, 64)]
        results = [function(x, offsets, c, t) for function, t in zip((compiled, layer), totals, strict=True)]
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(*totals)


def test_meta_tensors_give_shapes() -> None:
    case = cases.dense_case(5, 64, 128)
    on_meta: list[Any] = [x.to("meta") for x in (case.a, case.a_scale, case.b, case.b_scale)]
    out = gemm_fp8(*on_meta, c=torch.empty(5, 64, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((5, 64), torch.float32, "meta")


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_view_of_the_output_is_an_addend_of_its_own(name: str) -> None:
    case = named_case(name, (3, 2), 64, 128)
    out = addend(case)
    expected = call(case, c=-out, out=case.poisoned(torch.float32))
    assert torch.equal(call(case, c=torch._neg_view(out), out=out), expected)
