"""The engines' own thin wrappers, executed from their sources, reach our ops and give their results."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import integrations
from moe_fp8.integrations import vllm as plug_in
from tests import cases
from tests.engines import sglang_layers, vllm_layers
from tests.engines.layers import EngineLayers
from tests.engines.sources import ENGINES, Engine, skipped

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

VLLM = [engine for engine in ENGINES if engine.package == "vllm"]
(SGLANG,) = (engine for engine in ENGINES if engine.package == "sglang")


@pytest.fixture
def installed() -> Iterator[ModuleType]:
    yield integrations.install()
    integrations.uninstall()


@pytest.fixture(params=VLLM, ids=lambda engine: engine.name)
def vllm(
    request: pytest.FixtureRequest, installed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """vLLM's module in front of `deep_gemm`."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "unused")
    quant = "vllm.model_executor.layers.quantization.utils.quant_utils"
    provided = {f"{quant}.get_fp8_min_max": lambda: (-448.0, 448.0), **vllm_layers.wrapper_stand_ins()}
    real = (vllm_layers.WRAPPERS, "vllm.utils.math_utils")
    layers = EngineLayers(request.param, real, provided, absent=vllm_layers.ABSENT)
    with layers.active():
        made = layers.module(vllm_layers.WRAPPERS)
        made._lazy_init()
        assert made._import_deep_gemm() is installed
        yield made


def test_vllms_gemms(vllm: Any, installed: ModuleType) -> None:
    assert vllm.is_deep_gemm_supported() and vllm.is_deep_gemm_e8m0_used() and installed.get_pdl()
    dense = cases.dense_case(5, 192, 256)
    out = dense.poisoned()
    vllm.fp8_gemm_nt((dense.a, dense.a_scale), (dense.b, dense.b_scale), out, is_deep_gemm_e8m0_used=True)
    cases.check_gemm(dense, out)
    layouts = ("m_indices", "psum") if "0.33" in str(vllm.__file__) else ("m_indices",)
    for layout in layouts:
        case = cases.contiguous_case(layout, (3, 0, 70), 128, 256)
        named = {"use_psum_layout": True} if layout == "psum" else {}
        out = case.poisoned()
        with vllm.mk_alignment_scope(vllm.get_mk_alignment_for_contiguous_layout()[0]):
            vllm.m_grouped_fp8_gemm_nt_contiguous(
                (case.a, case.a_scale.contiguous()), (case.b, case.b_scale), out, case.index, **named
            )
        cases.check_gemm(case, out)
    masked = cases.masked_case((3, 0, 9), 16, 128, 256)
    out = masked.poisoned()
    operands = (masked.a, masked.a_scale), (masked.b, masked.b_scale)
    vllm.fp8_m_grouped_gemm_nt_masked(*operands, out, masked.index, 16)
    cases.check_gemm(masked, out)


def test_vllms_layouts(vllm: Any) -> None:
    assert vllm.get_mk_alignment_for_contiguous_layout() == [128, 128]
    assert vllm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=512, num_groups=128) == 128
    assert vllm.get_col_major_tma_aligned_tensor(torch.ones(5, 3)).stride() == (1, 8)
    blocks = torch.ones(4, 2, 3)
    made = vllm.transform_sf_into_required_layout(
        sf=blocks, mn=256, k=384, recipe=(1, 128, 128), num_groups=4, is_sfa=False
    )
    assert made is blocks


def test_vllms_indexer(vllm: Any) -> None:
    case = cases.mqa_case(6, 40, 32)
    q, k, k_scale, weights, ks, ke = case.arguments()
    full = moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, fill=True)
    if "0.33" in str(vllm.__file__):
        width = int((ke - ks).max())
        logits = vllm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, width)
        starts = torch.zeros_like(ks)
    else:
        logits = vllm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=False)
        starts = ks
    for row in range(6):
        own = full[row, ks[row] : ke[row]]
        assert torch.equal(logits[row, starts[row] :][: len(own)], own)
    paged = cases.paged_case([[3], [0], [130]], 1, 32, 64)
    metadata = vllm.get_paged_mqa_logits_metadata(paged.context_lens, 64, 132)
    named = {} if "0.33" in str(vllm.__file__) else {"clean_logits": False}
    logits = vllm.fp8_fp4_paged_mqa_logits(
        (paged.q, None), paged.kv_cache, paged.weights, paged.context_lens, paged.block_table, metadata,
        max_model_len=192, **named,
    )  # fmt: skip
    expected = cases.paged_expected(paged, 192)
    written = expected != cases.SENTINEL
    torch.testing.assert_close(logits[written].double(), expected[written], rtol=1e-4, atol=1e-4)


def test_vllms_schedules_have_a_task_for_each_sm(vllm: Any) -> None:
    def tasks(next_n: int) -> int:
        lens = torch.full((64, next_n), 4096, dtype=torch.int32)
        return len(vllm.get_paged_mqa_logits_metadata(lens, 64, 132)) - 1

    before = [tasks(next_n) for next_n in (1, 2, 4)]
    assert before == ([132, 132, 66] if "0.33" in str(vllm.__file__) else [132] * 3)
    plug_in._schedule_for_all_sms()
    assert [tasks(next_n) for next_n in (1, 2, 4)] == [132] * 3
    plug_in.deactivate()
    assert [tasks(next_n) for next_n in (1, 2, 4)] == before


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
def test_vllm_compiles_a_model_for_each_choice_of_kinds(engine: Engine) -> None:
    """What names a compiled model changes with the kinds and with our version, and comes back."""
    layers = EngineLayers(engine, ("vllm.envs",), {"vllm.config.utils.normalize_value": str})
    with layers.active():
        factors = layers.module("vllm.envs").compile_factors
        before = factors()
        seen = [before]
        for kinds in (("dense",), ("dense", "indexer")):
            plug_in._separate_compiled_models(kinds)
            assert factors()["MOE_FP8_ENGINE"] == f"{','.join(kinds)} {moe_fp8.__version__}"
            assert factors() not in seen
            seen.append(factors())
            plug_in.deactivate()
        assert factors() == before


@pytest.fixture
def sglang(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's module in front of `deep_gemm`."""
    layers = EngineLayers(SGLANG, sglang_layers.WRAPPERS, sglang_layers.wrapper_stand_ins())
    with layers.active():
        made = layers.module(sglang_layers.ENTRYPOINT)
        monkeypatch.setattr(made, "_ensure_cuda", lambda pair: pair)
        yield made


def test_sglangs_gemms(sglang: Any) -> None:
    dense = cases.dense_case(5, 192, 256)
    out = dense.poisoned()
    sglang.gemm_nt_f8f8bf16((dense.a, dense.a_scale), (dense.b, dense.b_scale), out)
    cases.check_gemm(dense, out)
    case = cases.contiguous_case("m_indices", (3, 0, 70), 128, 256)
    out = case.poisoned()
    alignment = sglang.get_contiguous_layout_alignment(73, 3)
    assert alignment == 128
    with sglang.contiguous_layout_alignment_scope(alignment):
        operands = (case.a, case.a_scale), (case.b, case.b_scale)
        sglang.grouped_gemm_nt_f8f8bf16_contig(*operands, out, case.index)
    cases.check_gemm(case, out)
    masked = cases.masked_case((3, 0, 9), 16, 128, 256)
    out = masked.poisoned()
    operands = (masked.a, masked.a_scale), (masked.b, masked.b_scale)
    sglang.grouped_gemm_nt_f8f8bf16_masked(*operands, out, masked.index, 4)
    cases.check_gemm(masked, out)


def test_sglangs_scales(sglang: Any) -> None:
    scale = sglang.get_mn_major_tma_aligned_tensor(torch.ones(5, 3))
    assert scale.stride() == (1, 8) and sglang.get_mn_major_tma_aligned_tensor(scale) is scale
