"""route_topk on the CPU: the reference, and what the op refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from moe_fp8 import ArgumentError, route_topk
from tests import route_cases

ON_CPU = route_cases.run_op("cpu")


@pytest.mark.parametrize("case", route_cases.CASES.values(), ids=route_cases.CASES)
def test_choices_and_weights(case: route_cases.Case) -> None:
    route_cases.check(case, ON_CPU)


def test_equal_and_undefined_logits() -> None:
    route_cases.check_odd(ON_CPU)
    route_cases.check_equal_groups(ON_CPU)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [3, 7, 12, 33, 60, 257])
def test_a_token_has_the_same_result_in_any_batch(
    scoring: Literal["softmax", "sigmoid"], experts: int
) -> None:
    logits = torch.randn(201, experts, generator=torch.Generator().manual_seed(1))
    logits[:, -1] = logits[:, 0] = logits[:, 0] + 4
    route = partial(route_topk, scoring=scoring, correction_bias=torch.zeros(experts), renormalize=False)
    weights, ids = route(logits, 3)
    for i in range(201):
        alone, its = route(logits[i : i + 1], 3)
        assert torch.equal(its[0], ids[i]) and torch.equal(alone[0], weights[i])


def test_no_tokens() -> None:
    weights, ids = route_topk(torch.zeros(0, 128), 8, ids_dtype=torch.int64)
    assert weights.shape == ids.shape == (0, 8)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)


def test_all_groups_are_kept_unless_a_number_is_given() -> None:
    case = replace(route_cases.MODELS["DeepSeek-V3"], tokens=20)
    logits, bias = case.logits(), case.correction_bias()

    def ids(**groups: int) -> torch.Tensor:
        return route_topk(logits, 8, scoring="sigmoid", correction_bias=bias, **groups)[1]

    assert torch.equal(ids(num_expert_group=8), ids())
    assert not torch.equal(ids(num_expert_group=8, topk_group=4), ids())


def test_rows_at_any_distance() -> None:
    case = replace(route_cases.MODELS["Qwen3-30B"], tokens=5)
    logits = case.logits()
    apart = torch.zeros(5, 131)[:, 3:].copy_(logits)
    for given, expected in ((apart, logits), (logits[:1].expand(5, -1), logits[:1].repeat(5, 1))):
        for got, wanted in zip(route_topk(given, 8), route_topk(expected, 8), strict=True):
            assert torch.equal(got, wanted)


LOGITS, BIAS = torch.zeros(4, 64), torch.zeros(64)
WEIGHTS, IDS = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("logits", {"logits": LOGITS[0]}),
        ("logits", {"logits": LOGITS.double()}),
        ("logits", {"logits": torch.zeros(4, 1025)}),
        ("logits", {"logits": torch.zeros(64, 4).T}),
        ("topk", {"topk": 0}),
        ("topk", {"topk": 33}),
        ("topk", {"logits": LOGITS[:, :6]}),
        ("topk", {"num_expert_group": 16, "topk_group": 1}),
        ("scoring", {"scoring": "tanh"}),
        ("correction_bias", {"correction_bias": BIAS[:63]}),
        ("correction_bias", {"correction_bias": BIAS[None]}),
        ("correction_bias", {"correction_bias": BIAS.bfloat16()}),
        ("correction_bias", {"correction_bias": torch.zeros(128)[::2]}),
        ("num_expert_group", {"num_expert_group": 0}),
        ("num_expert_group", {"num_expert_group": 6}),
        ("num_expert_group", {"num_expert_group": 64}),
        ("num_expert_group", {"logits": LOGITS[:, :32], "num_expert_group": 32, "topk_group": 8}),
        ("topk_group", {"num_expert_group": 4, "topk_group": 0}),
        ("topk_group", {"num_expert_group": 4, "topk_group": 5}),
        ("ids_dtype", {"ids_dtype": torch.int16}),
        ("ids", {"out": (WEIGHTS, IDS[:3])}),
        ("ids", {"out": (WEIGHTS, IDS[:, :7])}),
        ("ids", {"out": (WEIGHTS, IDS.short())}),
        ("ids", {"out": (WEIGHTS, IDS[:1].expand(4, 8))}),
        ("weights", {"out": (WEIGHTS[:, :7], IDS)}),
        ("weights", {"out": (WEIGHTS.half(), IDS)}),
        ("weights", {"out": (torch.zeros(8, 4).T, IDS)}),
    ],
)
def test_the_wrong_argument_is_named(argument: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "topk": 8} | given
    with pytest.raises(ArgumentError) as caught:
        route_topk(arguments.pop("logits"), arguments.pop("topk"), **arguments)
    assert caught.value.argument == argument


def test_a_compiled_router_gives_the_same_bits() -> None:
    case = route_cases.MODELS["DeepSeek-V3"]
    bias = case.correction_bias()

    def router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route_topk(logits, 8, correction_bias=bias, **case.options())
        return weights * 2, ids

    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 64):
        logits = replace(case, tokens=tokens).logits()
        for got, expected in zip(compiled(logits), router(logits), strict=True):
            assert torch.equal(got, expected)


def test_an_expert_whose_bias_is_no_number_comes_last() -> None:
    bias = torch.tensor([float("nan"), 1.0, 0.0, -1.0])
    _, ids = route_topk(torch.zeros(1, 4), 4, scoring="sigmoid", correction_bias=bias)
    assert ids.tolist() == [[1, 2, 3, 0]]
