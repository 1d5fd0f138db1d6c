"""The plan of an engine has the linear layers that the engine's own code makes (tests/traces)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.warmup import Plan, PlanOptions, load_model, plan

TESTS = Path(__file__).parent.parent
TRACES = sorted((TESTS / "traces").glob("*/*.json"))

Sizes = tuple[int, int, int | None]


def trace(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def planned_for(told: dict[str, Any]) -> Plan:
    options = PlanOptions(tp=told["tp"], ep=told["ep"], max_tokens=64, max_batch=4, engine=told["engine"])
    return plan(load_model(TESTS / "configs" / f"{told['model']}.json"), options)


def test_there_are_traces_of_three_models_at_two_parallelisms() -> None:
    made = {(told["engine"], told["model"], told["tp"], told["ep"]) for told in map(trace, TRACES)}
    for engine in {engine for engine, *_ in made}:
        models = [model for name, model, *_ in made if name == engine]
        assert sorted(set(models)) == ["deepseek_v32", "glm_45", "qwen3_235b"] and len(models) == 6


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_engines_layers_are_the_plans(path: Path) -> None:
    told = trace(path)
    planned = planned_for(told)
    in_fp8 = {(layer["n"], layer["k"], layer["experts"]) for layer in told["layers"] if layer["fp8"]}
    gemms = {(row.n, row.k, row.num_experts) for row in planned.rows if row.layout is not None}
    assert gemms == in_fp8
    assert not planned.lacking


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_the_engine_keeps_in_bf16_is_listed(path: Path) -> None:
    told = trace(path)
    planned = planned_for(told)
    listed: set[Sizes] = {
        (layer.n, layer.k, layer.num_experts) for layer in planned.unplanned if layer.n and layer.k
    }
    # vLLM multiplies the indexer's keys and weights together.
    indexer = [layer for layer in planned.unplanned if layer.what in ("indexer.wk", "indexer.weights_proj")]
    if len(indexer) == 2:
        listed.add((sum(layer.n or 0 for layer in indexer), indexer[0].k or 0, None))
    for layer in told["layers"]:
        if not layer["fp8"] and not layer["what"].endswith("lm_head"):
            assert (layer["n"], layer["k"], layer["experts"]) in listed, layer
