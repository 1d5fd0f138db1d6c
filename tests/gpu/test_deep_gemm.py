"""The module in the place of `deep_gemm` on the GPU, at the sizes that engines and DeepGEMM's users have."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import integrations
from tests import cases
from tests.gemm_addend_cases import addend, check_sum, named_case
from tests.k_grouped_cases import check, flat_operands, k_grouped_case

WEIGHTS = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]


@pytest.fixture
def deep_gemm() -> Iterator[ModuleType]:
    yield integrations.install()
    integrations.uninstall()
    moe_fp8.set_num_sms(None)


@pytest.mark.parametrize("n, k", WEIGHTS)
@pytest.mark.parametrize("m", [1, 64, 128, 4096])
def test_dense(m: int, n: int, k: int, deep_gemm: ModuleType) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    # Row-major scales cost one conversion.
    for scale in (case.a_scale, case.a_scale.contiguous()):
        out = case.poisoned()
        deep_gemm.fp8_gemm_nt((case.a, scale), (case.b, case.b_scale), out, disable_ue8m0_cast=True)
        cases.check_gemm(case, out)


def test_dense_accumulates_in_place(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(100, 2112, 1536, "cuda")
    out = torch.randn(100, 2112, device="cuda")
    before = out.clone()
    deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), out, c=out)
    cases.check_gemm(case, out - before)


@pytest.mark.parametrize("m, n, k", [(100, 2112, 1536), (1536, 2048, 4096)])
def test_dense_with_scales_of_rows(m: int, n: int, k: int, deep_gemm: ModuleType) -> None:
    case = named_case("dense of rows", (m,), n, k, "cuda")
    out = addend(case)
    before = out.clone()
    operands = (case.a, case.a_scale), (case.b, case.b_scale)
    deep_gemm.fp8_gemm_nt(*operands, out, c=out, recipe=(1, 1, 128))
    check_sum(case, out, before)
    deep_gemm.fp8_gemm_nt(*operands, out, recipe_a=(1, 128), recipe_b=(1, 128))
    cases.check_gemm(case, out)


@pytest.mark.parametrize("m, n", [(768, 2048), (130, 192)])
@pytest.mark.parametrize("in_place", [False, True])
def test_ragged_k(in_place: bool, m: int, n: int, deep_gemm: ModuleType) -> None:
    sizes = [256, 0, 128, 4096, 0, 1408]
    case = k_grouped_case(sizes, m, n, "cuda")
    a, b = flat_operands(case)
    c = case.addend()
    out = c.clone() if in_place else case.poisoned()
    on_device = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, sizes, on_device, out if in_place else c)
    check(case, out, c)


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
@pytest.mark.parametrize("experts, rows", [(4, 1024), (8, 300), (32, 17), (256, 2)])
def test_contiguous(experts: int, rows: int, layout: str, deep_gemm: ModuleType) -> None:
    counts = [(rows * (e % 5)) // 2 for e in range(experts)]
    case = cases.contiguous_case(layout, counts, 4096, 2048, "cuda")
    out = case.poisoned()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (case.a, case.a_scale), (case.b, case.b_scale), out, case.index, use_psum_layout=layout == "psum"
    )
    cases.check_gemm(case, out)


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
def test_zero_padding_on_request(layout: str, deep_gemm: ModuleType) -> None:
    case = cases.contiguous_case(layout, (3, 0, 700, 129, 1), 4096, 2048, "cuda")
    operands = (case.a, case.a_scale), (case.b, case.b_scale)
    expected, out = case.poisoned(), case.poisoned()
    psum = layout == "psum"
    # The padding of a holds NaN.
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, expected, case.index, use_psum_layout=psum)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        *operands, out, case.index, use_psum_layout=psum, ensure_zero_padding=True
    )
    assert expected.isnan().any()
    assert torch.equal(out, expected.nan_to_num(0))


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
@pytest.mark.parametrize("alignment", [16, 64, 256])
def test_contiguous_with_another_alignment(alignment: int, layout: str, deep_gemm: ModuleType) -> None:
    counts = [3, 0, 70, 1, 129]
    ends, index = cases.segments_of(counts, alignment)
    rows = len(index)
    gen = cases.generator(3, "cuda")
    a, a_scale = cases.activations(rows, 1024, gen)
    b, b_scale = cases.weights(len(counts), 512, 1024, gen)
    own = torch.tensor(index, device="cuda") == torch.arange(len(counts), device="cuda")[:, None]
    a.view(torch.uint8)[~own.any(0)] = 0x7F
    out = torch.full((rows, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    given = torch.tensor(ends if layout == "psum" else index, dtype=torch.int32, device="cuda")
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (b, b_scale), out, given, use_psum_layout=layout == "psum"
        )
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    for expert in range(len(counts)):
        rows_of = own[expert]
        expected = moe_fp8.gemm_fp8(a[rows_of], a_scale[rows_of], b[expert], b_scale[expert])
        assert cases.relative_error(out[rows_of], expected) < 3e-3 or not rows_of.any()


@pytest.mark.parametrize("experts, rows", [(1, 1024), (4, 256), (32, 16)])
def test_masked(experts: int, rows: int, deep_gemm: ModuleType) -> None:
    counts = [(rows * (e % 3)) // 2 for e in range(experts)]
    case = cases.masked_case(counts, rows, 4096, 2048, "cuda")
    out = case.poisoned()
    operands = (case.a, case.a_scale), (case.b, case.b_scale)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(*operands, out, case.index, rows)
    cases.check_gemm(case, out)


@pytest.mark.parametrize("heads", [32, 64])
def test_logits_repeat_in_every_spelling(heads: int, deep_gemm: ModuleType) -> None:
    case = cases.mqa_case(300, 4096, heads, device="cuda")
    q, k, k_scale, weights, ks, ke = case.arguments()
    width = int((ke - ks).max())
    calls: list[Any] = [
        lambda: deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke),
        lambda: deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, True),
    ]
    first = calls[0]()
    for _ in range(10):
        assert all(torch.equal(call(), first) for call in calls)
    compressed = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, width)
    columns = torch.arange(width, device="cuda")
    inside = columns < (ke - ks)[:, None]
    at = (ks[:, None] + columns).clamp(max=first.shape[1] - 1).long()
    torch.testing.assert_close(compressed[inside], first.gather(1, at)[inside], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [32, 64])
def test_compressed_logits_by_keyword(
    heads: int, dim: int, dtype: torch.dtype, deep_gemm: ModuleType
) -> None:
    case = cases.mqa_case(257, 4096, heads, dim=dim, device="cuda")
    q, k, k_scale, weights, ks, ke = case.arguments()
    named = {"max_seqlen_k": int((ke - ks).max()), "logits_dtype": dtype}
    outside = torch.arange(named["max_seqlen_k"], device="cuda") >= (ke - ks)[:, None]
    cleaned = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, True, **named)
    assert cleaned.dtype is dtype and torch.equal(cleaned == float("-inf"), outside)
    made = [
        deep_gemm.fp8_fp4_mqa_logits(
            q=(q, None), kv=(k, k_scale), weights=weights, cu_seq_len_k_start=ks, cu_seq_len_k_end=ke, **named
        )[~outside]
        for _ in range(21)
    ]
    assert all(torch.equal(logits, made[0]) for logits in made)
    torch.testing.assert_close(made[0], cleaned[~outside], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(4096, 1), (4097, 56), (8192, 57), (2, 4096, 1), (4, 4097, 57)])
def test_scales_get_exact_strides(shape: tuple[int, ...], deep_gemm: ModuleType) -> None:
    rows, groups = shape[-2:]
    pitch = -(-rows // 4) * 4
    expected = (1, pitch) if len(shape) == 2 else (pitch * groups, 1, pitch)
    scale = torch.rand(shape, device="cuda")
    for given in (scale, scale.mT.contiguous().mT):
        made = deep_gemm.utils.get_mn_major_tma_aligned_tensor(given)
        assert made.stride() == expected and torch.equal(made, scale)


@pytest.mark.parametrize("next_n, slots", [(1, 132), (2, 132), (4, 66)])
@pytest.mark.parametrize("batch", [32, 1024])
def test_a_schedule_of_empty_requests(batch: int, next_n: int, slots: int, deep_gemm: ModuleType) -> None:
    lens = torch.zeros(batch, next_n, dtype=torch.int32, device="cuda")
    end = torch.tensor([batch, 0], dtype=torch.int32, device="cuda")
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, slots)
    assert torch.equal(schedule, end.expand(slots + 1, 2))
    lens[::2] = 512
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, slots)
    assert (schedule[:, 0] <= batch).all() and torch.equal(schedule[-1], end)


@pytest.mark.parametrize("next_n, slots", [(1, 132), (2, 132), (4, 66)])
def test_paged_logits(next_n: int, slots: int, deep_gemm: ModuleType) -> None:
    lengths = [[max(0, length - next_n + 1 + t) for t in range(next_n)] for length in (3000, 0, 70, 1)]
    case = cases.paged_case(lengths, next_n, 64, 64, device="cuda", page_padding=64)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(case.context_lens, 64, slots)
    assert metadata.shape == (slots + 1, 2)
    logits = deep_gemm.fp8_paged_mqa_logits(
        case.q, case.kv_cache, case.weights, case.context_lens, case.block_table, metadata, 3072,
        clean_logits=True,
    )  # fmt: skip
    expected = cases.paged_expected(case, 3072, float("-inf"))
    cases.check_logits(logits, expected, float("-inf"))


def test_fewer_sms_give_the_same_result(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(500, 4096, 2048, "cuda")
    results = []
    for num_sms in (132, 78, 131, 132):
        deep_gemm.set_num_sms(num_sms)
        assert deep_gemm.get_num_sms() == num_sms
        out = case.poisoned()
        deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), out)
        cases.check_gemm(case, out)
        results.append(out)
    assert torch.equal(results[0], results[3])


def test_compile_mode_launches_nothing(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(33, 192, 384, "cuda")
    out = case.poisoned()
    deep_gemm.set_compile_mode(1)
    try:
        deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), out)
        torch.cuda.synchronize()
        assert out.isnan().all()
    finally:
        deep_gemm.set_compile_mode(0)
    deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), out)
    cases.check_gemm(case, out)
