"""silu_mul_quantize against its definition in float64, and as the input of the grouped GEMM after it."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import ArgumentError, grouped_gemm_fp8_masked, jit, quantize_fp8, silu_mul_quantize
from tests import cases, silu_cases
from tests.cpu.op_arguments import OPS, run


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("limit", [None, 7.0, 0.1])
@pytest.mark.parametrize("m, intermediate", [(1, 128), (5, 384), (130, 256)])
def test_values_follow_the_definition(
    m: int, intermediate: int, limit: float | None, power_of_two: bool
) -> None:
    x = silu_cases.rows(m, intermediate)
    q, scale = silu_mul_quantize(x, limit=limit, power_of_two=power_of_two)
    assert q.shape == (m, intermediate) and q.dtype is torch.float8_e4m3fn and q.is_contiguous()
    assert scale.shape == (m, intermediate // 128) and scale.dtype is torch.float32
    assert scale.stride() == (1, (m + 3) // 4 * 4)
    silu_cases.check_values(q, scale, silu_cases.exact(x, limit), power_of_two)


def test_it_is_the_quantization_of_the_product() -> None:
    x = silu_cases.rows(9, 256)
    gate, up = x.float().chunk(2, -1)
    expected, expected_scale = quantize_fp8(gate / (1 + (-gate).exp()) * up)
    q, scale = silu_mul_quantize(x)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, expected_scale)


def test_a_limit_clamps_the_gate_above_and_the_up_projection_on_both_sides() -> None:
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([100.0, -1.0, 3.0, 3.0])
    x[0, 128:132] = torch.tensor([1.0, 1.0, 50.0, -50.0])
    q, scale = silu_mul_quantize(x, limit=10.0)
    clamped = torch.tensor([10.0, -1.0, 3.0, 3.0]) * torch.tensor([1.0, 1.0, 10.0, -10.0])
    expected = clamped / (1 + torch.tensor([-10.0, 1.0, -3.0, -3.0]).exp())
    assert torch.allclose(q[0, :4].float() * scale[0, 0], expected, rtol=0.07)


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0), (-2, 9, 1)])
def test_rows_beyond_the_count_are_neither_read_nor_written(counts: tuple[int, ...]) -> None:
    silu_cases.check_masked(silu_cases.expert_rows(counts, 5, 256), counts)


def test_rows_may_lie_apart() -> None:
    x = silu_cases.rows(5, 256, padding=72)
    assert x.stride() == (584, 1)
    silu_cases.check_like(silu_mul_quantize(x), silu_mul_quantize(x.contiguous()))
    silu_cases.check_masked(silu_cases.expert_rows((2, 3), 4, 128, padding=8), (2, 3))


def test_rows_of_experts_have_three_dimensions() -> None:
    x, q = torch.zeros(2, 3, 4, 256).bfloat16(), torch.zeros(2, 3, 4, 128).to(torch.float8_e4m3fn)
    given = {**OPS["silu_mul_quantize"](), "x": x, "q": q, "scale": torch.zeros(2, 3, 4, 1)}
    with pytest.raises(ArgumentError, match="x: expected shape"):
        run("silu_mul_quantize", given)


@pytest.mark.parametrize("experts, m", [(None, 0), (0, 4), (3, 0)])
def test_no_rows(experts: int | None, m: int) -> None:
    leading = (m,) if experts is None else (experts, m)
    masked_m = None if experts is None else torch.zeros(experts, dtype=torch.int32)
    q, scale = silu_mul_quantize(torch.zeros(*leading, 512, dtype=torch.bfloat16), masked_m=masked_m)
    assert q.shape == (*leading, 256) and scale.shape == (*leading, 2)


def test_a_nan_stays_in_its_group() -> None:
    x = silu_cases.rows(3, 256)
    clean = silu_mul_quantize(x)
    x[1, 130] = float("nan")
    q, scale = silu_mul_quantize(x)
    keep = torch.ones(3, 2, dtype=torch.bool)
    keep[1, 1] = False
    assert torch.equal(scale[keep], clean[1][keep])
    same = q.view(torch.uint8).view(3, 2, 128) == clean[0].view(torch.uint8).view(3, 2, 128)
    assert same.all(-1)[keep].all()


def test_the_grouped_gemm_reads_its_scales_as_they_are() -> None:
    counts = (3, 0, 6)
    x = silu_cases.expert_rows(counts, 6, 256)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    a, a_scale = silu_mul_quantize(x, masked_m=masked_m)
    assert a_scale.stride() == (16, 1, 8)
    b, b_scale = cases.weights(3, 192, 256, cases.generator(1, "cpu"))
    before = jit.counters().scale_conversions
    out = grouped_gemm_fp8_masked(a, a_scale, b, b_scale, masked_m)
    assert jit.counters().scale_conversions == before
    for e, count in enumerate(counts):
        if count:
            y = silu_cases.exact(x[e, :count])
            w = cases.gemm_reference.dequantize_blocks(b[e], b_scale[e], cases.F64)
            # Quantizing the activations alone makes an error of 2.6e-2.
            assert cases.relative_error(out[e, :count], y @ w.T) < 4e-2
