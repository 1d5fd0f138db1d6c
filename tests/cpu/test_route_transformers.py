"""route_topk chooses what the routers of `transformers` choose, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_fp8 import route_topk
from tests import route_cases

pytest.importorskip("transformers", reason="compares with the routers of transformers (Python 3.11)")

from transformers import DeepseekV3Config, Glm4MoeConfig, MiniMaxM2Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TOKENS = 2000


def _router(made: Any, experts: int) -> Any:
    """The router with the identity as weights: its logits are its input."""
    with torch.no_grad():
        made.weight.copy_(torch.eye(experts))
    return made


def _grouped(kind: type, config: type, case: route_cases.Case, logits: Tensor, bias: Tensor) -> Any:
    router = kind(
        config(
            hidden_size=case.experts, n_routed_experts=case.experts, num_experts_per_tok=case.topk,
            n_group=case.groups, topk_group=case.kept, norm_topk_prob=case.renormalize,
            routed_scaling_factor=case.scaling,
        )
    )  # fmt: skip
    router.e_score_correction_bias.copy_(bias)
    return _router(router, case.experts)(logits)


def _minimax(case: route_cases.Case, logits: Tensor, bias: Tensor) -> Any:
    config = MiniMaxM2Config(
        hidden_size=case.experts, num_local_experts=case.experts, num_experts_per_tok=case.topk
    )
    return _router(MiniMaxM2TopKRouter(config), case.experts)(logits, bias)


def _qwen(case: route_cases.Case, logits: Tensor) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=case.experts, num_experts=case.experts, num_experts_per_tok=case.topk,
        norm_topk_prob=case.renormalize,
    )  # fmt: skip
    return _router(Qwen3MoeTopKRouter(config), case.experts)(logits)


@torch.no_grad()
def _theirs(model: str, case: route_cases.Case, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if bias is None:
        logits, weights, ids = _qwen(case, logits)
    elif model.startswith("MiniMax"):
        logits, weights, ids = _minimax(case, logits, bias)
    else:
        kinds = {
            "DeepSeek": (DeepseekV3TopkRouter, DeepseekV3Config),
            "GLM": (Glm4MoeTopkRouter, Glm4MoeConfig),
        }
        logits, weights, ids = _grouped(*kinds[model.split("-")[0]], case, logits, bias)
    return weights, ids


CASES = {
    **{name: route_cases.MODELS[name] for name in ("Qwen3-30B", "DeepSeek-V3", "GLM-4.5", "MiniMax-M2")},
    "Qwen3 without renormalization": route_cases.Case(1, 128, 8, renormalize=False),
    "DeepSeek-V3 without renormalization": route_cases.Case(1, 256, 8, "sigmoid", True, 8, 4, False, 2.5),
    "GLM-4.5-Air": route_cases.Case(1, 128, 8, "sigmoid", True),
}


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_same_ids_and_weights(model: str, seed: int) -> None:
    case = CASES[model]
    gen = torch.Generator().manual_seed(seed)
    # Normal logits at several scales: saturated sigmoids make equal scores, whose order is not defined.
    logits = torch.randn(TOKENS, case.experts, generator=gen) * torch.rand(TOKENS, 1, generator=gen) * 4
    bias = case.correction_bias(seed)
    weights, ids = route_topk(logits, case.topk, correction_bias=bias, **case.options())
    their_weights, their_ids = _theirs(model, case, logits, bias)
    # Some of their routers return the experts in any order.
    ids, order = ids.long().sort(dim=1)
    their_ids, their_order = their_ids.sort(dim=1)
    assert torch.equal(ids, their_ids)
    torch.testing.assert_close(
        weights.gather(1, order), their_weights.gather(1, their_order), rtol=1e-6, atol=0
    )


def test_equal_bf16_logits_give_equal_weights() -> None:
    # bf16 logits are often equal where the choice ends; the chosen logits are the same all the same.
    case = route_cases.MODELS["Qwen3-30B"]
    logits = torch.randn(TOKENS, case.experts, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights, ids = route_topk(logits, case.topk)
    _, their_ids = _theirs("Qwen3-30B", case, logits.float(), None)
    chosen, theirs = logits.gather(1, ids.long()), logits.gather(1, their_ids)
    assert torch.equal(chosen, theirs) and (ids != their_ids).any()
    expected = logits.float().softmax(1).gather(1, their_ids)
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True), rtol=1e-6, atol=0)
