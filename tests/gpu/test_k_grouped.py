"""k_grouped_gemm_fp8 on the GPU against float64: ragged sizes, unowned columns, accumulation, replays."""

from __future__ import annotations

import random

import pytest
import torch

import moe_fp8
from moe_fp8 import k_grouped_gemm_fp8
from tests import cases
from tests.k_grouped_cases import check, check_both_modes, k_grouped_case, with_ends


def _sizes(num_experts: int, most: int, seed: int) -> list[int]:
    """Multiples of 128 up to `most`; a quarter of the experts are empty."""
    rng = random.Random(seed)
    return [0 if rng.random() < 0.25 else 128 * rng.randint(0, most // 128) for _ in range(num_experts)]


# M that no tile divides, N of half a tile, odd numbers of tiles along either side and of both.
@pytest.mark.parametrize("m", [1, 64, 129, 200, 384, 1000])
@pytest.mark.parametrize("n", [64, 192, 320, 2112])
def test_sizes_of_the_output(m: int, n: int) -> None:
    check_both_modes(k_grouped_case((256, 0, 128, 640), m, n, "cuda", seed=m + n))


@pytest.mark.parametrize("num_experts", [1, 2, 3, 7, 16, 33, 64])
def test_numbers_of_experts(num_experts: int) -> None:
    check_both_modes(k_grouped_case(_sizes(num_experts, 1408, num_experts), 384, 320, "cuda", after=128))


@pytest.mark.parametrize("num_experts, m, n", [(4, 1000, 576), (9, 256, 2112), (5, 4096, 2048)])
def test_long_experts(num_experts: int, m: int, n: int) -> None:
    check_both_modes(k_grouped_case(_sizes(num_experts, 6144, m), m, n, "cuda", seed=n))


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    rng = random.Random(seed)
    sizes = _sizes(rng.randint(1, 24), rng.choice((128, 512, 4096)), seed)
    before, after = 128 * rng.randint(0, 3), 128 * rng.randint(1, 3)
    m, n = rng.randint(1, 1500), 64 * rng.randint(1, 24)
    check_both_modes(k_grouped_case(sizes, m, n, "cuda", seed, before, after))


@pytest.mark.parametrize("sizes", [(128,), (0,), (0, 0, 0), (0, 128), (128, 0), (0, 0, 2048, 0)])
def test_few_columns(sizes: tuple[int, ...]) -> None:
    check_both_modes(k_grouped_case(sizes, 300, 192, "cuda", before=128, after=256))


@pytest.mark.sanitizer
@pytest.mark.parametrize("sizes", [(128, 0, 384), (1024, 256)])  # fewer blocks of K than stages, and more
def test_small(sizes: tuple[int, ...]) -> None:
    check_both_modes(k_grouped_case(sizes, 130, 192, "cuda", before=128, after=128))


def test_an_addend_of_its_own_stays_as_it_is() -> None:
    case = k_grouped_case((384, 0, 1024), 300, 576, "cuda")
    addend, out = case.addend(), case.poisoned()
    kept = addend.clone()
    k_grouped_gemm_fp8(*case.operands(), c=addend, out=out)
    check(case, out, kept)
    assert torch.equal(addend, kept)
    k_grouped_gemm_fp8(*case.operands(), c=addend, out=addend)
    assert torch.equal(addend, out), "in place gives the same bits"


def test_results_repeat() -> None:
    case = k_grouped_case(_sizes(13, 3000, 1), 777, 832, "cuda")
    first, addend = k_grouped_gemm_fp8(*case.operands()), case.addend()
    added = k_grouped_gemm_fp8(*case.operands(), c=addend)
    for _ in range(5):
        assert torch.equal(k_grouped_gemm_fp8(*case.operands()), first)
        assert torch.equal(k_grouped_gemm_fp8(*case.operands(), c=addend), added)


def test_an_experts_bits_depend_on_its_own_columns_alone() -> None:
    case = k_grouped_case((384, 1280, 0, 128), 300, 320, "cuda")
    out = k_grouped_gemm_fp8(*case.operands())
    offsets = torch.tensor([384, 1664], dtype=torch.int32, device="cuda")
    assert torch.equal(k_grouped_gemm_fp8(*case.operands()[:4], offsets)[0], out[1])


@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_reads_new_operands_and_offsets(accumulate: bool) -> None:
    num_experts, columns = 9, 4096
    whole = k_grouped_case((columns,), 300, 448, "cuda")
    case = k_grouped_case((0,) * num_experts, 300, 448, "cuda", after=columns)
    out, c = case.poisoned(), case.addend()
    addend = c.clone()

    def call() -> None:
        k_grouped_gemm_fp8(*case.operands(), c=c if accumulate else None, out=c if accumulate else out)

    call()  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(6):
        rng = random.Random(seed)
        cuts = sorted(128 * rng.randint(0, columns // 128) for _ in range(num_experts + 1))
        if seed == 0:
            cuts = [0] * num_experts + [columns]
        for target, source in zip(case.operands()[:4], whole.operands()[:4], strict=True):
            target.copy_(source)
        now = with_ends(case, cuts)
        out.fill_(float("nan"))
        c.copy_(addend)
        graph.replay()
        check(now, c if accumulate else out, addend if accumulate else None)


def test_offsets_of_more_than_31_bits() -> None:
    num_experts, m, n = 33, 8192, 8192
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    case = k_grouped_case((128,) * num_experts, m, n, "cuda")
    out = case.poisoned()
    assert out.numel() > 2**31
    k_grouped_gemm_fp8(*case.operands(), out=out)
    for e in (0, num_experts - 1):
        offsets = case.offsets[e : e + 2].contiguous()
        assert torch.equal(k_grouped_gemm_fp8(*case.operands()[:4], offsets)[0], out[e])
    assert not out.sum((1, 2)).isnan().any()
    k_grouped_gemm_fp8(*case.operands(), c=out, out=out)
    last = k_grouped_gemm_fp8(*case.operands()[:4], case.offsets[-2:].contiguous())
    assert cases.relative_error(out[-1], 2 * last[0]) < 1e-6


@pytest.mark.parametrize("num_sms", [1, 2, 3, 131])
def test_any_number_of_sms_gives_the_same_bits(num_sms: int) -> None:
    case = k_grouped_case((384, 0, 1280), 300, 320, "cuda")
    addend = case.addend()
    expected = k_grouped_gemm_fp8(*case.operands(), c=addend)
    moe_fp8.set_num_sms(num_sms)
    try:
        assert torch.equal(k_grouped_gemm_fp8(*case.operands(), c=addend), expected)
    finally:
        moe_fp8.set_num_sms(None)


def test_rows_of_the_output_apart_keep_what_lies_between() -> None:
    case = k_grouped_case((256, 0, 384), 200, 320, "cuda")
    storage = torch.full((3, 200, 328), cases.SENTINEL, device="cuda")
    out = storage[..., :320]
    k_grouped_gemm_fp8(*case.operands(), out=out)
    check(case, out)
    assert (storage[..., 320:] == cases.SENTINEL).all()
