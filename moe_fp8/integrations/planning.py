"""The kernels of a loaded engine: planned from the weights that it has, not from a config file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from moe_fp8 import jit
from moe_fp8.limits import MAX_NEXT_N, refuse_k, refuse_n
from moe_fp8.warmup import Plan, PlanOptions, load_plan, plan
from moe_fp8.warmup.models import Indexer, ModelDescription
from moe_fp8.warmup.shapes import GemmShape


@dataclass
class LoadedEngine:
    """What an engine has loaded, and the limits of its calls.

    `engine` is "vllm" or "sglang". `dense` are (N, K) of linear layers, `experts` (local experts, N, K) of
    grouped products. `data_parallel`: groups of ranks whose tokens a rank's experts and MLPs get. `next_n`:
    the most tokens of a request in a decode step. `num_sms`: SMs that the ops use, or all numbers that occur.
    `kv_lora_rank`: the K of MLA's `kv_b_proj`, whose rows may be all cached tokens of a context; None without
    MLA. `indexer`: as the config has it. Other limits are the engine's defaults of `PlanOptions`.
    """

    engine: str
    name: str
    max_tokens: int
    max_batch: int
    max_positions: int
    num_sms: int | tuple[int, ...]
    next_n: int = 1
    data_parallel: int = 1
    experts_per_token: int = 1
    kv_lora_rank: int | None = None
    indexer: Indexer | None = None
    dense: set[tuple[int, int]] = field(default_factory=set)
    experts: set[tuple[int, int, int]] = field(default_factory=set)

    def add_dense(self, weight: Any) -> None:
        """Add the weight of a linear layer, if our kernels serve its sizes.

        (Weights of batched products have three dimensions, and are not ours.)
        """
        if weight.dim() == 2 and _sizes_served(*weight.shape):
            self.dense.add((weight.shape[0], weight.shape[1]))

    def add_experts(self, module: Any, otherwise: int = 1) -> None:
        """Add the routed experts of a layer: the shapes of both weights, and the experts of a token.

        otherwise: the experts of a token if the module does not know them.
        """
        self.add_grouped(module.w13_weight, module.w2_weight)
        self.experts_per_token = max(self.experts_per_token, module.top_k or otherwise)

    def add_grouped(self, *weights: Any) -> None:
        """Add weights `[experts, N, K]` of grouped products, if our kernels serve their sizes.

        (The engine's own copy of `deep_gemm` serves other sizes.)
        """
        for weight in weights:
            experts, n, k = weight.shape
            if _sizes_served(n, k):
                self.experts.add((experts, n, k))


def _sizes_served(n: int, k: int) -> bool:
    return not refuse_n(n) and not refuse_k(k)


def plan_loaded(loaded: LoadedEngine) -> Plan:
    """Every kernel that the engine's calls can launch within its limits. Needs no GPU."""
    local = max((experts for experts, _, _ in loaded.experts), default=1)
    model = ModelDescription(
        name=loaded.name,
        architecture=loaded.engine,
        hidden_size=max((k for _, k in loaded.dense), default=1),
        num_layers=1,
        max_positions=loaded.max_positions,
        dtype="bfloat16",
        linears=(),
        indexer=loaded.indexer,
        num_experts=local * loaded.data_parallel,
        experts_per_token=loaded.experts_per_token,
        num_shared_experts=0,
    )
    options = PlanOptions(
        ep=loaded.data_parallel,
        attention_tp=1,
        mlp_tp=loaded.data_parallel,
        max_tokens=loaded.max_tokens,
        max_batch=loaded.max_batch,
        # The indexer's kernels serve no longer drafts.
        next_n=min(loaded.next_n, MAX_NEXT_N),
        num_sms=loaded.num_sms,
        engine=loaded.engine,
    )
    return plan(model, options, extra=(*_dense(loaded), *_grouped(loaded.experts)))


def _dense(loaded: LoadedEngine) -> Iterable[GemmShape]:
    for n, k in sorted(loaded.dense):
        yield GemmShape("linear", n, k, whole_context=k == loaded.kv_lora_rank)


def _grouped(shapes: Iterable[tuple[int, int, int]]) -> Iterable[GemmShape]:
    known = sorted(shapes)
    for experts, n, k in known:
        what = "experts.down" if (experts, 2 * k, n) in known else "experts.gate_up"
        yield GemmShape(what, n, k, experts)


def warm(loaded: LoadedEngine, undo: list[Callable[[], None]]) -> Plan:
    """Plan, build and load the engine's kernels; from then on, a miss is warned about and counted.

    A process that is frozen already keeps its mode. `undo` gets the call that ends the freeze. Raises
    ToolchainError, CompileError, DriverError.
    """
    made = plan_loaded(loaded)
    count = load_plan(made)
    if not jit.is_frozen():
        jit.freeze("warn")
        undo.append(jit.unfreeze)
    # An engine shows the lines of loggers below its own name.
    logging.getLogger(f"{loaded.engine}.moe_fp8").info(
        "moe_fp8 planned %d kernels for %s and loaded %d of them", len(made.specs), loaded.name, count
    )
    return made
