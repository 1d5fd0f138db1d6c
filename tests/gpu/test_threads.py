"""Ops called from new threads: a thread without any CUDA call has no context of its own yet."""

from __future__ import annotations

import subprocess
import sys
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


_TWO_DEVICES = """
import threading, torch, moe_fp8
from tests import cases

def first_use():
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda:1")
    used.set(); ready.wait()
    # torch has not made device 0 current yet, for it had no context.
    with torch.no_grad():
        got.append(moe_fp8.gemm_fp8(*operands, out=out))
    torch.cuda.synchronize(0)

used, ready, got = threading.Event(), threading.Event(), []
thread = threading.Thread(target=first_use)
thread.start(); used.wait()
case = cases.dense_case(16, 192, 512, "cuda:0")
operands = case.a, case.a_scale, case.b, case.b_scale
out = torch.empty(16, 192, device="cuda:0", dtype=torch.bfloat16)
with torch.no_grad():
    expected = moe_fp8.gemm_fp8(*operands, out=out).clone()
out.zero_()
torch.cuda.synchronize(0)
ready.set(); thread.join()
assert torch.equal(got[0], expected)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_that_has_used_only_the_second_device() -> None:
    done = subprocess.run([sys.executable, "-c", _TWO_DEVICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
