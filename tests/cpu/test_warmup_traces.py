"""The plan of an engine has the linear layers that the engine's own code makes (tests/traces)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.warmup import Plan, PlanOptions, load_model, plan

TESTS = Path(__file__).parent.parent
TRACES = sorted((TESTS / "traces").glob("*/*.json"))
MADE = [path for path in TRACES if "refused" not in json.loads(path.read_text())]

Sizes = tuple[int, int, int | None]

#: The layers that vLLM 0.33 does not split where their tokens are in sequence-parallel form (docs/vllm.md).
WHOLE: dict[str, dict[str, int]] = {
    "deepseek_v3": {"shared_tp": 1},
    "deepseek_v32": {"mlp_tp": 1, "shared_tp": 1},
    "kimi_k2": {"shared_tp": 1},
}


def trace(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def plans_for(told: dict[str, Any]) -> list[Plan]:
    """The plans that together cover the trace's server: mostly one."""
    options: dict[str, Any] = {"tp": told["tp"], "ep": told["ep"]}
    fused = {0}
    if told["engine"] == "sglang":
        options |= {"attention_tp": told["attention_tp"], "moe_tp": told["moe_tp"]}
        if told["moe_a2a_backend"] == "deepep":
            options["shared_tp"] = 1
        fused = set(told["fused_shared_experts"]) or fused
    elif told["sequence_parallel_moe"]:
        options |= WHOLE.get(told["model"], {})
    model = load_model(TESTS / "configs" / f"{told['model']}.json")
    return [
        plan(
            model,
            PlanOptions(**options, fuse_shared=bool(fuse), max_tokens=64, max_batch=4, engine=told["engine"]),
        )
        for fuse in sorted(fused)
    ]


def test_both_engines_have_three_models_at_two_parallelisms() -> None:
    for engine in ("vllm", "sglang"):
        made = [told for told in map(trace, MADE) if told["engine"] == engine]
        for model in ("deepseek_v32", "glm_45", "qwen3_235b"):
            assert len([told for told in made if told["model"] == model]) >= 2, (engine, model)
        assert all(len(told["linears"]) >= 6 for told in made)


@pytest.mark.parametrize("path", MADE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_engines_layers_are_the_plans(path: Path) -> None:
    told = trace(path)
    plans = plans_for(told)
    in_fp8 = {(layer["n"], layer["k"], layer["experts"]) for layer in told["linears"] if layer["fp8"]}
    gemms = {(row.n, row.k, row.num_experts) for one in plans for row in one.rows if row.layout is not None}
    assert gemms == in_fp8
    assert not any(one.lacking for one in plans)


@pytest.mark.parametrize("path", MADE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_the_engine_keeps_in_bf16_is_listed(path: Path) -> None:
    told = trace(path)
    others = [layer for one in plans_for(told) for layer in one.unplanned]
    listed: set[Sizes] = {(layer.n, layer.k, layer.num_experts) for layer in others if layer.n and layer.k}
    # vLLM multiplies the indexer's keys and weights together.
    indexer = {layer.what: layer for layer in others if layer.what.startswith("indexer.w")}
    if len(indexer) == 2:
        listed.add((sum(layer.n or 0 for layer in indexer.values()), indexer["indexer.wk"].k or 0, None))
    for layer in told["linears"]:
        # Engines cut output heads by vocabulary; the plan lists the whole head.
        if not layer["fp8"] and not layer["what"].endswith("head"):
            assert (layer["n"], layer["k"], layer["experts"]) in listed, layer


@pytest.mark.parametrize(
    "path", sorted(set(TRACES) - set(MADE)), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_what_an_engine_refuses_is_lacking(path: Path) -> None:
    """Both engines refuse weights whose width the ranks cannot share in whole scale blocks."""
    told = trace(path)
    assert "is not divisible by weight quantization block" in told["refused"]
    (planned,) = plans_for(told)
    assert {layer.what for layer in planned.lacking} == {"shared.gate_up", "shared.down"}
