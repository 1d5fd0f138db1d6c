"""Ops called from new threads: a thread without any CUDA call has no context of its own yet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moe_fp8
from tests import cases

pytestmark = pytest.mark.usefixtures("fresh_runtime")


@pytest.mark.parametrize("rows", [3, 130])
def test_a_gemm_in_a_new_thread(rows: int) -> None:
    # No earlier call has this shape, so the thread prepares the call, including its tensor maps.
    case = cases.dense_case(rows, 192, 512, "cuda")
    torch.cuda.synchronize()
    operands = case.a, case.a_scale, case.b, case.b_scale, case.poisoned()
    with torch.inference_mode(), ThreadPoolExecutor(1) as executor:
        cases.check_gemm(case, executor.submit(_gemm, *operands).result())


@pytest.mark.parametrize("rows", [3, 130])
def test_a_moved_gemm_in_a_new_thread(rows: int) -> None:
    case = cases.dense_case(rows, 192, 512, "cuda")
    expected = _gemm(case.a, case.a_scale, case.b, case.b_scale, case.poisoned())
    _gemm(case.a.clone(), case.a_scale, case.b, case.b_scale, case.poisoned())
    a, b, out = case.a.clone(), case.b.clone(), case.poisoned()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as executor:
        got = executor.submit(_gemm, a, case.a_scale, b, case.b_scale, out).result()
    assert torch.equal(got, expected)


def test_the_same_call_again_in_a_new_thread() -> None:
    case = cases.dense_case(16, 192, 512, "cuda")
    out = torch.empty(16, 192, device="cuda", dtype=torch.bfloat16)
    expected = _gemm(case.a, case.a_scale, case.b, case.b_scale, out).clone()
    out.zero_()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as executor:
        got = executor.submit(_gemm, case.a, case.a_scale, case.b, case.b_scale, out).result()
    assert torch.equal(got, expected)


def _gemm(*operands: torch.Tensor) -> torch.Tensor:
    *inputs, out = operands
    with torch.no_grad():
        result = moe_fp8.gemm_fp8(*inputs, out=out)
    torch.cuda.synchronize()
    return result


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_first_use_on_a_second_device_inside_a_capture() -> None:
    case = cases.dense_case(16, 192, 512, "cuda:0")
    operands = case.a, case.a_scale, case.b, case.b_scale
    expected = moe_fp8.gemm_fp8(*operands)
    on_second = [_on(tensor, "cuda:1") for tensor in operands]
    with torch.cuda.device(1):
        out = torch.empty(16, 192, device="cuda:1", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe_fp8.gemm_fp8(*on_second, out=out)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out.cpu(), expected.cpu())


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
