"""The planner's linear layers are those of a second, independent reading of the architectures."""

from __future__ import annotations

import pytest

from moe_fp8.errors import ConfigError
from moe_fp8.warmup import PlanOptions, describe, gemm_shapes, unplanned
from moe_fp8.warmup.engines import ENGINES
from tests.derivation import linears
from tests.model_configs import NAMES, in_blocks

#: Ranks of attention, of dense MLPs, of each expert, and of the set of experts.
RANKS = [
    (1, 1, 1, 1), (2, 2, 2, 1), (4, 4, 1, 4), (8, 8, 1, 8), (1, 1, 1, 8), (4, 4, 1, 16), (8, 8, 8, 1),
    (1, 4, 1, 4),
]  # fmt: skip

Sizes = tuple[int, int, int]


def sizes(n: int | None, k: int | None, experts: int | None, what: str) -> Sizes:
    """(n, k, experts); one weight for each of several groups is counted with all its rows."""
    n, k = n or 0, k or 0
    return (n * (experts or 1), k, 1) if what in ("wo_a", "o_a") else (n, k, experts or 1)


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_both_readings_have_the_same_layers(name: str, ranks: tuple[int, int, int, int]) -> None:
    config = in_blocks(name)
    attention, mlp, moe, ep = ranks
    model = describe(config, name=name)
    try:
        options = PlanOptions(
            mlp, ep, attention_tp=attention, mlp_tp=mlp, shared_tp=mlp, moe_tp=moe, engine="vllm"
        )
        gemms, others = gemm_shapes(model, options), unplanned(model, options)
    except ConfigError:
        with pytest.raises(ValueError, match="do not divide"):
            linears(config, *ranks)
        return
    derived = linears(config, *ranks)
    fp8 = {sizes(each.n, each.k, each.experts, each.what) for each in derived if each.fp8}
    # The derivation reads vLLM, which computes this layer in bf16.
    planned = {
        sizes(each.n, each.k, each.num_experts, each.what)
        for each in gemms
        if each.what not in ENGINES["vllm"].bf16
    }
    lacking = {
        sizes(each.n, each.k, each.num_experts, each.what)
        for each in others
        if each.lacking and "FP4" not in each.reason
    }
    assert planned <= fp8
    assert fp8 <= planned | lacking
    assert {each for each in lacking if all(each)} <= fp8
