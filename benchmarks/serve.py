"""Class serve: a decode step of the example server's model, as a replayed graph and launched op by op."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from .results import Row
from .timing import alternate_walls, in_a_row

if TYPE_CHECKING:
    from server_example.engine import Engine

    from .compare import Session
    from .peer import DeepGemm

#: Requests of a step, tokens of each request's context, steps that are timed.
_BATCHES, _CONTEXT, _STEPS = (1, 8, 32, 64), 500, 50


def run_serve(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Wall time of a step with its synchronization; `peer` has no such step."""
    engine = shakespeare_engine(max(_BATCHES), _CONTEXT)
    for batch in _BATCHES[::step]:
        row = Row("serve", {"model": engine.name, "batch": batch, "context": _CONTEXT}, 0.0)
        inputs = _inputs(engine, batch, _CONTEXT)
        row.us, row.peers["eager"] = alternate_walls(
            [partial(engine.runner.run, inputs), partial(engine.decode_step, inputs)], _STEPS
        )
        session.store(row)


def shakespeare_engine(max_batch: int, context: int) -> Engine:
    """The engine of the example model with its graphs. It has pages for one request of `context` tokens."""
    # The other classes run without the server's dependencies.
    from server_example.backend import choose_backend, load_kernels, plan_kernels
    from server_example.engine import Engine
    from server_example.options import EngineOptions
    from server_example.pages import PAGE_TOKENS
    from server_example.settings import SHAKESPEARE

    backend = choose_backend("auto")
    options = EngineOptions(max_batch=max_batch, cache_pages=2 + context // PAGE_TOKENS)
    if backend.name == "cuda":
        kernels = plan_kernels(SHAKESPEARE, options.prefill_chunk, options.max_batch, backend.num_sms)
        load_kernels(kernels)
    engine = Engine(SHAKESPEARE, backend, options)
    engine.warm_up()
    return engine


def replay_microseconds(engine: Engine, batch: int, context: int) -> float:
    """The mean time of decode steps that are replayed one behind the other, without server.

    The engine, too, starts a step before it has waited for the step before.
    """
    return in_a_row(partial(engine.runner.run, _inputs(engine, batch, context)), _STEPS)


def _inputs(engine: Engine, batch: int, context: int) -> dict[str, torch.Tensor]:
    inputs = step_inputs(batch, context, engine.table_width, engine.backend.device)
    inputs["seats"] = inputs.pop("tokens")  # The engine keeps the last token of each seat.
    return inputs


def step_inputs(batch: int, context: int, table_width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of a decode step of requests that all have the same context, which begins on page 1."""
    from server_example.pages import pages_for

    count = pages_for(context)
    table = torch.zeros(batch, table_width, dtype=torch.int32)
    table[:, :count] = torch.arange(1, 1 + count, dtype=torch.int32)
    inputs = {
        "tokens": torch.arange(batch),
        "context_lens": torch.full((batch,), context, dtype=torch.int32),
        "block_table": table,
    }
    return {name: value.to(device) for name, value in inputs.items()}
