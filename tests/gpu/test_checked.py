"""Checked mode on a GPU: good calls pass, bad ones are located, and off it adds no launch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import ContractError
from moe_fp8.jit.driver import LoadedKernel
from moe_fp8.ops import registry
from tests import cases, checked_calls, graph_cases


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels of this package that are launched."""
    names: list[str] = []
    launch = LoadedKernel.launch

    def counted(self: LoadedKernel, *arguments: Any) -> None:
        names.append(self.name)
        launch(self, *arguments)

    monkeypatch.setattr(LoadedKernel, "launch", counted)
    return names


@pytest.mark.parametrize("name", graph_cases.CASES)
def test_off_it_adds_nothing(
    name: str, launches: list[str], checked_mode: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = graph_cases.CASES[name]
    checked_calls.past_the_dispatcher(monkeypatch)
    with checked_calls.ChecksCounter() as counter:
        case.call(case.inputs(0, "cuda"))
    assert (counter.count > 0) == (name not in checked_calls.WITHOUT_CONTENTS)
    with_checks = launches.copy()
    launches.clear()
    checked_calls.turn_off(monkeypatch)
    given = case.inputs(0, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with checked_calls.ChecksCounter() as counter:
            case.call(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counter.count == 0
    assert launches == with_checks


@pytest.mark.parametrize("m", [5, 64])
def test_off_a_call_is_one_launch_and_nothing_else(
    m: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases.dense_case(m, 192, 256, "cuda")
    operands = case.a, case.a_scale, case.b, case.b_scale, case.poisoned()
    checked_calls.turn_off(monkeypatch)
    calls = []

    class Everything(checked_calls.ChecksCounter):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Everything():
        for _ in range(3):
            registry.OPS["gemm_fp8"].run(*operands)
    assert (len(launches), calls) == (3, [])


@pytest.mark.parametrize("layout", ["m_indices", "psum", "offsets", "masked"])
def test_a_scale_that_is_nan_is_located(layout: str, checked_mode: Path) -> None:
    if layout == "masked":
        case = cases.masked_case((3, 0, 8), 8, 192, 256, "cuda")
    else:
        case = cases.contiguous_case(layout, (3, 0, 130), 192, 256, "cuda", total=600)
    expert, _, end = case.runs[-1]
    assert case.index is not None
    operands = case.a, case.a_scale, case.b, case.b_scale

    def call() -> None:
        if layout == "masked":
            moe_fp8.grouped_gemm_fp8_masked(*operands, case.index)
        else:
            moe_fp8.grouped_gemm_fp8_contiguous(*operands, **{layout: case.index})

    call()  # padding rows hold NaN
    case.a_scale[(expert, end - 1, 1) if layout == "masked" else (end - 1, 1)] = float("nan")
    with pytest.raises(ContractError, match=f"row {end - 1} of expert {expert}") as caught:
        call()
    assert (caught.value.expert, caught.value.row) == (expert, end - 1)
    (file,) = checked_mode.iterdir()
    content = json.loads(file.read_text())
    assert content["arguments"]["a_scale"]["device"] == str(case.a.device)
    assert content["kernel"]["spec"].startswith("gemm_fp8") and content["kernel"]["grid"] > 0
    assert len(content["kernel"]["key"]) >= 16
    assert content["versions"]["gpu"] == torch.cuda.get_device_name()


def test_scales_that_are_written_through_a_copy(checked_mode: Path) -> None:
    """The file names the kernel that writes the copy."""
    x, scale = moe_fp8.quantize_fp8(torch.randn(9, 256, device="cuda"))
    ids = torch.zeros(9, 2, dtype=torch.int32, device="cuda")
    out = moe_fp8.moe_permute(x, ids, num_experts=4, x_scale=scale)
    scale[4, 1] = float("inf")
    out = out._replace(a_scale=out.a_scale.contiguous())
    with pytest.raises(ContractError, match="token 4"):
        moe_fp8.moe_permute(x, ids, num_experts=4, x_scale=scale, out=out)
    (file,) = checked_mode.iterdir()
    assert json.loads(file.read_text())["kernel"]["spec"].startswith("moe_permute")


def test_a_cached_scale_and_a_schedule_of_fewer_requests(checked_mode: Path) -> None:
    case = cases.paged_case([3, 0, 200], 2, 16, 64, "cuda")
    operands = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    metadata = moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64, next_n=2)
    moe_fp8.paged_mqa_logits_fp8(*operands, metadata, max_context_len=200)
    fewer = moe_fp8.paged_mqa_logits_metadata(case.context_lens[:2], block_size=64, next_n=2)
    with pytest.raises(ContractError, match="metadata"):
        moe_fp8.paged_mqa_logits_fp8(*operands, fewer, max_context_len=200)
    page = int(case.block_table[2, 3])
    scales = case.kv_cache.as_strided((256,), (1,), page * case.kv_cache.stride(0) + 64 * 128)
    scales.view(torch.float32)[7] = float("nan")
    with pytest.raises(ContractError, match="position 199 of request 2"):
        moe_fp8.paged_indexer_select(*operands, topk=20, max_context_len=200)


def test_a_capture_is_not_checked_and_says_so_once(
    checked_mode: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry._say_unchecked.cache_clear()
    case = cases.dense_case(5, 192, 256, "cuda")
    operands = case.a, case.a_scale, case.b, case.b_scale
    moe_fp8.gemm_fp8(*operands)
    case.a_scale[2, 0] = float("nan")
    with caplog.at_level(logging.WARNING), torch.cuda.graph(torch.cuda.CUDAGraph()):
        moe_fp8.gemm_fp8(*operands)
        moe_fp8.gemm_fp8(*operands)
    assert [each.message for each in caplog.records].count(
        "MOE_FP8_CHECKED=1: contents are not checked while a stream is captured, nor when its graph is "
        "replayed; run the same calls without a graph to check them"
    ) == 1
    with pytest.raises(ContractError, match="row 2"):
        moe_fp8.gemm_fp8(*operands)
