"""Class serve: a decode step of the example server's model, as a replayed graph and launched op by op."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .compare import Session
from .peer import DeepGemm
from .results import Row

#: Requests of a step, tokens of each request's context, steps that are timed.
_BATCHES, _CONTEXT, _STEPS = (1, 8, 32), 500, 50


def run_serve(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Wall time of a step with its synchronization; `peer` has no such step."""
    # The other classes run without the server's dependencies.
    from server_example.backend import choose_backend, load_kernels, plan_options
    from server_example.cache import PAGE_TOKENS
    from server_example.engine import Engine, EngineOptions
    from server_example.make_demo_model import make_demo_model

    backend = choose_backend("auto")
    options = EngineOptions(max_batch=max(_BATCHES), cache_pages=2 + _CONTEXT // PAGE_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo_model(folder)
        if backend.name == "cuda":
            load_kernels(
                folder,
                plan_options(options.prefill_chunk, options.max_batch, backend.num_sms, PAGE_TOKENS),
            )
        engine = Engine(folder, backend, options)
    engine.warm_up()
    pages = torch.arange(1, options.cache_pages, dtype=torch.int32)
    for batch in _BATCHES[::step]:
        table = torch.zeros(batch, engine.table_width, dtype=torch.int32)
        table[:, : len(pages)] = pages  # all requests have the same context
        inputs = {
            "seats": torch.arange(batch),
            "context_lens": torch.full((batch,), _CONTEXT, dtype=torch.int32),
            "block_table": table,
        }
        on_device = {key: value.to(backend.device) for key, value in inputs.items()}
        row = Row("serve", {"model": "demo", "batch": batch, "context": _CONTEXT}, 0.0)
        row.us, row.peers["eager"] = _alternate(
            lambda inputs=on_device: engine.runner.run(inputs),  # type: ignore[misc]
            lambda inputs=on_device: engine.decode_step(inputs),  # type: ignore[misc]
        )
        session.store(row)


def _alternate(*steps: Callable[[], object]) -> list[float]:
    """Median microseconds of each step; the steps take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_STEPS):
        for taken, one in zip(times, steps, strict=True):
            begun = time.perf_counter()
            one()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - begun) * 1e6)
    return [statistics.median(taken) for taken in times]
