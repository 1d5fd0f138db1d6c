"""gemm_fp8 with scales of 1 x 128 on both operands, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_fp8 import ArgumentError, ContractError, gemm_fp8, jit, k_grouped_gemm_fp8
from moe_fp8.jit import JitCounters
from moe_fp8.ops.gemm import checks
from tests import cases
from tests.gemm_addend_cases import addend, call, check_sum, named_case

NAME = "dense of rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (5, 192, 256), (130, 576, 384)])
def test_against_float64(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    case = named_case(NAME, (m,), n, k)
    out = call(case, out_dtype=dtype)
    left, right = (
        values.double() * scale.double().repeat_interleave(128, 1)
        for values, scale in ((case.a, case.a_scale), (case.b, case.b_scale))
    )
    assert out.dtype is dtype and out.shape == (m, n)
    assert cases.relative_error(out, left @ right.T) < cases.tolerance(dtype)


def test_it_is_one_expert_of_ragged_k() -> None:
    case = named_case(NAME, (9,), 64, 384)
    offsets = torch.tensor([0, 384], dtype=torch.int32)
    operands = (case.a, case.a_scale, case.b, case.b_scale)
    c = addend(case)
    assert torch.equal(gemm_fp8(*operands, c=c), k_grouped_gemm_fp8(*operands, offsets, c=c[None])[0])


def test_the_product_is_added() -> None:
    case = named_case(NAME, (33,), 192, 256)
    c = addend(case)
    out = call(case, c=c)
    check_sum(case, out, c)
    assert torch.equal(call(case, c=c, out=c), out)
    with pytest.raises(ArgumentError, match="since c is added"):
        call(case, c=c, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("argument", ["a_scale", "b_scale"])
def test_scales_of_another_layout_are_converted_and_counted(argument: str) -> None:
    case = named_case(NAME, (6,), 64, 256)
    expected, before = call(case), jit.counters()
    changed = replace(case, **{argument: getattr(case, argument).contiguous()})
    assert torch.equal(call(changed), expected)
    found = jit.counters()
    assert found.scale_conversions == before.scale_conversions + 1
    # They count for the kernel that runs, which is not the kernel of other dense GEMMs.
    other, own = (
        [counts.by_op.get(kernel, JitCounters()).scale_conversions for counts in (before, found)]
        for kernel in ("gemm_fp8", "k_grouped_gemm_fp8")
    )
    assert other[0] == other[1] and own[1] == own[0] + 1


def test_scales_that_the_call_converts_are_not_read_early() -> None:
    case = named_case(NAME, (6,), 64, 256)
    operands = (case.a, case.a_scale, case.b)
    out = case.poisoned()
    assert checks.gemm(*operands, case.b_scale, out, constant_weights=True) is None
    found = checks.gemm(*operands, case.b_scale.contiguous(), out, constant_weights=True)
    assert found is not None and found[6] is False


def test_no_rows_no_output() -> None:
    case = named_case(NAME, (0,), 64, 128)
    assert call(case).shape == (0, 64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_config_is_refused(device: str) -> None:
    case = named_case(NAME, (6,), 64, 256)
    arguments = [x.to(device) for x in (case.a, case.a_scale, case.b, case.b_scale)]
    with pytest.raises(ArgumentError, match="config: expected None where b has scales of 1 x 128"):
        gemm_fp8(*arguments, config="64x96")


@pytest.mark.usefixtures("checked_mode")
@pytest.mark.parametrize("argument", ["a_scale", "b_scale"])
def test_scales_are_finite(argument: str) -> None:
    case = named_case(NAME, (6,), 64, 256)
    call(case)
    getattr(case, argument)[5, 1] = float("nan")
    with pytest.raises(ContractError, match=rf"{argument}: .* got nan at \[5, 1\], row 5") as caught:
        call(case)
    assert (caught.value.argument, caught.value.row) == (argument, 5)
