"""Operands at other strides give the bits of contiguous ones; what lies between rows is NaN, and stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fp8 import (
    gemm_fp8,
    grouped_gemm_fp8_contiguous,
    grouped_gemm_fp8_masked,
    indexer_select,
    indexer_topk,
    jit,
    k_grouped_gemm_fp8,
    mqa_logits_fp8,
    paged_indexer_select,
    paged_mqa_logits_fp8,
    paged_mqa_logits_metadata,
    quantize_fp8,
    silu_mul_quantize,
)
from moe_fp8.ops.indexer.logits import mqa_logits_chunk_op
from tests import cases
from tests.k_grouped_cases import k_grouped_case
from tests.stride_cases import apart, behind, experts_apart, padded_scales

DTYPES = (torch.bfloat16, torch.float32)


def _operands(case: cases.GemmCase) -> tuple[torch.Tensor, ...]:
    return apart(case.a, 48), padded_scales(case.a_scale, 20), apart(case.b, 16), case.b_scale


def _check(case: cases.GemmCase, out: torch.Tensor, expected: torch.Tensor, conversions: int) -> None:
    assert jit.counters().scale_conversions == conversions, "scales with padding are read as they are"
    for e, start, end in case.runs:
        pick: Any = (e, slice(start, end)) if case.layout == "masked" else slice(start, end)
        assert torch.equal(out[pick], expected[pick])
    assert behind(out).isnan().all(), "wrote between rows"


# Tiles of few tokens, of 64, of 128 and more; N that no tile divides.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "m, n, k", [(1, 576, 256), (5, 192, 2048), (30, 2112, 128), (70, 320, 512), (300, 576, 384)]
)
def test_dense(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    expected = gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out_dtype=dtype)
    out = apart(case.poisoned(dtype), 24)
    before = jit.counters().scale_conversions
    gemm_fp8(*_operands(case), out=out)
    _check(case, out, expected, before)


@pytest.mark.parametrize("config", ["8x64", "32x128", "64x64", "64x96", "128x128", "128x256/2p"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_by_config(config: str, dtype: torch.dtype) -> None:
    case = cases.dense_case(200, 2112, 1024, "cuda")
    expected = gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out_dtype=dtype, config=config)
    out = apart(case.poisoned(dtype), 8)
    gemm_fp8(*_operands(case), out=out, config=config)
    assert torch.equal(out, expected) and behind(out).isnan().all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("m", [5, 70])
def test_dense_small(m: int) -> None:
    case = cases.dense_case(m, 192, 256, "cuda")
    out = apart(case.poisoned(), 8)
    gemm_fp8(*_operands(case), out=out)
    cases.check_gemm(case, out)
    assert behind(out).isnan().all()


def test_a_batch_in_the_first_rows_of_a_static_buffer() -> None:
    """What an engine with CUDA graphs has: scales of the largest batch, of which this one uses some."""
    case = cases.dense_case(48, 576, 512, "cuda")
    x = torch.randn(48, 512, device="cuda", dtype=torch.bfloat16)
    q = torch.empty(256, 512, device="cuda", dtype=torch.float8_e4m3fn)
    scale = torch.full((4, 256), float("nan"), device="cuda").T
    expected_q, expected_scale = quantize_fp8(x)
    quantize_fp8(x, out=(q[:48], scale[:48]))
    assert torch.equal(q[:48].view(torch.uint8), expected_q.view(torch.uint8))
    assert torch.equal(scale[:48], expected_scale) and scale[48:].isnan().all()
    before = jit.counters().scale_conversions
    out = gemm_fp8(q[:48], scale[:48], case.b, case.b_scale)
    assert torch.equal(out, gemm_fp8(expected_q, expected_scale, case.b, case.b_scale))
    assert jit.counters().scale_conversions == before


@pytest.mark.parametrize("layout", ["m_indices", "psum", "offsets"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(3, 0, 7, 1, 2), (130, 0, 17, 64, 255)])
def test_contiguous(layout: str, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    case = cases.contiguous_case(layout, rows, 576, 512, "cuda")
    index = {layout: case.index}
    expected = grouped_gemm_fp8_contiguous(
        case.a, case.a_scale, case.b, case.b_scale, **index, out=case.poisoned(dtype)
    )
    out = apart(case.poisoned(dtype), 8)
    before = jit.counters().scale_conversions
    grouped_gemm_fp8_contiguous(*_operands(case), **index, out=out)
    _check(case, out, expected, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts, m_max", [((3, 0, 7, 1), 8), ((5,), 9), ((1, 0, 1), 1), ((100, 0, 257), 300)]
)
def test_masked(counts: tuple[int, ...], m_max: int, dtype: torch.dtype) -> None:
    case = cases.masked_case(counts, m_max, 320, 384, "cuda")
    assert case.index is not None
    expected = case.poisoned(dtype)
    grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, case.index, out=expected)
    out = apart(case.poisoned(dtype), 16)
    before = jit.counters().scale_conversions
    grouped_gemm_fp8_masked(*_operands(case), case.index, out=out)
    _check(case, out, expected, before)


def test_experts_of_one_group_and_of_one_row() -> None:
    """Dimensions of size 1, whose strides do not matter: the next row, or group, is the next expert's."""
    for counts, m_max, k in (((1, 1, 0), 1, 512), ((3, 0, 5), 6, 128)):
        case = cases.masked_case(counts, m_max, 192, k, "cuda")
        assert case.index is not None
        expected = case.poisoned()
        grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, case.index, out=expected)
        a = experts_apart(case.a) if m_max == 1 else case.a
        before = jit.counters().scale_conversions
        out = apart(case.poisoned(), 8)
        scale = padded_scales(case.a_scale, 8)
        grouped_gemm_fp8_masked(a, scale, case.b, case.b_scale, case.index, out=out)
        _check(case, out, expected, before)


@pytest.mark.parametrize("m, n", [(1, 64), (5, 192), (300, 576)])
def test_ragged_k(m: int, n: int) -> None:
    case = k_grouped_case((256, 0, 128, 640), m, n, "cuda", before=128)
    operands = (
        apart(case.a, 48),
        padded_scales(case.a_scale, 20),
        apart(case.b, 16),
        padded_scales(case.b_scale, 252),
        case.offsets,
    )
    before = jit.counters().scale_conversions
    for c in (None, case.addend()):
        expected = k_grouped_gemm_fp8(*case.operands(), c=c)
        out = apart(case.poisoned() if c is None else c, 24)
        k_grouped_gemm_fp8(*operands, c=c if c is None else out, out=out)
        assert torch.equal(out, expected)
        assert behind(out).isnan().all(), "wrote between rows"
    assert jit.counters().scale_conversions == before


@pytest.mark.parametrize("m", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize(m: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, 512, device="cuda").to(dtype)
    last = x[-1:].expand(7, 512)
    for strided in (
        apart(x, 8),
        apart(x, 1000),
        last,
        last.contiguous().view(-1).as_strided((7, 512), (8, 1)),
    ):
        q, scale = quantize_fp8(strided)
        expected_q, expected_scale = quantize_fp8(strided.contiguous())
        assert q.is_contiguous()
        assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


def test_silu_mul_of_one_row_for_all_and_into_padded_scales() -> None:
    x = torch.randn(1, 1, 768, device="cuda").bfloat16().expand(3, 5, 768)
    masked_m = torch.tensor([2, 0, 5], dtype=torch.int32, device="cuda")
    q = torch.zeros(3, 5, 384, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.zeros(3, 5, 3, device="cuda")
    expected = q.clone(), padded_scales(scale, 0)
    silu_mul_quantize(x.contiguous(), masked_m=masked_m, out=expected)
    out = q, padded_scales(scale, 12)
    silu_mul_quantize(x, masked_m=masked_m, out=out)
    assert torch.equal(out[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(out[1], expected[1])


def _strided(case: cases.MqaCase) -> tuple[torch.Tensor, ...]:
    weights = apart(case.weights, 4)
    return apart(case.q, 32), apart(case.k, 16), case.k_scale, weights, case.ks, case.ke


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("whole", [0, 1 << 20])
def test_mqa(heads: int, dim: int, whole: int) -> None:
    """`whole`: of the kernel without terms, and of that with them."""
    case = cases.mqa_case(130, 1000, heads, "random", "cuda", dim=dim)
    expected, out = (torch.full((130, 1000), cases.SENTINEL, device="cuda") for _ in range(2))
    mqa_logits_chunk_op(*case.arguments(), False, False, expected, whole, whole)
    mqa_logits_chunk_op(*_strided(case), False, False, out, whole, whole)
    assert torch.equal(out, expected)
    cases.check_logits(out, cases.mqa_expected(case))


def test_mqa_of_one_query_and_of_one_key() -> None:
    for m, n in ((1, 700), (9, 1)):
        case = cases.mqa_case(m, n, 32, "causal", "cuda")
        expected = mqa_logits_fp8(*case.arguments(), fill=True)
        assert torch.equal(mqa_logits_fp8(*_strided(case), fill=True), expected)


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("heads", [16, 64])
def test_paged(heads: int, next_n: int) -> None:
    case = cases.paged_case([0, 3, 700, 256], next_n, heads, 64, "cuda", max_pages=20)
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=64, next_n=next_n)
    table = torch.nn.functional.pad(case.block_table, (0, 5))[:, :-5]
    assert not table.is_contiguous()
    got = []
    for q, weights, pages in (
        (case.q, case.weights, case.block_table),
        (apart(case.q, 16), apart(case.weights, 4), table),
    ):
        out = torch.full((4 * next_n, 704), cases.SENTINEL, device="cuda")
        paged_mqa_logits_fp8(
            q, case.kv_cache, weights, case.context_lens, pages, metadata, max_context_len=704, out=out
        )
        got.append(out)
    assert torch.equal(*got)
    cases.check_logits(got[1], cases.paged_expected(case, 704))


def test_requests_that_share_one_block_table() -> None:
    case = cases.paged_case([300], 1, 32, 64, "cuda")
    q = case.q.view(torch.uint8).repeat(3, 1, 1, 1).view(case.q.dtype)
    weights = case.weights.repeat(3, 1)
    lengths = torch.tensor([300, 7, 130], dtype=torch.int32, device="cuda")
    chosen = [
        paged_indexer_select(q, case.kv_cache, weights, lengths, table, topk=50, max_context_len=300)
        for table in (case.block_table.expand(3, -1), case.block_table.repeat(3, 1))
    ]
    assert torch.equal(*chosen)


def test_selection() -> None:
    case = cases.mqa_case(700, 9000, 64, "causal", "cuda")
    expected = indexer_select(*case.arguments(), topk=64)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    for given in (None, workspace):
        assert torch.equal(indexer_select(*_strided(case), topk=64, workspace=given), expected)


def test_topk_of_one_row_for_all() -> None:
    logits = torch.randn(1, 5000, device="cuda").expand(6, 5000)
    ke = torch.tensor([5000, 3, 0, 4000, 100, 2048], dtype=torch.int32, device="cuda")
    assert torch.equal(
        indexer_topk(logits, topk=64, ke=ke), indexer_topk(logits.contiguous(), topk=64, ke=ke)
    )
