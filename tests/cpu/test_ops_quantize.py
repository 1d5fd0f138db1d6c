"""quantize_fp8 and quantize_fp8_blocks against their written definition, in Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8 import ArgumentError, quantize_fp8, quantize_fp8_blocks
from tests.cases import generator
from tests.fp8_definition import f32, fp8_code, quantize_group


def _check(x: torch.Tensor, power_of_two: bool) -> None:
    q, scale = quantize_fp8(x, power_of_two=power_of_two)
    m, k = x.shape
    for row in range(m):
        for group in range(k // 128):
            columns = slice(group * 128, group * 128 + 128)
            expected, expected_scale = quantize_group(x[row, columns].float().tolist(), power_of_two)
            assert scale[row, group].item() == expected_scale
            assert q[row, columns].view(torch.uint8).tolist() == expected


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_follow_the_definition(dtype: torch.dtype, power_of_two: bool) -> None:
    x = torch.randn(5, 384, generator=generator(1, "cpu"))
    x[1] *= 1e-4
    x[2, :128] = 0
    x[3, 5] = 6e4
    _check(x.to(dtype), power_of_two)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=12),
    st.booleans(),
)
def test_any_finite_group_follows_the_definition(values: list[float], power_of_two: bool) -> None:
    x = torch.zeros(1, 128)
    x[0, : len(values)] = torch.tensor(values)
    _check(x, power_of_two)


def test_a_power_of_two_scale_is_kept_and_the_next_float_is_rounded_up() -> None:
    x = torch.zeros(2, 128)
    x[0, 0] = 448.0 * 0.25
    x[1, 0] = torch.nextafter(torch.tensor(448.0 * 0.25), torch.tensor(1e9))
    _, scale = quantize_fp8(x, power_of_two=True)
    assert scale[:, 0].tolist() == [0.25, 0.5]


@pytest.mark.parametrize("m", [0, 1, 3, 4, 5, 130])
def test_scales_are_mn_major(m: int) -> None:
    q, scale = quantize_fp8(torch.randn(m, 256))
    assert q.shape == (m, 256) and q.dtype is torch.float8_e4m3fn and q.is_contiguous()
    assert scale.shape == (m, 2) and scale.dtype is torch.float32
    assert scale.stride() == (1, (m + 3) // 4 * 4)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_nan_stays_in_its_group(power_of_two: bool) -> None:
    x = torch.randn(3, 256, generator=generator(2, "cpu"))
    clean, clean_scale = quantize_fp8(x, power_of_two=power_of_two)
    x[1, 130] = float("nan")
    q, scale = quantize_fp8(x, power_of_two=power_of_two)
    assert scale[1, 1].isnan()
    keep = torch.ones(3, 2, dtype=torch.bool)
    keep[1, 1] = False
    assert torch.equal(scale[keep], clean_scale[keep])
    same = q.view(torch.uint8).view(3, 2, 128) == clean.view(torch.uint8).view(3, 2, 128)
    assert same.all(-1)[keep].all()


@pytest.mark.parametrize("shape", [(128, 128), (192, 256), (2, 576, 384), (3, 64, 100), (1, 1)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_follow_the_definition(shape: tuple[int, ...], power_of_two: bool) -> None:
    w = torch.randn(shape, generator=generator(3, "cpu"), dtype=torch.float32).bfloat16()
    q, scale = quantize_fp8_blocks(w, power_of_two=power_of_two)
    assert q.shape == w.shape and q.dtype is torch.float8_e4m3fn and q.is_contiguous()
    n, k = shape[-2:]
    assert scale.shape == (*shape[:-2], math.ceil(n / 128), math.ceil(k / 128))
    experts = w[None] if w.dim() == 2 else w
    for e, expert in enumerate(experts):
        for i in range(math.ceil(n / 128)):
            for j in range(math.ceil(k / 128)):
                at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                block = expert[at].float()
                _, expected_scale = quantize_group([float(block.abs().max())], power_of_two)
                got_q = (q[None] if q.dim() == 2 else q)[e][at]
                got_scale = (scale[None] if scale.dim() == 2 else scale)[e, i, j].item()
                assert got_scale == expected_scale
                inverse = f32(1.0 / expected_scale)
                row = block[0].tolist()
                expected = [fp8_code(f32(value * inverse)) for value in row]
                assert got_q[0].view(torch.uint8).tolist() == expected


def test_dequantized_values_are_close() -> None:
    x = torch.randn(64, 512, generator=generator(4, "cpu"))
    q, scale = quantize_fp8(x)
    back = (q.float().view(64, 4, 128) * scale[..., None]).view(64, 512)
    # e4m3 has three mantissa bits, so half a unit in the last place is 1/16 of a value.
    assert ((back - x).abs() <= x.abs() / 16 + scale.max() * 2**-10).all()


def test_writes_to_what_it_is_given() -> None:
    x = torch.randn(5, 256)
    expected = quantize_fp8(x)
    given = tuple(torch.full_like(t.float(), 7).to(t.dtype) for t in expected)
    q, scale = quantize_fp8(x, out=(given[0], given[1]))
    assert q is given[0] and scale is given[1]
    assert torch.equal(q.float(), expected[0].float()) and torch.equal(scale, expected[1])
    with pytest.raises(ArgumentError, match="scale"):
        quantize_fp8(x, out=(given[0], given[1][:, :1]))
