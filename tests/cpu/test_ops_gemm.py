"""The GEMM ops on the CPU against products that are written out here, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_fp8 import TileError, gemm_fp8, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked
from moe_fp8.ops.gemm import checks, reference
from moe_fp8.settings import settings
from tests import cases

LAYOUTS = ("m_indices", "psum", "offsets")


def _expand(a: Tensor, a_scale: Tensor) -> Tensor:
    return a.double() * a_scale.double().repeat_interleave(128, -1)


def _expand_blocks(b: Tensor, b_scale: Tensor) -> Tensor:
    scale = b_scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return b.double() * scale[..., : b.shape[-2], :]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (5, 192, 256), (130, 576, 128), (3, 2112, 384)])
def test_dense(m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    case = cases.dense_case(m, n, k)
    out = gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out_dtype=out_dtype)
    expected = _expand(case.a, case.a_scale) @ _expand_blocks(case.b, case.b_scale).T
    assert out.dtype is out_dtype and out.shape == (m, n)
    assert cases.relative_error(out, expected) < cases.tolerance(out_dtype)


def test_dense_writes_the_output_it_is_given() -> None:
    case = cases.dense_case(7, 64, 128)
    out = case.poisoned(torch.float32)
    assert gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out=out) is out
    cases.check_gemm(case, out)


def test_no_rows_no_output() -> None:
    case = cases.dense_case(0, 64, 128)
    assert gemm_fp8(case.a, case.a_scale, case.b, case.b_scale).shape == (0, 64)
    b, b_scale = case.b[None], case.b_scale[None]
    none = torch.zeros(0, dtype=torch.int32)
    out = grouped_gemm_fp8_contiguous(case.a, case.a_scale, b, b_scale, m_indices=none)
    assert out.shape == (0, 64)
    offsets = torch.zeros(2, dtype=torch.int32)
    assert grouped_gemm_fp8_contiguous(case.a, case.a_scale, b, b_scale, offsets=offsets).shape == (0, 64)
    masked = grouped_gemm_fp8_masked(case.a[None], case.a_scale[None], b, b_scale, offsets[:1])
    assert masked.shape == (1, 0, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(3, 0, 130, 1), (0, 0, 0), (128, 5), (0, 7), (9, 0)])
@pytest.mark.parametrize("n, k", [(192, 256), (64, 128)])
def test_contiguous(layout: str, rows: tuple[int, ...], n: int, k: int) -> None:
    case = cases.contiguous_case(layout, rows, n, k, total=200)
    out = case.poisoned(torch.float32)
    got = grouped_gemm_fp8_contiguous(
        case.a, case.a_scale, case.b, case.b_scale, **{layout: case.index}, out=out
    )
    assert got is out
    a, b = _expand(case.a, case.a_scale), _expand_blocks(case.b, case.b_scale)
    counted = [0] * len(rows)
    for e, start, end in case.runs:
        counted[e] += end - start
        assert cases.relative_error(out[start:end], a[start:end] @ b[e].T) < cases.F32_TOLERANCE
    assert counted == list(rows)


def test_layouts_agree() -> None:
    rows = (3, 0, 130, 1)
    dense = cases.contiguous_case("offsets", rows, 64, 256)
    answers = grouped_gemm_fp8_contiguous(dense.a, dense.a_scale, dense.b, dense.b_scale, offsets=dense.index)
    for layout in ("psum", "m_indices"):
        case = cases.contiguous_case(layout, rows, 64, 256)
        at = 0
        for _, start, end in case.runs:
            here = slice(at, at + end - start)
            case.a[start:end] = dense.a[here]
            case.a_scale[start:end] = dense.a_scale[here]
            at += end - start
        out = grouped_gemm_fp8_contiguous(
            case.a, case.a_scale, dense.b, dense.b_scale, **{layout: case.index}
        )
        valid = torch.cat([out[start:end] for _, start, end in case.runs])
        assert cases.relative_error(valid, answers) < cases.BF16_TOLERANCE


@pytest.mark.parametrize("expected_m", [None, 0, 1, 10**6])
@pytest.mark.parametrize("counts", [(3, 0, 16, 1), (0, 0), (16, 16)])
def test_masked(counts: tuple[int, ...], expected_m: int | None) -> None:
    case = cases.masked_case(counts, 16, 192, 256)
    out = case.poisoned()
    grouped_gemm_fp8_masked(
        case.a, case.a_scale, case.b, case.b_scale, case.index, expected_m=expected_m, out=out
    )
    for e, count in enumerate(counts):
        if count:
            a = _expand(case.a[e, :count], case.a_scale[e, :count])
            b = _expand_blocks(case.b[e], case.b_scale[e])
            assert cases.relative_error(out[e, :count], a @ b.T) < cases.BF16_TOLERANCE


def test_the_shared_check_rejects_a_wrong_expert() -> None:
    case = cases.masked_case((4, 4), 8, 64, 128)
    out = case.poisoned()
    grouped_gemm_fp8_masked(
        case.a, case.a_scale, case.b.flip(0), case.b_scale, case.index, expected_m=None, out=out
    )
    with pytest.raises(AssertionError, match="expert 0"):
        cases.check_gemm(case, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_reads_every_fp8_code_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    got = reference.dequantize_rows(codes, torch.ones(2, 1), dtype)
    assert got.dtype is dtype
    assert torch.equal(got.nan_to_num(1e6), codes.to(dtype).nan_to_num(1e6))


def test_a_config_changes_no_result_of_the_reference() -> None:
    case = cases.dense_case(5, 192, 1024)
    operands = (case.a, case.a_scale, case.b, case.b_scale)
    plain = gemm_fp8(*operands)
    for config in ("8x128", "64x64", "128x256/2p", "8x128/2k"):
        assert torch.equal(gemm_fp8(*operands, config=config), plain)
    masked = cases.masked_case((3, 0), 16, 192, 256)
    operands = (masked.a, masked.a_scale, masked.b, masked.b_scale, masked.index)
    out = grouped_gemm_fp8_masked(*operands, config="64x96")
    assert torch.equal(out[0, :3], grouped_gemm_fp8_masked(*operands)[0, :3])


@pytest.mark.parametrize("config", ["", "64", "64x96 ", "24x128", "8x64/2k", "128x256/3k", "8x128/5k"])
@pytest.mark.parametrize("m", [0, 5])
def test_a_config_that_dense_cannot_use(config: str, m: int) -> None:
    case = cases.dense_case(m, 64, 256)
    with pytest.raises(TileError) as caught:
        gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, config=config)
    assert (caught.value.field, caught.value.got) == ("config", config)
    assert "64x96" in caught.value.expected


@pytest.mark.parametrize("config", ["8x64", "8x128/2k"])
def test_no_grouped_gemm_divides_k(config: str) -> None:
    dense = cases.dense_case(4, 64, 1024)
    gemm_fp8(dense.a, dense.a_scale, dense.b, dense.b_scale, config=config)
    case = cases.contiguous_case("offsets", (3, 2), 64, 1024)
    with pytest.raises(TileError, match="offsets"):
        grouped_gemm_fp8_contiguous(
            case.a, case.a_scale, case.b, case.b_scale, offsets=case.index, config=config
        )
    case = cases.masked_case((3, 2), 4, 64, 1024)
    with pytest.raises(TileError, match="masked"):
        grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, case.index, config=config)


def test_batch_invariant_mode_refuses_configs_that_divide_k(monkeypatch: pytest.MonkeyPatch) -> None:
    on = dataclasses.replace(settings(), batch_invariant=True)
    monkeypatch.setattr(checks, "settings", lambda: on)
    case = cases.dense_case(4, 64, 1024)
    gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, config="8x128")
    with pytest.raises(TileError, match="batch-invariant"):
        gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, config="8x64")
