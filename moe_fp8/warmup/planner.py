"""Computes every kernel that a model can launch, with the selector that the ops use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moe_fp8.errors import ConfigError, ModelError
from moe_fp8.jit.key import kernel_key
from moe_fp8.limits import refuse_head_dim, refuse_heads, refuse_topk
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.engines import EngineCalls
from moe_fp8.warmup.models import Indexer, ModelDescription
from moe_fp8.warmup.options import PlanOptions
from moe_fp8.warmup.rows import (
    Bounds,
    PlanRow,
    gemm_rows,
    gemm_silu_mul_rows,
    indexer_rows,
    moe_rows,
    quantize_rows,
    route_rows,
    silu_mul_rows,
    weight_gradient_rows,
)
from moe_fp8.warmup.shapes import GemmShape, Unplanned, gemm_shapes, uneven, unplanned, working_settings

BF16_IN_ENGINE = "this engine computes it in bf16"


@dataclass(frozen=True)
class Plan:
    """The kernels of a model: `rows` by use, and `specs`, the distinct kernels in order of first use.

    `unplanned` are the model's linear layers and calls that no kernel of this package computes.
    """

    model: ModelDescription
    options: PlanOptions
    rows: tuple[PlanRow, ...]
    unplanned: tuple[Unplanned, ...] = ()
    specs: tuple[KernelSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(dict.fromkeys(row.spec for row in self.rows)))

    def __contains__(self, spec: object) -> bool:
        return spec in self.specs

    @property
    def lacking(self) -> tuple[Unplanned, ...]:
        """The layers with quantized weights for which a server needs other kernels."""
        return tuple(layer for layer in self.unplanned if layer.lacking)

    @property
    def remedy(self) -> str:
        """Settings with which uneven layers would be planned, or ""."""
        return working_settings(self.model, self.options) if uneven(self.unplanned) else ""

    def keys(self) -> dict[KernelSpec, str]:
        """The content key of each kernel with this machine's NVRTC; raises ToolchainError if it has none."""
        return {spec: kernel_key(spec) for spec in self.specs}

    def to_dict(
        self, keys: Mapping[KernelSpec, str] | None = None, cached: Collection[KernelSpec] | None = None
    ) -> dict[str, Any]:
        """The plan as JSON types, with each kernel's key from `keys` and whether `cached` contains it."""
        numbers = {spec: number for number, spec in enumerate(self.specs)}
        return {
            "model": asdict(self.model),
            "options": asdict(self.options),
            "kernels": [
                {
                    **asdict(spec),
                    "defines": dict(spec.defines),
                    "key": None if keys is None else keys[spec],
                    "cached": None if cached is None else spec in cached,
                }
                for spec in self.specs
            ],
            "rows": [
                {
                    "op": row.op,
                    "what": list(row.what),
                    "layout": row.layout,
                    "n": row.n,
                    "k": row.k,
                    "num_experts": row.num_experts,
                    "rows": [list(pair) for pair in row.rows],
                    "devices": list(row.devices),
                    "config": row.config,
                    "kernel": numbers[row.spec],
                    "key": None if keys is None else keys[row.spec],
                    "cached": None if cached is None else row.spec in cached,
                }
                for row in self.rows
            ],
            "unplanned": [asdict(layer) for layer in self.unplanned],
        }


def plan(
    model: ModelDescription,
    options: PlanOptions | None = None,
    *,
    extra: Sequence[GemmShape] = (),
    strict: bool = False,
) -> Plan:
    """Plan one rank of `model`; `extra` are further GEMMs of the caller that the config does not define.

    Every linear layer of the model is in the plan, or in its `unplanned` with the reason. Needs no GPU, no
    torch and no compiler. Raises ConfigError if the parallelism does not fit the model; ModelError if
    no kernel serves any FP8 layer or, with `strict`, if any FP8 layer is not planned.
    """
    options = PlanOptions() if options is None else options
    if not isinstance(model, ModelDescription):
        raise ConfigError("model", "a description, as load_model gives it", type(model).__name__)
    if not isinstance(options, PlanOptions):
        raise ConfigError("options", "PlanOptions, or None", type(options).__name__)
    shapes = gemm_shapes(model, options, pad_intermediate=options.pad_intermediate)
    others = list(unplanned(model, options, pad_intermediate=options.pad_intermediate))
    in_bf16 = {shape for shape in shapes if shape.what in options.calls.bf16}
    others += [
        Unplanned(shape.what, shape.n, shape.k, shape.num_experts, model.num_layers, BF16_IN_ENGINE, False)
        for shape in shapes
        if shape in in_bf16
    ]
    for shape in extra:
        if reason := shape.refusal():
            raise ConfigError("extra", "GEMMs that a kernel serves", shape, reason)
    shapes = (*(shape for shape in shapes if shape not in in_bf16), *extra)
    indexer, refusal = _served(model.indexer, options.calls)
    if refusal:
        others.append(
            Unplanned("indexer's logits and top-k", None, None, None, model.num_layers, refusal, True)
        )
    bounds = Bounds.of(model, options)
    # Engines compute in bf16 if a checkpoint is in fp32.
    in_fp32 = options.engine is not None and model.dtype == "float32"
    computed = replace(model, dtype="bfloat16") if in_fp32 else model
    rows = list(gemm_rows(shapes, bounds, options))
    serves = bool(rows)
    further = {  # generators: an op's rows are made only if the engine calls it
        "quantize_fp8": quantize_rows(computed, shapes, indexer, bounds, options),
        "silu_mul_quantize": silu_mul_rows(shapes, bounds, options),
        "grouped_gemm_silu_mul_fp8": gemm_silu_mul_rows(shapes, bounds, options),
        "moe_permute": moe_rows(computed, shapes, bounds, options),
        "route_topk": route_rows(computed, bounds, options),
    }
    for op, more in further.items():
        if op in options.calls.further:
            rows += more
    if options.weight_gradients:
        rows += weight_gradient_rows(shapes, bounds, options)
    if indexer is not None:
        rows += indexer_rows(computed, indexer, options)
    planned = Plan(model, options, tuple(rows), tuple(others))
    if strict:
        demand_all(planned)
    if planned.lacking and not serves:
        listed = "; ".join(map(str, planned.lacking))
        raise ModelError("model", "a layer that a kernel serves", listed, planned.remedy)
    return planned


def _served(indexer: Indexer | None, calls: EngineCalls) -> tuple[Indexer | None, str]:
    """The indexer, padded as the engine does, if the ops serve its sizes, and the reason if they do not."""
    if indexer is None:
        return None, ""
    indexer = replace(indexer, num_heads=max(indexer.num_heads, calls.least_heads))
    refusal = refuse_heads(indexer.num_heads) or refuse_head_dim(indexer.head_dim)
    if "indexer_topk" in calls.further:
        refusal = refusal or refuse_topk(indexer.topk)
    return (None if refusal else indexer), refusal


def demand_all(plan: Plan) -> None:
    """Raise ModelError if `plan` lacks layers."""
    if plan.lacking:
        remedy = "plan without strict (--strict) if other kernels serve these layers"
        if plan.remedy:
            remedy = f"{plan.remedy}; or {remedy}"
        listed = "; ".join(map(str, plan.lacking))
        raise ModelError("strict", "a kernel for every linear layer with quantized weights", listed, remedy)
