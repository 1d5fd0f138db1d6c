"""vLLM's and SGLang's own layers give the same results with our module as with DeepGEMM's under `deep_gemm`.

The layers run from their sources, unchanged; tests/engines has the stand-ins for what is around them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.layers import EngineLayers
from tests.engines.providers import Ours, Peer
from tests.engines.sources import skipped
from tests.engines.step import Moe, Step, compare, eager, replayed

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

MOE = [
    *(Moe(tokens) for tokens in (1, 7, 64, 500, 8192)),
    Moe(200, ranks=2),
    Moe(96, hidden=7168, intermediate=2048),
]

#: Hopper's tensor cores add FP8 products with fewer bits than fp32 has. The logits of both modules are 1.3e-4
#: from the exact ones, and 1.2e-4 from each other.
LOGITS = 2e-4

Build = Callable[[EngineLayers], Step]
Both = Callable[[Any, Build, float, float], None]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """both(engine, build, overall, row): compare a step of the class `engine` of layers with both modules."""
    folder: Path | None = request.config.getoption("--peer")
    if folder is None:
        pytest.skip("needs DeepGEMM's package: --peer FOLDER")
    patch = pytest.MonkeyPatch()
    # vLLM puts a folder of its own here if there is none.
    patch.setenv("DG_JIT_CACHE_DIR", os.environ.get("DG_JIT_CACHE_DIR", str(Path.home() / ".deep_gemm")))
    providers = (Ours(), Peer(folder))
    loaded: dict[tuple[Any, str], EngineLayers] = {}

    def run(engine: Any, build: Build, overall: float, row: float) -> None:
        results = []
        for provider in providers:
            key = engine, provider.name
            if key not in loaded:
                loaded[key] = engine()
            with provider.active(), loaded[key].active() as layers:
                step = build(layers)
                found = [eager(step, 0), eager(step, 1)]
                # A graph that does not read the new inputs gives the results of the old ones.
                found += [replayed(step, (0, 1)), replayed(step, (1, 0))]
                torch.cuda.synchronize()
                compare(found[2], found[1], overall, row)
                compare(found[3], found[0], overall, row)
                results.append(found)
                del step
                gc.collect()
        for ours, theirs in zip(*results, strict=True):
            compare(ours, theirs, overall, row)

    yield run
    patch.undo()


@pytest.mark.parametrize("batched", [False, True], ids=["DeepGemmExperts", "BatchedDeepGemmExperts"])
@pytest.mark.parametrize("case", MOE, ids=str)
def test_vllms_experts(case: Moe, batched: bool, both: Both) -> None:
    from tests.engines.vllm_layers import ExpertsStep, VllmLayers

    both(VllmLayers, lambda layers: ExpertsStep(layers, case, "cuda", batched), 5e-3, 2e-2)


@pytest.mark.parametrize("layout", ["compact", "masked"])
@pytest.mark.parametrize("case", MOE, ids=str)
def test_sglangs_runner(case: Moe, layout: str, both: Both) -> None:
    from tests.engines.sglang_layers import RunnerStep, SglangLayers

    both(SglangLayers, lambda layers: RunnerStep(layers, case, "cuda", layout), 5e-3, 2e-2)


@pytest.mark.parametrize(
    ("contexts", "queries"),
    [
        ((5000,), (1,)),
        ((1, 4000), (1, 6)),
        ((64, 700), (24, 40)),
        ((3000, 300, 2500), (100, 300, 100)),
        ((8192, 1000), (7692, 500)),
    ],
    ids=lambda value: str(sum(value)),
)
@pytest.mark.parametrize("heads", [32, 64])
def test_vllms_indexer_in_prefill(
    heads: int, contexts: tuple[int, ...], queries: tuple[int, ...], both: Both
) -> None:
    from tests.engines.vllm_indexer import Indexer, PrefillStep
    from tests.engines.vllm_layers import VllmLayers

    case = Indexer(contexts, queries, heads)
    both(VllmLayers, lambda layers: PrefillStep(layers, case, "cuda"), LOGITS, 1e-3)


@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (64, 2), (32, 1), (32, 4)])
@pytest.mark.parametrize("requests", [1, 7, 64, 500, 2048])
def test_vllms_indexer_in_decode(heads: int, requests: int, next_n: int, both: Both) -> None:
    from tests.engines.vllm_indexer import DecodeStep, Indexer
    from tests.engines.vllm_layers import VllmLayers

    contexts = [1 + (i * 37) % 500 for i in range(requests)]
    contexts[0] = 9000
    padding = requests // 8  # requests that fill a batch up to the size of a graph
    contexts[requests - padding :] = [0] * padding
    case = Indexer(tuple(contexts), (next_n,) * requests, heads)
    both(VllmLayers, lambda layers: DecodeStep(layers, case, "cuda"), LOGITS, 1e-3)
