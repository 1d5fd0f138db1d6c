"""`linear_fp8` gives the bits of its two ops, and refuses what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fp8 import ArgumentError, gemm_fp8, linear_fp8, quantize_fp8, quantize_fp8_blocks

K, N = 256, 192


def _weights(n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8_blocks(torch.randn(n, k, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_the_two_ops(dtype: torch.dtype, power_of_two: bool) -> None:
    x = torch.randn(7, 2 * K).to(dtype)[:, :K]
    weight, scale = _weights()
    expected = gemm_fp8(*quantize_fp8(x, power_of_two=power_of_two), weight, scale)
    got = linear_fp8(x, weight, scale, power_of_two=power_of_two)
    assert got.dtype is torch.bfloat16 and torch.equal(got, expected)
    wide = torch.full((7, N + 8), 5.0)
    out = linear_fp8(x, weight, scale, power_of_two=power_of_two, out=wide[:, :N])
    assert torch.equal(out.bfloat16(), expected) and bool((wide[:, N:] == 5).all())


def test_no_rows() -> None:
    assert linear_fp8(torch.zeros(0, K).bfloat16(), *_weights()).shape == (0, N)


def test_the_output_may_be_the_input() -> None:
    x = torch.randn(4, K).bfloat16()
    weight, scale = _weights(K)
    expected = linear_fp8(x, weight, scale)
    assert linear_fp8(x, weight, scale, out=x) is x and torch.equal(x, expected)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"x": torch.zeros(K).bfloat16()}, "x"),
        ({"weight": torch.zeros(K).to(torch.float8_e4m3fn)}, "weight"),
        ({"x": torch.zeros(4, 200).bfloat16()}, "x"),
        ({"x": torch.zeros(4, K).int()}, "x"),
        ({"x": torch.zeros(4, 2 * K).bfloat16()}, "x"),
        ({"weight_scale": None}, "weight_scale"),
        ({"weight_scale": torch.zeros(2, 1)}, "weight_scale"),
        ({"out": torch.zeros(4, N + 64).bfloat16()}, "out"),
    ],
)
def test_what_its_ops_refuse_is_named_as_its_caller_does(given: dict[str, Any], argument: str) -> None:
    weight, scale = _weights()
    arguments = {"x": torch.zeros(4, K).bfloat16(), "weight": weight, "weight_scale": scale, **given}
    with pytest.raises(ArgumentError) as caught:
        linear_fp8(**arguments)
    assert (caught.value.op, caught.value.argument) == ("linear_fp8", argument)
    assert str(caught.value).startswith(f"linear_fp8: {argument}: expected")


def test_x_is_named_if_it_is_also_the_output() -> None:
    weight, scale = _weights(K)
    x = torch.zeros(4, K, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="linear_fp8: x: expected dtype bfloat16, float16 or float32"):
        linear_fp8(x, weight, scale, out=x)


def test_memory_shared_with_weights_is_refused() -> None:
    weight, scale = _weights()
    room = weight.view(torch.uint8).view(torch.bfloat16).view(-1)[: 4 * N].view(4, N)
    with pytest.raises(ArgumentError, match="linear_fp8: out: expected no memory of weight"):
        linear_fp8(torch.zeros(4, K).bfloat16(), weight, scale, out=room)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_equals_the_eager_one(dynamic: bool) -> None:
    weight, scale = _weights()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(linear_fp8(x * 2, weight, scale, constant_weights=True))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 8):
        x = torch.randn(rows, K).bfloat16()
        assert torch.equal(compiled(x), layer(x))
