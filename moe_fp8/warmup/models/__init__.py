"""Hugging Face `config.json` -> `ModelDescription`: the linear layers that decide which kernels run.

Parsing is strict: a field that is missing, has the wrong type or contradicts another field raises
`ModelError`. Nothing is guessed from a model's name: `model_type` tells the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from moe_fp8.errors import ModelError
from moe_fp8.problems import InDtype
from moe_fp8.warmup.models import blocks
from moe_fp8.warmup.models.description import Indexer, Linear, ModelDescription, Part
from moe_fp8.warmup.models.families import Family, family_of, known, shared_fields
from moe_fp8.warmup.models.fields import Fields, read_config
from moe_fp8.warmup.models.layers import expert_layers
from moe_fp8.warmup.models.quantization import has_quantization, read_quantization

__all__ = ["Indexer", "Linear", "ModelDescription", "Part", "describe", "load_model", "read_config"]

_DTYPES = ("bfloat16", "float16", "float32")

#: Far more layers than any model has. Planning looks at each layer.
_MOST_LAYERS = 10_000


def load_model(
    path: str | Path, *, quantize: str | None = None, read_as: str | None = None
) -> ModelDescription:
    """The description of the model in `path`, a folder or a config file. See `describe`.

    If the folder's config does not say how layers are quantized, ModelOpt's `hf_quant_config.json` beside it
    counts.
    """
    path = Path(path)
    name, config = path.stem, read_config(path)
    if path.is_dir() or path.name == "config.json":
        folder = path if path.is_dir() else path.parent
        name = folder.name or folder.resolve().name
        modelopt = folder / "hf_quant_config.json"
        if not has_quantization(config) and modelopt.exists():
            config["quantization_config"] = {"quant_method": "modelopt", **read_config(modelopt)}
    return describe(config, name=name, quantize=quantize, read_as=read_as)


def describe(
    config: Mapping[str, Any],
    *,
    name: str = "model",
    quantize: str | None = None,
    read_as: str | None = None,
) -> ModelDescription:
    """The description of the model that a parsed `config.json` defines.

    `quantize`: "fp8-block" for a bf16 checkpoint that the engine quantizes while it loads it. `read_as`: the
    known `model_type` whose layers an unknown architecture has; it counts as the config's. Raises ModelError
    for an unknown architecture, for a missing (all of them), malformed or contradictory field, and if the
    weights are not FP8 in 128 x 128 blocks.
    """
    fields = Fields(config)
    family = _family(fields, read_as)
    quantization = read_quantization(config, quantize)
    num_layers = fields.number(*family.layer_count, most=_MOST_LAYERS)
    num_experts = fields.number("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    experts_per_token = fields.most("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    max_positions = fields.number("max_position_embeddings")
    hidden = fields.number("hidden_size")
    fields.demand(
        1 <= experts_per_token <= num_experts, "num_experts_per_tok",
        f"at least 1 and at most the number of experts ({num_experts})", experts_per_token,
    )  # fmt: skip
    predictors = fields.number(
        *family.predictor_count, least=0, most=_MOST_LAYERS, default=family.num_predictors
    )
    layers = tuple(range(num_layers + predictors))
    attention, indexer = family.attention(fields, layers)
    mlps, num_shared = _mlps(fields, family, num_layers, layers, quantized_by_engine=quantize is not None)
    linears = [*attention, *mlps, *_outer(fields, family, layers[num_layers:])]
    dtype = _dtype(fields)
    fields.complete()
    return ModelDescription(
        name=name,
        architecture=fields.text("model_type"),
        hidden_size=hidden,
        num_layers=num_layers,
        max_positions=max_positions,
        dtype=dtype,
        linears=tuple(
            part for linear in linears for part in quantization.apply(family.spelled(linear), num_layers)
        ),
        indexer=indexer,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_shared_experts=num_shared,
    )


def _family(fields: Fields, read_as: str | None) -> Family:
    """The family of the architecture, whose name becomes the `model_type` of `fields`."""
    if read_as is not None:
        family = family_of(read_as)
        if family is None:
            raise ModelError("read_as", f"one of {', '.join(known())}", read_as)
        fields.replace("model_type", read_as)
        return family
    names = [
        value for value in (fields.raw("model_type"), fields.outer("model_type")) if isinstance(value, str)
    ]
    for name in names:
        family = family_of(name)
        if family is not None:
            fields.replace("model_type", name)
            return family
    if not names:
        raise ModelError(
            "model_type", "a string", fields.raw("model_type"),
            "the config.json must have it; or name a known architecture with read_as (--read-as)",
        )  # fmt: skip
    remedy = "if it has the layers of a known architecture, name this with read_as (--read-as)"
    missing = fields.lacking("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok")
    if missing:
        remedy += f"; of the fields that every architecture has, these are missing: {', '.join(missing)}"
    raise ModelError("model_type", f"a known architecture ({', '.join(known())})", names[0], remedy)


def _dtype(fields: Fields) -> InDtype:
    """The dtype of the activations: as the config says, else bfloat16, as engines take it then."""
    names = [name for name in ("dtype", "torch_dtype") if fields.has(name)]
    values = {fields.raw(name) for name in names if isinstance(fields.raw(name), str)}
    if len(values) > 1:
        raise ModelError(" | ".join(names), "one value", sorted(values), "remove the field that is wrong")
    if not values and not names:
        return "bfloat16"
    if not values:
        raise ModelError(names[0], f"one of {', '.join(_DTYPES)}", fields.raw(names[0]))
    value = values.pop().removeprefix("torch.")
    if value not in _DTYPES:
        raise ModelError(names[0], f"one of {', '.join(_DTYPES)}", value)
    return cast(InDtype, value)


def _first(fields: Fields, names: tuple[str, ...]) -> int:
    """The first field of `names` that exists; if none exists, the first name is missing."""
    return fields.same(next((name for name in names if fields.has(name)), names[0]))


def _mlps(
    fields: Fields, family: Family, num_layers: int, layers: tuple[int, ...], *, quantized_by_engine: bool
) -> tuple[list[Linear], int]:
    """The linear layers of MLPs, experts and routers, and the number of shared experts."""
    sparse = expert_layers(fields, num_layers)
    with_experts = set(sparse)
    dense = tuple(i for i in range(num_layers) if i not in with_experts)
    if family.dense_everywhere:
        dense = tuple(range(num_layers))
    # Prediction layers have the kind of MLP that the last layer has.
    if family.dense_predictors or num_layers - 1 not in sparse:
        dense = (*dense, *layers[num_layers:])
    else:
        sparse = (*sparse, *layers[num_layers:])
    hidden, width = fields.number("hidden_size"), _first(fields, family.expert_width)
    found = []
    if dense:
        dense_width = _first(fields, family.dense_width)
        names = blocks.projections(family.dense)
        found += blocks.mlp(fields, "mlp", dense, dense_width, "mlp", names, padded=family.padded)
    moe = family.moe
    shared_count = _shared_count(fields, family)
    shared = shared_count * width
    if family.shared_width and any(fields.has(name) for name in family.shared_width):
        shared = _first(fields, family.shared_width) * max(1, shared_count)
    _refuse_other_shared(fields, family, (shared_count, shared))
    if shared:
        names = blocks.projections(f"{moe}.{family.shared}")
        found += blocks.mlp(fields, "shared", sparse, shared, "shared", names, padded=family.padded)
        if family.shared_gate:
            name = f"{moe}.{family.shared}_gate"
            found.append(blocks.whole("shared.gate", 1, hidden, sparse, name, blocks.GATE))
    modules = tuple(f"{moe}.experts.{name}" for name in family.projections)
    # An engine that quantizes experts pads a rank's width to whole blocks (vLLM).
    experts = blocks.mlp(fields, "experts", sparse, width, "experts", modules, padded=quantized_by_engine)
    if _expert_dtype(fields, family) == "fp4":
        experts = [linear.because("experts in FP4 are not served yet", lacking=True) for linear in experts]
    found += experts
    num_experts = fields.number("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    routed = num_experts + fields.number("zero_expert_num", least=0, default=0)
    reason = "" if quantized_by_engine and family.quantized_router else blocks.ROUTER
    found.append(blocks.whole("router", routed, hidden, sparse, f"{moe}.gate", reason))
    return found, shared_count if shared else 0


def _expert_dtype(fields: Fields, family: Family) -> str:
    """The format of the experts, "fp4" or "fp8": as the config says, else that of the family."""
    stated = fields.raw("quantization_config")
    within = stated if isinstance(stated, dict) else {}
    # The first name is MiMo's and the second is Ling's. Engines read them in any model.
    if "mxfp4" in (within.get("store_dtype"), within.get("routed_experts_quant_method")):
        return "fp4"
    value = fields.raw("expert_dtype") if fields.has("expert_dtype") else within.get("expert_dtype")
    if value is None:
        return "fp4" if family.fp4_experts else "fp8"
    if value not in ("fp4", "mxfp4", "fp8", "float8_e4m3fn"):
        raise ModelError("expert_dtype", "fp4, mxfp4, fp8 or float8_e4m3fn", value)
    return "fp4" if value in ("fp4", "mxfp4") else "fp8"


def _refuse_other_shared(fields: Fields, family: Family, read: tuple[int, int]) -> None:
    """Refuse shared experts in fields that the family does not read, unless they agree with what was read."""
    for name in sorted(shared_fields() - {*family.shared_count, *family.shared_width}):
        told = fields.raw(name) or 0
        if told and fields.most(name) not in read:
            raise ModelError(
                name, f"0, since a {fields.raw('model_type')} model names its shared experts otherwise", told,
                "name an architecture whose shared experts have this field with read_as",
            )  # fmt: skip


def _shared_count(fields: Fields, family: Family) -> int:
    """The number of shared experts; a width of its own without a number means one."""
    has_width = any(fields.has(name) and fields.most(name) for name in family.shared_width)
    return fields.same(*family.shared_count, default=1 if has_width else 0)


def _outer(fields: Fields, family: Family, predictors: tuple[int, ...]) -> list[Linear]:
    """The output head, projections of prediction layers, and hyper-connections."""
    hidden = fields.number("hidden_size")
    vocabulary = fields.number("vocab_size")
    found = [blocks.whole("lm_head", vocabulary, hidden, (), "lm_head", blocks.HEAD)]
    if predictors:
        found += family.predictor(fields, predictors)
    if fields.has("hc_mult"):
        found.append(blocks.hyper_connections(fields))
    return found
