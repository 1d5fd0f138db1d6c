"""Class full_size: a decode step with layers of DeepSeek-V3.2's full size, and the share of each op in it.

The weights are random. The requests of a step have the same cached tokens, which are random too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import moe_fp8
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphRunner

from .results import ROOT, Row, four_digits
from .serve import step_inputs
from .shares import Span, shares, steps
from .timing import alternate_walls

if TYPE_CHECKING:
    from server_example.cache import LayerCache

    from .compare import Session
    from .peer import DeepGemm

_MODEL = ROOT / "tests" / "configs" / "deepseek_v32.json"
#: One dense layer, and three with all experts: 43 GB of weights with the embedding and the head.
_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
#: A context has more tokens than the indexer selects.
_BATCHES, _CONTEXT, _STEPS = (1, 8, 64, 128), 4096, 50
#: Steps of the profile, and the seconds between them, which tell the steps apart.
_PROFILED, _PAUSE = 5, 0.05


def run_full_size(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Wall time of a step with its synchronization, as in class serve; `peer` has no such step."""
    # The other classes run without the server's dependencies.
    from server_example.backend import choose_backend, load_kernels, plan_kernels
    from server_example.cache import LayerCache
    from server_example.model.config import ModelConfig
    from server_example.model.transformer import Transformer
    from server_example.model.weights import load_weights
    from server_example.pages import DUMMY_PAGE, pages_for

    backend, batches, width = choose_backend("auto"), _BATCHES[::step], pages_for(_CONTEXT)
    if backend.name == "cuda":
        load_kernels(plan_kernels(_MODEL, max(batches), max(batches), backend.num_sms))
    config = ModelConfig.load(_MODEL, **_LAYERS)
    weights = load_weights(Path("unused"), config, backend.device, load_format="dummy")
    model = Transformer(config, weights, max_positions=_CONTEXT, num_workers=backend.num_sms)
    caches = [LayerCache.allocate(config, 1 + width, backend.device) for _ in model.layers]
    for cache in caches:
        _fill(cache, config.power_of_two_scales)
    runner = GraphRunner(
        lambda inputs: model.decode(inputs, caches),
        {
            "tokens": BufferSpec((), torch.int64),
            "context_lens": BufferSpec((), torch.int32),
            "block_table": BufferSpec((width,), torch.int32, pad=DUMMY_PAGE),
        },
        BatchBuckets(batches),
        backend.device,
    )
    runner.capture()
    for batch in batches:
        inputs = step_inputs(batch, _CONTEXT, width, backend.device)
        replay = partial(runner.run, inputs)
        shape = {"model": config.model_type, "layers": len(model.layers), "batch": batch, "context": _CONTEXT}
        row = Row("full_size", shape, 0.0)
        row.us, row.peers["eager"] = alternate_walls([replay, partial(model.decode, inputs, caches)], _STEPS)
        row.notes = _profile(replay) if runner.uses_graphs else {"shares": {}}
        session.store(row)


def _fill(cache: LayerCache, power_of_two: bool) -> None:
    """Random tokens, because equal keys would make ties for the selection."""
    cache.latent.normal_()
    keys = torch.randn(len(cache.latent), cache.index_keys.shape[2], device=cache.latent.device)
    slots = torch.arange(len(keys), device=keys.device)
    moe_fp8.indexer_quantize_and_cache(keys.bfloat16(), cache.index, slots, power_of_two=power_of_two)


def _profile(replay: Callable[[], object]) -> dict[str, Any]:
    """The row's notes: the shares, and the median time between the first and the last kernel of a step."""
    from torch._C._autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(1 + _PROFILED):
            replay()
            torch.cuda.synchronize()
            time.sleep(_PAUSE)
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    if not spans:
        raise RuntimeError("the profiler saw no kernel: another tool may hold the device's counters")
    taken = steps(spans, 1 + _PROFILED)[1:]  # the first is slower under a profiler
    whole = [max(span.end for span in one) - min(span.start for span in one) for one in taken]
    return {"shares": shares(taken), "profiled us": four_digits(statistics.median(whole))}
