"""silu_mul_quantize on the GPU against float64, and against the CPU except for the last bits of exp."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moe_fp8 import quantize_fp8, silu_mul_quantize
from tests import cases, silu_cases

COUNTS: dict[str, tuple[int, ...]] = {
    "one row": (1,),
    "ragged": (3, 0, 33, 1, 17, 0, 16, 40),
    "ends empty": (0, 9, 0, 0),
    "all empty": (0, 0, 0, 0),
    "out of range": (-3, 41, 1 << 30, -(1 << 31)),
    "more than a warp": tuple(range(40)) + (0,) * 30 + (5, 0, 7),
}


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy with x's strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


def _check(x: torch.Tensor, limit: float | None = None, power_of_two: bool = False) -> None:
    m, width = x.shape
    out = silu_cases.poisoned(m, width // 2, device="cuda")
    q, scale = silu_mul_quantize(_on_gpu(x), limit=limit, power_of_two=power_of_two, out=out)
    assert q is out[0] and scale is out[1]
    silu_cases.check_values(q.cpu(), scale.cpu(), silu_cases.exact(x, limit), power_of_two)
    expected = silu_mul_quantize(x, limit=limit, power_of_two=power_of_two)
    silu_cases.check_like((q, scale), expected, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize(
    "m, intermediate", [(1, 128), (3, 768), (16, 2048), (129, 384), (1001, 1536), (4096, 2048)]
)
def test_rows(m: int, intermediate: int, limit: float | None, power_of_two: bool) -> None:
    _check(silu_cases.rows(m, intermediate), limit, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("intermediate", [128, 768, 2048])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_masked(counts: Sequence[int], intermediate: int, power_of_two: bool) -> None:
    x = _on_gpu(silu_cases.expert_rows(counts, 40, intermediate))
    silu_cases.check_masked(x, counts, power_of_two=power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rounded_steps(power_of_two: bool) -> None:
    x = silu_cases.rows(300, 768)
    q, scale = (each.cpu() for each in silu_mul_quantize(x.cuda(), rounded=True, power_of_two=power_of_two))
    gate, up = x.float().chunk(2, -1)
    silu = (gate / (1 + torch.exp(-gate))).bfloat16()
    expected = quantize_fp8((silu * up.bfloat16()).contiguous(), power_of_two=power_of_two)
    # The hardware's functions move few values across a boundary of bf16.
    differing = (q.view(torch.uint8) != expected[0].view(torch.uint8)).float().mean()
    assert differing < 2e-4 and ((scale - expected[1]).abs() <= expected[1] * 2**-7).float().mean() > 0.999


def test_masked_with_a_limit_and_odd_rows() -> None:
    counts = (7, 0, 3, 13)
    silu_cases.check_masked(_on_gpu(silu_cases.expert_rows(counts, 13, 384)), counts, limit=1.5)


def test_masked_of_real_size() -> None:
    counts = tuple((37 * e) % 129 for e in range(32))
    silu_cases.check_masked(_on_gpu(silu_cases.expert_rows(counts, 128, 2048)), counts)


@pytest.mark.sanitizer
def test_small_rows() -> None:
    _check(silu_cases.rows(5, 256))


@pytest.mark.sanitizer
def test_small_masked() -> None:
    silu_cases.check_masked(_on_gpu(silu_cases.expert_rows((3, 0, 18), 18, 256)), (3, 0, 18), limit=7.0)


@pytest.mark.parametrize("padding", [8, 72])
def test_rows_may_lie_apart(padding: int) -> None:
    x = silu_cases.rows(37, 384, padding)
    assert x.stride() == (768 + padding, 1)
    _check(x)
    counts = (5, 0, 9)
    silu_cases.check_masked(_on_gpu(silu_cases.expert_rows(counts, 9, 384, padding)), counts)


def test_results_repeat_and_do_not_depend_on_the_layout() -> None:
    x = silu_cases.rows(200, 768).cuda()
    q, scale = silu_mul_quantize(x)
    masked_m = torch.tensor([100, 100], dtype=torch.int32, device="cuda")
    for _ in range(5):
        again, again_scale = silu_mul_quantize(x.view(2, 100, -1), masked_m=masked_m)
        assert torch.equal(again.view(torch.uint8).flatten(0, 1), q.view(torch.uint8))
        assert torch.equal(again_scale.flatten(0, 1), scale)


def test_no_rows() -> None:
    q, scale = silu_mul_quantize(torch.empty(0, 512, device="cuda", dtype=torch.bfloat16))
    assert q.shape == (0, 256) and scale.shape == (0, 2)


def test_scales_of_another_layout_are_written_too() -> None:
    counts = (2, 0, 5)
    x = _on_gpu(silu_cases.expert_rows(counts, 5, 256))
    q, scale = silu_cases.poisoned(3, 5, 256, device="cuda")
    out = q, scale.contiguous()
    silu_mul_quantize(x, masked_m=torch.tensor(counts, dtype=torch.int32, device="cuda"), out=out)
    silu_cases.check_experts(out, x, counts)


def test_offsets_of_more_than_31_bits() -> None:
    # The last expert comes after 2^31 elements of x.
    m, width = 4096, 1 << 14
    x = torch.empty(33, m, width, dtype=torch.bfloat16, device="cuda")
    x[32] = torch.randn(m, width, generator=cases.generator(0, "cuda"), device="cuda")
    masked_m = torch.tensor([0] * 32 + [m], dtype=torch.int32, device="cuda")
    q, scale = silu_mul_quantize(x, masked_m=masked_m)
    expected = silu_mul_quantize(x[32])
    assert torch.equal(q[32].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale[32], expected[1])


def test_replay_reads_new_values_and_counts() -> None:
    m, intermediate, num_experts = 24, 384, 35
    x = torch.zeros(num_experts, m, 2 * intermediate, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.zeros(num_experts, dtype=torch.int32, device="cuda")
    q, scale = silu_cases.poisoned(num_experts, m, intermediate, device="cuda")
    silu_mul_quantize(x, masked_m=masked_m, out=(q, scale))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        silu_mul_quantize(x, masked_m=masked_m, out=(q, scale))
    for seed in range(4):
        gen = cases.generator(seed, "cpu")
        counts = torch.randint(-2, m + 3, (num_experts,), generator=gen)
        counts[torch.rand(num_experts, generator=gen) < 0.4] = 0
        x.copy_(silu_cases.expert_rows(counts.tolist(), m, intermediate, seed=seed))
        masked_m.copy_(counts)
        fresh = silu_cases.poisoned(num_experts, m, intermediate, device="cuda")
        q.view(torch.uint8).copy_(fresh[0].view(torch.uint8))
        scale.copy_(fresh[1])
        graph.replay()
        silu_cases.check_experts((q, scale), x, counts.tolist())
