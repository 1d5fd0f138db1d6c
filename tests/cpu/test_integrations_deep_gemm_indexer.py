"""The functions of the indexer in the module in the place of `deep_gemm`, in every spelling."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import moe_fp8
from moe_fp8.errors import ArgumentError, UnsupportedError
from moe_fp8.integrations.deep_gemm import indexer
from tests import cases


def test_logits_in_every_spelling(deep_gemm: ModuleType) -> None:
    case = cases.mqa_case(6, 40, 32)
    q, k, k_scale, weights, ks, ke = case.arguments()
    outside = (torch.arange(40) < ks[:, None]) | (torch.arange(40) >= ke[:, None])
    full = moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, fill=True)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke), full)
    cleaned = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=True)
    assert torch.equal(cleaned, full)
    plain = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=False)
    assert torch.equal(plain[~outside], full[~outside])
    # vLLM 0.33 passes a width in the sixth place.
    width = int((ke - ks).max())
    compressed = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, width)
    assert compressed.shape == (6, width) and compressed.dtype is torch.float32
    # SGLang's top-k needs rows whose distance is a multiple of 4; DeepGEMM's is one of 256.
    assert full.stride() == (40, 1) and plain.stride() == compressed.stride() == (256, 1)
    for row in range(6):
        own = full[row, ks[row] : ke[row]]
        assert torch.equal(compressed[row, : len(own)], own)
    # By keyword too, compressed rows are not cleaned unless the caller asks for it.
    named = {"max_seqlen_k": width}
    marked = moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, max_seqlen_k=width, fill=True)
    cleaned = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, True, **named)
    assert torch.equal(cleaned, marked)
    plain = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, **named)
    inside = torch.arange(width) < (ke - ks)[:, None]
    assert torch.equal(plain[inside], marked[inside])
    with pytest.raises(UnsupportedError, match="queries with scales"):
        deep_gemm.fp8_fp4_mqa_logits((q, weights), (k, k_scale), weights, ks, ke, width)


@pytest.mark.parametrize(
    ("options", "fill"),
    [
        ({}, True),
        ({"max_seqlen_k": 9}, False),
        ({"clean_logits": 9}, False),
        ({"clean_logits": True, "max_seqlen_k": 9}, True),
    ],
)
def test_compressed_rows_are_filled_only_if_asked(
    options: dict[str, Any], fill: bool, deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = importlib.import_module("moe_fp8.integrations.deep_gemm.indexer"), []
    monkeypatch.setattr(module, "mqa_logits_fp8", lambda *_, **named: given.append(named["fill"]))
    q, k, k_scale, *others = cases.mqa_case(4, 9, 8).arguments()
    deep_gemm.fp8_mqa_logits(q, (k, k_scale), *others, **options)
    assert given == [fill]


@pytest.mark.parametrize(
    "spellings",
    [
        ("fp8_mqa_logits", "fp8_fp4_mqa_logits"),
        ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"),
        (
            "m_grouped_fp8_gemm_nt_masked",
            "m_grouped_fp8_fp4_gemm_nt_masked",
            "fp8_m_grouped_gemm_nt_masked",
        ),
    ],
)
def test_the_copy_is_called_by_the_name_that_was_called(
    spellings: tuple[str, ...], copy: ModuleType, deep_gemm: ModuleType
) -> None:
    vars(copy).update({name: lambda *given, name=name, **named: name for name in spellings})
    masked = "masked" in spellings[0]
    operand = torch.zeros(1), torch.zeros(1)
    tensors = [torch.zeros(1)] * (1 if masked else 5)
    # FP4 for the GEMM, and queries with scales for the logits.
    given = (operand, operand, *tensors, tensors[0], 1) if masked else (operand, *tensors, 8)
    for name in spellings:
        assert getattr(deep_gemm, name)(*given) == name
    for name in spellings[1:]:
        delattr(copy, name)
        assert getattr(deep_gemm, name)(*given) == spellings[0]
    delattr(copy, spellings[0])
    with pytest.raises(UnsupportedError, match=f"^{spellings[1]}: "):
        getattr(deep_gemm, spellings[1])(*given)


def test_rows_of_different_requests_reach_the_copy(copy: ModuleType, deep_gemm: ModuleType) -> None:
    """DeepGEMM 2.8 has `indices` in the place of `clean_logits`."""
    copy.fp8_fp4_paged_mqa_logits = lambda *given: given[-1]  # type: ignore[attr-defined]
    case = cases.paged_case([3, 0, 130], 1, 32, 64)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(case.context_lens, 64, 132)
    given = (case.q, None), case.kv_cache, case.weights, case.context_lens, case.block_table, metadata, 192
    indices = torch.tensor([0, 1, 1], dtype=torch.int32)
    assert deep_gemm.fp8_fp4_paged_mqa_logits(*given, indices) is indices
    assert deep_gemm.fp8_fp4_paged_mqa_logits(*given, None).shape == (3, 192)


def test_schedules_of_more_than_eight_tokens_come_from_the_copy(
    copy: ModuleType, deep_gemm: ModuleType
) -> None:
    lens = torch.full((3, 9), 70, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="more than 8 tokens"):
        deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    copy.get_paged_mqa_logits_metadata = lambda *given: given  # type: ignore[attr-defined]
    assert deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132) == (lens, 64, 132)
    assert deep_gemm.get_paged_mqa_logits_metadata(lens[:, :8], 64, 132).shape == (133, 2)


def test_the_copy_may_have_the_newer_spelling_alone(copy: ModuleType, deep_gemm: ModuleType) -> None:
    case = cases.mqa_case(6, 40, 32)
    q, k, k_scale, weights, ks, ke = case.arguments()
    copy.fp8_fp4_mqa_logits = copy.fp8_mqa_logits  # type: ignore[attr-defined]
    del copy.fp8_mqa_logits
    deep_gemm.fp8_fp4_mqa_logits((q, weights), (k, k_scale), weights, ks, ke, 8)
    assert len(copy.calls) == 1 and copy.calls[0][1][-1] == 8


def test_paged_logits(deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.paged_case([3, 0, 130], 2, 32, 64)
    lens = case.context_lens
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    assert metadata.shape == (133, 2)
    columns = 192
    given: tuple[Any, ...] = (case.kv_cache, case.weights, lens, case.block_table, metadata, columns)
    expected = moe_fp8.paged_mqa_logits_fp8(
        case.q, case.kv_cache, case.weights, lens, case.block_table, metadata, max_context_len=columns,
        out=torch.full((6, columns), float("-inf")),
    )  # fmt: skip
    cleaned = deep_gemm.fp8_paged_mqa_logits(case.q, *given, clean_logits=True)
    assert torch.equal(cleaned, expected)
    for width in (np.int32(columns), torch.tensor(columns, dtype=torch.int32)):
        again = deep_gemm.fp8_paged_mqa_logits(case.q, *given[:-1], width, clean_logits=True)
        assert torch.equal(again, cleaned) and again.stride() == cleaned.stride()
    written = expected > float("-inf")
    # Without the option, no further kernel writes what the logits' kernel does not write.
    with monkeypatch.context() as patch:
        patch.setattr(indexer, "_rows", lambda *_: torch.zeros(6, 256)[:, :columns])
        plain = deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *given)
    assert torch.equal(plain[written], expected[written]) and not plain[~written].any()
    spaced = torch.stack([lens, lens], -1)[..., 0]
    given = case.kv_cache, case.weights, spaced, case.block_table, metadata, columns
    assert torch.equal(deep_gemm.fp8_paged_mqa_logits(case.q, *given, True), expected)
    for wrong in ((*given[:-1], -512), (*given, False, torch.float16)):
        with pytest.raises(ArgumentError):
            deep_gemm.fp8_paged_mqa_logits(case.q, *wrong)
    for call in (
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *given, indices=lens),
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *given, lens),
        lambda: deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132, indices=lens),
    ):
        with pytest.raises(UnsupportedError, match="indices"):
            call()
