"""Class serve: a decode step of the example server's model, as a replayed graph and launched op by op."""

from __future__ import annotations

from functools import partial

import torch

from .compare import Session
from .peer import DeepGemm
from .results import Row
from .timing import alternate_walls

#: Requests of a step, tokens of each request's context, steps that are timed.
_BATCHES, _CONTEXT, _STEPS = (1, 8, 32, 64), 500, 50


def run_serve(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Wall time of a step with its synchronization; `peer` has no such step."""
    # The other classes run without the server's dependencies.
    from server_example.backend import choose_backend, load_kernels, plan_options
    from server_example.cache import PAGE_TOKENS
    from server_example.engine import Engine, EngineOptions
    from server_example.settings import SHAKESPEARE

    backend = choose_backend("auto")
    options = EngineOptions(max_batch=max(_BATCHES), cache_pages=2 + _CONTEXT // PAGE_TOKENS)
    if backend.name == "cuda":
        load_kernels(
            SHAKESPEARE,
            plan_options(options.prefill_chunk, options.max_batch, backend.num_sms, PAGE_TOKENS),
        )
    engine = Engine(SHAKESPEARE, backend, options)
    engine.warm_up()
    for batch in _BATCHES[::step]:
        inputs = step_inputs(batch, _CONTEXT, engine.table_width, backend.device)
        inputs["seats"] = inputs.pop("tokens")  # The engine keeps the last token of each seat.
        row = Row("serve", {"model": SHAKESPEARE.name, "batch": batch, "context": _CONTEXT}, 0.0)
        row.us, row.peers["eager"] = alternate_walls(
            [partial(engine.runner.run, inputs), partial(engine.decode_step, inputs)], _STEPS
        )
        session.store(row)


def step_inputs(batch: int, context: int, table_width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of a decode step of requests that all have the same context, which begins on page 1."""
    from server_example.cache import pages_for

    count = pages_for(context)
    table = torch.zeros(batch, table_width, dtype=torch.int32)
    table[:, :count] = torch.arange(1, 1 + count, dtype=torch.int32)
    inputs = {
        "tokens": torch.arange(batch),
        "context_lens": torch.full((batch,), context, dtype=torch.int32),
        "block_table": table,
    }
    return {name: value.to(device) for name, value in inputs.items()}
