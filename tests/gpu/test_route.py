"""route_topk on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_fp8 import route_topk
from tests import route_cases

ON_GPU, ON_CPU = route_cases.run_op("cuda"), route_cases.run_op("cpu")


@pytest.mark.parametrize("case", route_cases.CASES.values(), ids=route_cases.CASES)
@pytest.mark.parametrize("seed", range(3))
def test_choices_and_weights(case: route_cases.Case, seed: int) -> None:
    route_cases.check(case, ON_GPU, seed)


@pytest.mark.parametrize("name", ["Qwen3-30B", "DeepSeek-V3"])
def test_more_tokens_than_warps(name: str) -> None:
    route_cases.check(replace(route_cases.MODELS[name], tokens=16_384), ON_GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ids_by_logits_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    # bf16 and fp16 logits are often equal.
    for experts in (60, 128, 160, 256, 384, 512, 640, 768, 896, 1024):
        case = route_cases.Case(500, experts, 8, dtype=dtype)
        logits = case.logits(experts)
        assert torch.equal(ON_GPU(case, logits, None)[1], ON_CPU(case, logits, None)[1])


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", ["Qwen3-30B", "DeepSeek-V3", "an odd number of experts"])
def test_small(name: str) -> None:
    route_cases.check(replace(route_cases.CASES[name], tokens=5), ON_GPU)


def test_equal_and_undefined_logits() -> None:
    route_cases.check_odd(ON_GPU)
    route_cases.check_equal_groups(ON_GPU)


def test_no_tokens() -> None:
    weights, ids = route_topk(torch.zeros(0, 128, device="cuda"), 8)
    assert weights.shape == ids.shape == (0, 8)


@pytest.mark.parametrize("name", ["bf16, sigmoid", "DeepSeek-V3"])
def test_rows_at_any_distance(name: str) -> None:
    case = route_cases.CASES[name]
    logits = case.logits().cuda()
    bias = case.correction_bias()
    given = {**case.options(), "correction_bias": None if bias is None else bias.cuda()}
    apart = torch.zeros(len(logits), case.experts + 3, device="cuda", dtype=logits.dtype)[:, 3:]
    same = logits[:1].expand_as(logits)
    for strided in (apart.copy_(logits), same):
        expected = route_topk(strided.contiguous(), case.topk, **given)
        for got, wanted in zip(route_topk(strided, case.topk, **given), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["Qwen3-30B", "DeepSeek-V3", "LongCat-Flash"])
def test_a_token_has_the_same_bits_in_any_batch_and_call(name: str) -> None:
    case = replace(route_cases.MODELS[name], tokens=9000)
    logits = case.logits().cuda()
    bias = case.correction_bias()
    given = {**case.options(), "correction_bias": None if bias is None else bias.cuda()}
    whole = route_topk(logits, case.topk, **given)
    for _ in range(20):
        for got, expected in zip(route_topk(logits, case.topk, **given), whole, strict=True):
            assert torch.equal(got, expected)
    for first, last in ((0, 1), (17, 18), (5, 9), (8000, 8999)):
        part = route_topk(logits[first:last], case.topk, **given)
        for got, expected in zip(part, whole, strict=True):
            assert torch.equal(got, expected[first:last])


def test_replay_reads_new_logits_and_bias() -> None:
    case = replace(route_cases.MODELS["DeepSeek-V3"], tokens=64)
    logits, bias = case.logits().cuda(), torch.zeros(case.experts, device="cuda")

    def route() -> tuple[torch.Tensor, torch.Tensor]:
        return route_topk(logits, case.topk, correction_bias=bias, **case.options())

    route()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route()
    for seed in range(3):
        logits.copy_(case.logits(seed))
        new_bias = case.correction_bias(seed)
        assert new_bias is not None
        bias.copy_(new_bias)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for got, expected in zip(replayed, route(), strict=True):
            assert torch.equal(got, expected)


def test_the_next_op_reads_what_was_chosen() -> None:
    # The kernels overlap; the second one must wait for the ids of the first one.
    case = route_cases.MODELS["Qwen3-30B"]
    first, second = case.logits(0).cuda(), case.logits(1).cuda()
    expected = [route_topk(logits, case.topk)[1].clone() for logits in (first, second)]
    out = torch.zeros(300, 8, device="cuda"), torch.zeros(300, 8, dtype=torch.int32, device="cuda")
    for _ in range(50):
        for logits, ids in zip((first, second), expected, strict=True):
            route_topk(logits, case.topk, out=out)
            counts = torch.zeros(128, dtype=torch.int32, device="cuda")
            counts.index_add_(0, out[1].flatten(), torch.ones(2400, dtype=torch.int32, device="cuda"))
            assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=128).int())
