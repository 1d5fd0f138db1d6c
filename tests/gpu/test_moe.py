"""The ops around the experts, and whole layers, on the GPU."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import (
    grouped_gemm_fp8_contiguous,
    grouped_gemm_silu_mul_fp8,
    moe_combine,
    moe_permute,
    silu_mul_quantize,
)
from tests import moe_cases


@pytest.mark.parametrize("case", moe_cases.CASES.values(), ids=moe_cases.CASES)
def test_rows_and_sums(case: moe_cases.Case) -> None:
    moe_cases.check(case, "cuda")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [128, 768])
@pytest.mark.parametrize("name", moe_cases.LAYERS)
def test_layer(name: str, width: int, interleaved: bool) -> None:
    moe_cases.check_layer(name, "cuda", width, interleaved)


@pytest.mark.sanitizer
@pytest.mark.parametrize("interleaved", [False, True])
def test_small_layer(interleaved: bool) -> None:
    moe_cases.check_layer("missing ids", "cuda", interleaved=interleaved)


@pytest.mark.parametrize("expected_m", [None, 1, 200])
@pytest.mark.parametrize("pitch", [0, 64, 1])
def test_the_fused_gemm_is_the_two_ops(pitch: int, expected_m: int | None) -> None:
    """`pitch`: elements by which the groups of scales lie further apart than usual; 1: another layout."""
    layer = moe_cases.Layer(moe_cases.Case(130, 4, 8, 512), 256, "cuda", interleaved=True)
    x, ids, _ = layer.inputs()
    a, a_scale, offsets, _ = moe_permute(x, ids, num_experts=8)
    rows, options = a.shape[0], {"limit": 2.0, "power_of_two": True}
    y = grouped_gemm_fp8_contiguous(a, a_scale, layer.w13, layer.w13_scale, offsets=offsets)
    expected, expected_scale = silu_mul_quantize(y, rounded=True, **options)
    q = torch.zeros(rows, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scale = torch.zeros(2, rows + pitch, device="cuda").t()[:rows]
    if pitch == 1:
        scale = torch.zeros(rows, 2, device="cuda")
    weights = layer.given_w13, layer.w13_scale
    got = grouped_gemm_silu_mul_fp8(
        a, a_scale, *weights, offsets=offsets, expected_m=expected_m, rounded=True, out=(q, scale), **options
    )
    count = int(offsets[-1])
    assert torch.equal(got[0].view(torch.uint8)[:count], expected.view(torch.uint8)[:count])
    assert torch.equal(got[1][:count], expected_scale[:count])


@pytest.mark.parametrize("interleaved", [False, True])
def test_launches_of_a_layer(interleaved: bool) -> None:
    layer = moe_cases.Layer(moe_cases.Case(48, 8, 64, 512), 256, "cuda", interleaved=interleaved)
    given, workspace = layer.inputs(), layer.workspace()
    out = torch.empty_like(given[0])
    layer.fused(*given, workspace=workspace, out=out)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        layer.fused(*given, workspace=workspace, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    first = ["gemm_silu_mul_fp8"] if interleaved else ["gemm_fp8", "silu_mul_quantize"]
    expected = ["moe_permute", *first, "gemm_fp8", "moe_combine"]
    assert sorted(kernels) == sorted(expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_layer_in_a_graph_reads_new_ids(interleaved: bool) -> None:
    layer = moe_cases.Layer(*moe_cases.LAYERS["decode"][:1], 256, "cuda", interleaved=interleaved)
    given, workspace = layer.inputs(), layer.workspace()
    layer.fused(*given, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.fused(*given, workspace=workspace)
    for seed in range(40):
        for old, new in zip(given, layer.inputs(seed), strict=True):
            old.copy_(new)
        # The workspace holds the offsets of other ids, or numbers that could be offsets, or neither.
        if seed % 3:
            workspace.fill_((0x01, 0x7F)[seed % 3 - 1])
        graph.replay()
        assert torch.equal(captured, layer.by_ops(*given))


@pytest.mark.sanitizer
@pytest.mark.parametrize("fp8", [False, True])
def test_small(fp8: bool) -> None:
    moe_cases.check(moe_cases.Case(5, 3, 7, 256, ranks=2, fp8=fp8, missing=0.2), "cuda")


def test_no_tokens() -> None:
    x = torch.empty(0, 256, device="cuda", dtype=torch.bfloat16)
    permuted = moe_permute(x, torch.empty(0, 8, dtype=torch.int32, device="cuda"), num_experts=4)
    assert permuted.offsets.tolist() == [0] * 5
    assert moe_combine(x, permuted.rows).shape == (0, 256)
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cuda")
    tokens, ids, weights = layer.inputs()
    assert layer.fused(tokens[:0], ids[:0], weights[:0]).shape == (0, 256)


@pytest.mark.sanitizer
def test_rows_that_do_not_exist_are_left_out() -> None:
    y = torch.ones(2, 256, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([[0, 2], [-7, 2**31 - 1], [1, 0]], device="cuda", dtype=torch.int32)
    assert moe_combine(y, rows)[:, 0].tolist() == [1, 0, 2]
    assert (moe_combine(y[:0], rows) == 0).all()


def test_replay_reads_new_ids() -> None:
    case = moe_cases.Case(48, 8, 64, 512)
    x, ids = case.hidden().cuda(), case.ids().cuda()
    weights = torch.rand(48, 8, device="cuda")

    def layer() -> torch.Tensor:
        permuted = moe_permute(x, ids, num_experts=64)
        return moe_combine(permuted.a.to(torch.bfloat16), permuted.rows, weights)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in range(3):
        ids.copy_(case.ids(seed))
        x.copy_(case.hidden(seed))
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, layer())


def test_scales_of_another_layout_are_written_too() -> None:
    case = moe_cases.Case(9, 2, 4, 256)
    x, ids = case.hidden().cuda(), case.ids().cuda()
    expected = moe_permute(x, ids, num_experts=4)
    out = expected._replace(a_scale=torch.zeros(18, 2, device="cuda"))
    moe_permute(x, ids, num_experts=4, out=out)
    assert torch.equal(out.a_scale, expected.a_scale)


def test_results_repeat() -> None:
    case = moe_cases.CASES["decode"]
    x, ids = case.hidden().cuda(), case.ids().cuda()
    first = moe_permute(x, ids, num_experts=case.experts)
    for _ in range(20):
        again = moe_permute(x, ids, num_experts=case.experts)
        assert torch.equal(again.rows, first.rows)
        assert torch.equal(again.a.view(torch.uint8), first.a.view(torch.uint8))
        assert torch.equal(again.a_scale, first.a_scale)
