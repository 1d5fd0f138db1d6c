"""Grouped GEMMs on the GPU against float64, expert by expert; all padding is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moe_fp8 import ContractError, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked
from tests import cases

LAYOUTS = ("m_indices", "psum", "offsets")

ROWS: dict[str, tuple[int, ...]] = {
    "one row": (1,),
    "ragged": (3, 0, 130, 1, 17, 0, 64, 255),
    "ends empty": (0, 9, 0, 0),
    "all empty": (0, 0, 0, 0),
    "few each": (1, 2, 0, 4, 3, 1, 0, 0, 2, 5, 8, 1, 0, 1, 6, 7),
    "aligned": (128, 256, 128),
    "long and short": (1500, 1, 0, 700),
}


def _contiguous(
    case: cases.GemmCase,
    dtype: torch.dtype = torch.bfloat16,
    expected_m: int | None = None,
    config: str | None = None,
) -> torch.Tensor:
    out = case.poisoned(dtype)
    index = {case.layout: case.index}
    got = grouped_gemm_fp8_contiguous(
        case.a, case.a_scale, case.b, case.b_scale, **index, expected_m=expected_m, out=out, config=config
    )
    assert got is out
    return out


def _masked(
    case: cases.GemmCase, dtype: torch.dtype = torch.bfloat16, expected_m: int | None = None
) -> torch.Tensor:
    out = case.poisoned(dtype)
    assert case.index is not None
    grouped_gemm_fp8_masked(
        case.a, case.a_scale, case.b, case.b_scale, case.index, expected_m=expected_m, out=out
    )
    return out


def _equal_rows(case: cases.GemmCase, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether all valid rows are equal bit for bit."""
    for e, start, end in case.runs:
        pick = (e, slice(start, end)) if case.layout == "masked" else slice(start, end)
        if not torch.equal(left[pick], right[pick]):
            return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("n, k", [(576, 512), (2112, 128)])
def test_contiguous(layout: str, rows: tuple[int, ...], n: int, k: int) -> None:
    case = cases.contiguous_case(layout, rows, n, k, "cuda")
    cases.check_gemm(case, _contiguous(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_with_constant_weights(layout: str) -> None:
    case = cases.contiguous_case(layout, ROWS["ragged"], 576, 768, "cuda")
    torch.cuda.synchronize()  # nothing may write the weights or the index any more
    out = case.poisoned()
    operands = case.a, case.a_scale, case.b, case.b_scale
    grouped_gemm_fp8_contiguous(*operands, **{layout: case.index}, out=out, constant_weights=True)
    cases.check_gemm(case, out)
    assert _equal_rows(case, out, _contiguous(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_with_trailing_padding(layout: str) -> None:
    case = cases.contiguous_case(layout, (5, 0, 140), 192, 256, "cuda", total=1024)
    cases.check_gemm(case, _contiguous(case))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rows, n, k", [((200, 180, 0, 230) * 4, 4096, 1024), ((9, 30, 64, 2) * 8, 1536, 2048)]
)
def test_contiguous_of_real_size(layout: str, rows: tuple[int, ...], n: int, k: int) -> None:
    case = cases.contiguous_case(layout, rows, n, k, "cuda")
    cases.check_gemm(case, _contiguous(case))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(200, 0, 70, 130) * 20, (300, 5000, 129), (256, 128, 384) * 2])
def test_contiguous_pairs(layout: str, rows: tuple[int, ...]) -> None:
    # There are more segments than a warp has lanes, or a segment has more blocks of 128 rows than that.
    total = sum(-(-count // 128) * 128 for count in rows) + 640
    case = cases.contiguous_case(layout, rows, 576, 512, "cuda", total=total)
    for config in ("128x192/2p", "128x256/2p"):
        cases.check_gemm(case, _contiguous(case, config=config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_fp32_output(layout: str) -> None:
    case = cases.contiguous_case(layout, (3, 0, 130, 1), 192, 384, "cuda")
    cases.check_gemm(case, _contiguous(case, torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_expected_m_is_only_a_hint(layout: str) -> None:
    case = cases.contiguous_case(layout, ROWS["ragged"], 576, 512, "cuda")
    first = _contiguous(case)
    cases.check_gemm(case, first)
    for expected_m in (-1, 0, 1, 20, 64, 100_000):
        assert _equal_rows(case, _contiguous(case, expected_m=expected_m), first), f"expected_m={expected_m}"


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(3, 0, 130, 1), (40, 0)])
def test_contiguous_small(layout: str, rows: tuple[int, ...]) -> None:
    case = cases.contiguous_case(layout, rows, 192, 256, "cuda")
    cases.check_gemm(case, _contiguous(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_without_rows(layout: str) -> None:
    case = cases.contiguous_case(layout, (0, 0, 0), 192, 256, "cuda")
    assert _contiguous(case).shape == (0, 192)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_repeats_bit_for_bit(layout: str) -> None:
    case = cases.contiguous_case(layout, ROWS["ragged"], 2112, 1024, "cuda")
    first = _contiguous(case)
    for _ in range(5):
        assert _equal_rows(case, _contiguous(case), first)


def test_offsets_leave_other_rows_alone_when_ragged() -> None:
    # Tiles of neighbouring experts overlap in memory: an expert's last tile must not write into the next
    # expert.
    rows = (5, 3, 1, 7, 2, 130, 1, 0, 4) * 3
    case = cases.contiguous_case("offsets", rows, 576, 256, "cuda")
    for _ in range(10):
        cases.check_gemm(case, _contiguous(case))


def _random_counts(num_experts: int, highest: int, seed: int) -> list[int]:
    gen = cases.generator(seed, "cpu")
    counts = torch.randint(0, highest + 1, (num_experts,), generator=gen)
    counts[torch.rand(num_experts, generator=gen) < 0.3] = 0
    return counts.tolist()


def _random_index(layout: str, m: int, num_experts: int, seed: int) -> Sequence[int]:
    """The contents of a fresh index for `m` rows."""
    if layout == "offsets":
        # Rows beyond the last offset are padding.
        gen = cases.generator(seed, "cpu")
        return torch.randint(0, m + 1, (num_experts + 1,), generator=gen).sort().values.tolist()
    counts = _random_counts(num_experts, 127, seed)
    used, values = cases.layout_of(layout, counts, m)
    assert used == m
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("expected_m", [None, 16])
def test_contiguous_replay_reads_the_index_anew(layout: str, expected_m: int | None) -> None:
    num_experts, m = 8, 8 * 128
    case = cases.contiguous_case(layout, (0,) * num_experts, 576, 512, "cuda", total=m)
    a, a_scale = cases.activations(m, 512, cases.generator(1, "cuda"))
    out = _contiguous(case, expected_m=expected_m)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_fp8_contiguous(
            case.a,
            case.a_scale,
            case.b,
            case.b_scale,
            **{layout: case.index},
            expected_m=expected_m,
            out=out,
        )
    for seed in range(5):
        case.a.copy_(a)
        case.a_scale.copy_(a_scale)
        case = cases.with_index(case, _random_index(layout, m, num_experts, seed))
        out.fill_(float("nan"))
        graph.replay()
        cases.check_gemm(case, out)


MASKED = [
    ((1,), 1, 64, 128),
    ((0, 0, 0), 16, 192, 256),
    ((3, 0, 16, 1), 16, 576, 512),
    ((5, 0, 31, 64, 1), 64, 2112, 384),
    ((128, 1, 0, 77), 128, 192, 1024),
    ((200, 0, 129, 257), 260, 576, 256),
    ((4, 20, 0, 7) * 8, 128, 4096, 1024),
    ((1024, 700, 0), 1024, 2112, 512),
    ((13, 2), 13, 192, 256),
]


@pytest.mark.parametrize("counts, m_max, n, k", MASKED)
def test_masked(counts: tuple[int, ...], m_max: int, n: int, k: int) -> None:
    case = cases.masked_case(counts, m_max, n, k, "cuda")
    cases.check_gemm(case, _masked(case))


def test_masked_fp32_output() -> None:
    case = cases.masked_case((3, 0, 40, 1), 64, 192, 384, "cuda")
    cases.check_gemm(case, _masked(case, torch.float32))


@pytest.mark.parametrize(
    "counts, m_max, n, k", [((3, 0, 130, 17), 256, 576, 512), ((1, 2, 0), 8, 2112, 1024)]
)
def test_masked_does_not_depend_on_expected_m(counts: tuple[int, ...], m_max: int, n: int, k: int) -> None:
    case = cases.masked_case(counts, m_max, n, k, "cuda")
    first = _masked(case)
    cases.check_gemm(case, first)
    for expected_m in (-5, 0, 1, 9, 30, 64, m_max, 100_000):
        assert _equal_rows(case, _masked(case, expected_m=expected_m), first), f"expected_m={expected_m}"


@pytest.mark.sanitizer
@pytest.mark.parametrize("expected_m", [4, 128])
def test_masked_small(expected_m: int) -> None:
    case = cases.masked_case((3, 0, 40, 1), 64, 192, 256, "cuda")
    cases.check_gemm(case, _masked(case, expected_m=expected_m))


def test_masked_without_rows() -> None:
    case = cases.masked_case((0, 0), 4, 192, 256, "cuda")
    a, a_scale = case.a[:, :0].contiguous(), case.a_scale[:, :0]
    assert case.index is not None
    out = grouped_gemm_fp8_masked(a, a_scale, case.b, case.b_scale, case.index)
    assert out.shape == (2, 0, 192)


def test_masked_repeats_bit_for_bit() -> None:
    case = cases.masked_case((3, 0, 130, 17), 256, 2112, 1024, "cuda")
    first = _masked(case, expected_m=20)
    for _ in range(5):
        assert _equal_rows(case, _masked(case, expected_m=20), first)


@pytest.mark.parametrize("expected_m", [None, 10])
def test_masked_replay_reads_masked_m_anew(expected_m: int | None) -> None:
    num_experts, m_max = 12, 96
    case = cases.masked_case((0,) * num_experts, m_max, 576, 512, "cuda")
    fresh = cases.masked_case((m_max,) * num_experts, m_max, 576, 512, "cuda", seed=1)
    out = _masked(case, expected_m=expected_m)
    assert case.index is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_fp8_masked(
            case.a, case.a_scale, case.b, case.b_scale, case.index, expected_m=expected_m, out=out
        )
    for seed in range(5):
        case.a.copy_(fresh.a)
        case.a_scale.copy_(fresh.a_scale)
        case = cases.with_index(case, _random_counts(num_experts, m_max, seed))
        out.fill_(float("nan"))
        graph.replay()
        cases.check_gemm(case, out)


def test_more_than_2_31_weights() -> None:
    num_experts, m_max, n, k = 160, 8, 4096, 4096
    assert num_experts * n * k > 2**31
    gen = cases.generator(7, "cuda")
    # Every byte except NaN's exponent: all values are finite and quick to make.
    b = torch.randint(0, 256, (num_experts, n, k), generator=gen, device="cuda", dtype=torch.uint8)
    b = b.bitwise_and_(0xBF).view(torch.float8_e4m3fn)
    b_scale = torch.rand(num_experts, n // 128, k // 128, generator=gen, device="cuda") + 0.1
    small = cases.masked_case((1,) * num_experts, m_max, 64, k, "cuda")
    case = cases.GemmCase("masked", small.a, small.a_scale, b, b_scale, small.index, ())
    case = cases.with_index(case, [e % 2 for e in range(num_experts)])
    out = _masked(case)
    some = tuple(run for run in case.runs if run[0] in (1, 63, 127, 129, 159))
    assert len(some) == 5
    cases.check_gemm(cases.GemmCase("masked", case.a, case.a_scale, b, b_scale, case.index, some), out)


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_reads_the_index_except_while_capturing() -> None:
    case = cases.masked_case((3, 4), 8, 192, 256, "cuda")
    bad = torch.tensor([3, 9], dtype=torch.int32, device="cuda")
    with pytest.raises(ContractError, match="for expert 1"):
        grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, bad)
    out = _masked(case)
    assert case.index is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_fp8_masked(
            case.a, case.a_scale, case.b, case.b_scale, case.index, expected_m=None, out=out
        )
    out.fill_(float("nan"))
    graph.replay()
    cases.check_gemm(case, out)
