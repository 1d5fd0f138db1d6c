"""quantize_fp8 on the GPU equals the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import quantize_fp8, quantize_fp8_blocks
from tests import cases

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _bits(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8).cpu()


def _input(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    gen = cases.generator(m * 31 + k, "cpu")
    x = torch.randn(m, k, generator=gen) * torch.randn(m, 1, generator=gen).exp()
    if m > 2:
        x[1] = 0
        x[2] *= 1e-6
        x[2, :2] = torch.tensor([6e4, -6e4])
    return x.to(dtype)


def _check(m: int, k: int, dtype: torch.dtype, power_of_two: bool) -> None:
    x = _input(m, k, dtype)
    q, scale = quantize_fp8(x.cuda(), power_of_two=power_of_two)
    expected, expected_scale = quantize_fp8(x, power_of_two=power_of_two)
    assert scale.stride() == (1, (m + 3) // 4 * 4)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(_bits(q), _bits(expected))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, k", [(1, 128), (3, 512), (5, 7168), (16, 384), (129, 2048), (1001, 1536)])
def test_bit_exact(m: int, k: int, dtype: torch.dtype, power_of_two: bool) -> None:
    _check(m, k, dtype, power_of_two)


@pytest.mark.sanitizer
def test_small() -> None:
    _check(5, 256, torch.bfloat16, False)


def test_no_rows() -> None:
    q, scale = quantize_fp8(torch.empty(0, 256, device="cuda"))
    assert q.shape == (0, 256) and scale.shape == (0, 2)


def test_a_nan_stays_in_its_group() -> None:
    x = _input(40, 512, torch.bfloat16).cuda()
    clean, clean_scale = quantize_fp8(x)
    x[7, 130] = float("nan")
    q, scale = quantize_fp8(x)
    keep = torch.ones(40, 4, dtype=torch.bool)
    keep[7, 1] = False
    assert torch.equal(scale.cpu()[keep], clean_scale.cpu()[keep])
    same = (_bits(q) == _bits(clean)).view(40, 4, 128).all(-1)
    assert same[keep].all()


def test_replay_reads_new_values() -> None:
    static = torch.zeros(33, 512, dtype=torch.bfloat16, device="cuda")
    quantize_fp8(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = quantize_fp8(static)
    for seed in range(3):
        x = torch.randn(33, 512, generator=cases.generator(seed, "cpu")).bfloat16()
        static.copy_(x)
        graph.replay()
        expected, expected_scale = quantize_fp8(x)
        assert torch.equal(scale.cpu(), expected_scale)
        assert torch.equal(_bits(q), _bits(expected))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_equal_the_cpu(power_of_two: bool) -> None:
    w = torch.randn(2, 576, 384, generator=cases.generator(5, "cpu")).bfloat16()
    q, scale = quantize_fp8_blocks(w.cuda(), power_of_two=power_of_two)
    expected, expected_scale = quantize_fp8_blocks(w, power_of_two=power_of_two)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(_bits(q), _bits(expected))
