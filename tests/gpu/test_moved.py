"""Calls that differ from an earlier call only in addresses read and write their own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8.jit import tensor_map
from moe_fp8.ops import registry
from tests import cases, moe_cases

pytestmark = pytest.mark.usefixtures("fresh_runtime")

#: Tensors that a call reads, and the call, which allocates its output.
Case = tuple[tuple[Tensor, ...], Callable[..., Tensor]]


def _dense(rows: int) -> Case:
    case = cases.dense_case(rows, 192, 512, "cuda")
    return (case.a, case.a_scale, case.b, case.b_scale), moe_fp8.gemm_fp8


def _masked() -> Case:
    case = cases.masked_case([5, 0, 130, 64], 160, 192, 512, "cuda")
    assert case.index is not None
    index = case.index

    def run(*tensors: Tensor) -> Tensor:
        out = torch.zeros(4, 160, 192, device="cuda", dtype=torch.bfloat16)
        return moe_fp8.grouped_gemm_fp8_masked(*tensors, out=out)

    return (case.a, case.a_scale, case.b, case.b_scale, index), run


def _logits() -> Case:
    case = cases.mqa_case(33, 130, 64, "random", "cuda")
    return case.arguments(), lambda *tensors: moe_fp8.mqa_logits_fp8(*tensors, fill=True)


def _paged() -> Case:
    case = cases.paged_case([64, 100, 7], 1, 64, 64, "cuda")
    schedule = moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64)

    def run(*tensors: Tensor) -> Tensor:
        out = torch.zeros(3, 128, device="cuda")
        return moe_fp8.paged_mqa_logits_fp8(*tensors, max_context_len=128, out=out)

    return (case.q, case.kv_cache, case.weights, case.context_lens, case.block_table, schedule), run


def _linear() -> Case:
    x = torch.randn(70, 512, device="cuda").bfloat16()
    weight = moe_fp8.quantize_fp8_blocks(torch.randn(192, 512, device="cuda"))
    return (x, *weight), moe_fp8.linear_fp8


def _layer(interleaved: bool) -> Case:
    layer = moe_cases.Layer(moe_cases.Case(40, 4, 16, 256), 128, "cuda", interleaved=interleaved)

    def run(*tensors: Tensor) -> Tensor:
        x, ids, weights, *operands = tensors
        out = torch.full_like(x, float("nan"))
        workspace = layer.workspace()
        return moe_fp8.fused_moe(
            x, ids, weights, *operands, interleaved=interleaved, workspace=workspace, out=out
        )

    return (*layer.inputs(), layer.given_w13, layer.w13_scale, layer.w2, layer.w2_scale), run


CASES: dict[str, Callable[[], Case]] = {
    "dense of 3 rows": lambda: _dense(3),
    "dense of 300 rows": lambda: _dense(300),
    "masked": _masked,
    "logits": _logits,
    "paged logits": _paged,
    "linear": _linear,
    "layer": lambda: _layer(False),
    "interleaved layer": lambda: _layer(True),
}


def _elsewhere(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return copy.copy_(tensor)


def _spoil(tensor: Tensor) -> None:
    """Change values, but no index or length, since those of the first call stay valid."""
    if tensor.dtype is torch.float32:
        tensor.mul_(1.5)
    elif tensor.dtype is not torch.int32:
        tensor.view(torch.uint8).bitwise_xor_(1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("captured", [False, True])
@torch.inference_mode()
def test_a_moved_call_reads_its_own_tensors(
    name: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, run = CASES[name]()
    expected = run(*given)
    moved = [_elsewhere(tensor) for tensor in given]
    kept = [tensor.clone() for tensor in given]
    for tensor in given:
        _spoil(tensor)

    def refuse(cuda: str) -> NoReturn:
        raise AssertionError(f"{cuda} prepares a launch")

    monkeypatch.setattr(registry, "resolve", refuse)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(*moved)
        graph.replay()
    else:
        got = run(*moved)
    assert torch.equal(got, expected) and expected.count_nonzero() > 0
    for tensor, before in zip(moved, kept, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def test_a_tensor_map_is_its_address_and_the_rest() -> None:
    """If a driver changes this, calls are prepared anew at each new address, which is slower but right."""
    tensor_map.starts_with_address.cache_clear()
    assert tensor_map.starts_with_address()
