"""Hugging Face `config.json` -> `ModelDescription`: the dimensions that decide which kernels run.

Parsing is strict: a field that is missing, has the wrong type or contradicts another field raises
`ModelError`. Nothing is guessed from a model's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moe_fp8.errors import ModelError
from moe_fp8.problems import SCALE_BLOCK, InDtype

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class MlaAttention:
    """Multi-head latent attention. `q_lora_rank` is None if queries are projected directly."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class GqaAttention:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


Attention = MlaAttention | GqaAttention


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of sparse attention, which picks `topk` positions for every query."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class ModelDescription:
    """Dimensions of a mixture-of-experts model, before any parallelism.

    `moe_intermediate_size` is the size of one routed expert. `dense_intermediate_size` is the size in
    layers without experts, or None if every layer has experts. `max_positions` is the longest context.
    `dtype` is the dtype of the activations before quantization.
    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    max_positions: int
    dtype: InDtype
    attention: Attention
    indexer: Indexer | None
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    dense_intermediate_size: int | None


class _Fields:
    """Typed, strict access to the fields of one config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self._config.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._config.get(name)

    def number(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None:
            if default is not None:
                return default
            raise ModelError(name, f"an integer >= {least}", None, "the model's config.json must have it")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(name, f"an integer >= {least}", value)
        return value

    def alias(self, *names: str) -> int:
        """The value of a field that has several names; raises ModelError if they have different values."""
        found = {name: self.number(name) for name in names if self.has(name)}
        if not found:
            raise ModelError(" | ".join(names), "one of these fields", None, "is this a MoE model's config?")
        if len(set(found.values())) > 1:
            raise ModelError(" | ".join(found), "one value", found, "remove the field that is wrong")
        return next(iter(found.values()))


def read_config(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`: a config file, or a model folder that has a `config.json`.

    Raises ModelError if the file does not exist, cannot be read or is not a JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            str(file), "a readable config.json", error.strerror, "pass a model folder or its config.json"
        ) from error
    except ValueError as error:
        raise ModelError(str(file), "a JSON object", str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(str(file), "a JSON object", type(config).__name__)
    return cast("dict[str, Any]", config)


def load_model(path: str | Path) -> ModelDescription:
    """The description of the model in `path`, a folder or a config file. Raises ModelError."""
    path = Path(path)
    name = path.name if path.is_dir() else path.stem
    return describe(read_config(path), name=name or path.resolve().name)


def describe(config: Mapping[str, Any], *, name: str = "model") -> ModelDescription:
    """The description of the model that a parsed `config.json` defines.

    Attention is latent if `kv_lora_rank` is given, else grouped-query. Raises ModelError for a
    missing, malformed or contradictory field, and if the weights are not FP8 in 128 x 128 blocks.
    """
    fields = _Fields(config)
    _check_quantization(fields.raw("quantization_config"))
    num_layers = fields.number("num_hidden_layers")
    num_experts = fields.alias("n_routed_experts", "num_experts")
    experts_per_token = fields.number("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ModelError(
            "num_experts_per_tok", f"at most the number of experts ({num_experts})", experts_per_token
        )
    dense = _has_dense_layers(fields, num_layers)
    return ModelDescription(
        name=name,
        architecture=_architecture(fields),
        hidden_size=fields.number("hidden_size"),
        num_layers=num_layers,
        max_positions=fields.number("max_position_embeddings"),
        dtype=_dtype(fields),
        attention=_attention(fields),
        indexer=_indexer(fields),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_intermediate_size=fields.number("moe_intermediate_size"),
        num_shared_experts=fields.number("n_shared_experts", least=0, default=0),
        dense_intermediate_size=fields.number("intermediate_size") if dense else None,
    )


def _architecture(fields: _Fields) -> str:
    value = fields.raw("model_type")
    if not isinstance(value, str) or not value:
        raise ModelError("model_type", "a string", value, "the model's config.json must have it")
    return value


def _dtype(fields: _Fields) -> InDtype:
    names = [name for name in ("dtype", "torch_dtype") if fields.has(name)]
    values = {fields.raw(name) for name in names if isinstance(fields.raw(name), str)}
    if len(values) > 1:
        raise ModelError(" | ".join(names), "one value", sorted(values), "remove the field that is wrong")
    if not values:
        raise ModelError("torch_dtype", f"one of {', '.join(_DTYPES)}", fields.raw("torch_dtype"))
    value = values.pop()
    if value not in _DTYPES:
        raise ModelError(names[0], f"one of {', '.join(_DTYPES)}", value)
    return cast(InDtype, value)


def _attention(fields: _Fields) -> Attention:
    num_heads = fields.number("num_attention_heads")
    if fields.has("kv_lora_rank"):
        return MlaAttention(
            num_heads=num_heads,
            q_lora_rank=fields.number("q_lora_rank") if fields.has("q_lora_rank") else None,
            kv_lora_rank=fields.number("kv_lora_rank"),
            qk_nope_head_dim=fields.number("qk_nope_head_dim"),
            qk_rope_head_dim=fields.number("qk_rope_head_dim"),
            v_head_dim=fields.number("v_head_dim"),
        )
    if fields.has("q_lora_rank"):
        raise ModelError(
            "kv_lora_rank", "an integer, as q_lora_rank is given", None, "latent attention needs both ranks"
        )
    num_kv_heads = fields.number("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError("num_key_value_heads", f"a divisor of {num_heads} attention heads", num_kv_heads)
    return GqaAttention(num_heads, num_kv_heads, fields.number("head_dim"))


def _indexer(fields: _Fields) -> Indexer | None:
    names = ("index_n_heads", "index_head_dim", "index_topk")
    given = [name for name in names if fields.has(name)]
    if not given:
        if fields.raw("model_type") == "deepseek_v32":
            raise ModelError(", ".join(names), "integers, as deepseek_v32 has an indexer", None)
        return None
    if len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ModelError(missing, f"an integer, as {', '.join(given)} is given", None)
    if not fields.has("kv_lora_rank") or not fields.has("q_lora_rank"):
        raise ModelError(
            "kv_lora_rank, q_lora_rank", "integers, as index_n_heads is given", None,
            "the indexer projects its queries from the queries of latent attention",
        )  # fmt: skip
    return Indexer(*(fields.number(name) for name in names))


def _has_dense_layers(fields: _Fields, num_layers: int) -> bool:
    """Whether any layer has a plain MLP: the first layers (DeepSeek, GLM), or listed layers (Qwen)."""
    first = fields.number("first_k_dense_replace", least=0, default=0)
    if first > num_layers:
        raise ModelError("first_k_dense_replace", f"at most num_hidden_layers ({num_layers})", first)
    listed = fields.raw("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise ModelError("mlp_only_layers", "a list of layer numbers", listed)
    step = fields.number("decoder_sparse_step", default=1)
    frequency = fields.number("moe_layer_freq", default=1)
    return first > 0 or bool(listed) or step > 1 or frequency > 1


def _check_quantization(value: Any) -> None:
    remedy = "use the FP8 checkpoint of the model: its weights are float8_e4m3fn in 128 x 128 blocks"
    if not isinstance(value, dict):
        raise ModelError("quantization_config", "an object", value, remedy)
    if value.get("quant_method") != "fp8":
        raise ModelError("quantization_config.quant_method", "'fp8'", value.get("quant_method"), remedy)
    expected = [SCALE_BLOCK, SCALE_BLOCK]
    if value.get("weight_block_size") != expected:
        raise ModelError(
            "quantization_config.weight_block_size", str(expected), value.get("weight_block_size"), remedy
        )
