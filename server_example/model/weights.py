"""Builds the model's weights from a source, and fuses those that run as one."""

from __future__ import annotations

from pathlib import Path

import torch

from server_example.model.config import FP8_BLOCK, ModelConfig
from server_example.model.indexer import IndexerWeights
from server_example.model.layers import Fp8Weight
from server_example.model.mla import MlaWeights
from server_example.model.moe import MlpWeights, MoeWeights
from server_example.model.sources import Checkpoint, RandomSource, Source
from server_example.model.transformer import LayerWeights, ModelWeights
from server_example.options import LoadFormat


def _empty(source: Source, *shape: int) -> Fp8Weight:
    """An FP8 weight [..., N, K] on the device, without values."""
    *experts, n, k = shape
    return Fp8Weight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=source.device),
        torch.empty(*experts, -(-n // FP8_BLOCK), k // FP8_BLOCK, device=source.device),
    )


def _fp8(source: Source, name: str, n: int, k: int) -> Fp8Weight:
    weight = _empty(source, n, k)
    source.fill(name, weight)
    return weight


def _fill_joined(source: Source, into: Fp8Weight, *parts: tuple[str, int]) -> None:
    """Fills the rows of `into` [N, K] with (name, rows), in this order.

    All parts but the last have whole scale blocks: `ModelConfig` checks these sizes.
    """
    start = 0
    for name, rows in parts:
        end = start + rows
        blocks = slice(start // FP8_BLOCK, -(-end // FP8_BLOCK))
        source.fill(name, Fp8Weight(into.weight[start:end], into.scale[blocks]))
        start = end


def _fill_mlp(source: Source, name: str, into: MlpWeights) -> None:
    intermediate = into.down.weight.shape[1]
    gate, up = (f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate)
    _fill_joined(source, into.gate_up, gate, up)
    source.fill(f"{name}.down_proj", into.down)


def _mlp(source: Source, name: str, hidden: int, intermediate: int) -> MlpWeights:
    weights = MlpWeights(_empty(source, 2 * intermediate, hidden), _empty(source, hidden, intermediate))
    _fill_mlp(source, name, weights)
    return weights


def _moe(source: Source, name: str, config: ModelConfig) -> MoeWeights:
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    count = config.n_routed_experts
    gate_up = _empty(source, count, 2 * intermediate, hidden)
    down = _empty(source, count, hidden, intermediate)
    for expert in range(count):
        one = MlpWeights(
            Fp8Weight(gate_up.weight[expert], gate_up.scale[expert]),
            Fp8Weight(down.weight[expert], down.scale[expert]),
        )
        _fill_mlp(source, f"{name}.experts.{expert}", one)
    return MoeWeights(
        gate=source.full(f"{name}.gate.weight", count, hidden),
        correction_bias=source.full(f"{name}.gate.e_score_correction_bias", count),
        experts=MlpWeights(gate_up, down),
        shared=_mlp(source, f"{name}.shared_experts", hidden, intermediate * config.n_shared_experts),
    )


def _attention(source: Source, name: str, config: ModelConfig) -> MlaWeights:
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    kv_b = _fp8(source, f"{name}.kv_b_proj", heads * (nope + value), config.kv_lora_rank)
    k_up, v_up = kv_b.dequantized().view(heads, nope + value, -1).split((nope, value), dim=1)
    qkv_a = _empty(source, config.q_lora_rank + config.latent_dim, hidden)
    q_a, kv_a = (f"{name}.q_a_proj", config.q_lora_rank), (f"{name}.kv_a_proj_with_mqa", config.latent_dim)
    _fill_joined(source, qkv_a, q_a, kv_a)
    return MlaWeights(
        qkv_a=qkv_a,
        q_norm=source.full(f"{name}.q_a_layernorm.weight", config.q_lora_rank),
        q_b=_fp8(source, f"{name}.q_b_proj", heads * (nope + rope), config.q_lora_rank),
        kv_norm=source.full(f"{name}.kv_a_layernorm.weight", config.kv_lora_rank),
        k_up=k_up.contiguous(),
        v_up=v_up.contiguous(),
        o=_fp8(source, f"{name}.o_proj", hidden, heads * value),
    )


def _indexer(source: Source, name: str, config: ModelConfig) -> IndexerWeights:
    heads, dim = config.index_n_heads, config.index_head_dim
    return IndexerWeights(
        wq_b=_fp8(source, f"{name}.wq_b", heads * dim, config.q_lora_rank),
        wk=_fp8(source, f"{name}.wk", dim, config.hidden_size),
        k_norm=source.full(f"{name}.k_norm.weight", dim),
        k_norm_bias=source.full(f"{name}.k_norm.bias", dim),
        weights_proj=source.full(f"{name}.weights_proj.weight", heads, config.hidden_size),
    )


def load_weights(
    folder: Path, config: ModelConfig, device: torch.device, *, load_format: LoadFormat = "safetensors"
) -> ModelWeights:
    """All weights on `device`. Raises `ModelError` with the name of a wrong tensor.

    "safetensors" reads `folder`. "dummy" reads nothing and makes random weights of the config's sizes.
    """
    source: Source
    source = RandomSource(config, device) if load_format == "dummy" else Checkpoint(folder, config, device)
    hidden, layers = config.hidden_size, []
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}"
        feed_forward: MlpWeights | MoeWeights
        if number < config.first_k_dense_replace:
            feed_forward = _mlp(source, f"{name}.mlp", hidden, config.intermediate_size)
        else:
            feed_forward = _moe(source, f"{name}.mlp", config)
        layers.append(
            LayerWeights(
                input_norm=source.full(f"{name}.input_layernorm.weight", hidden),
                attention=_attention(source, f"{name}.self_attn", config),
                indexer=_indexer(source, f"{name}.self_attn.indexer", config),
                post_norm=source.full(f"{name}.post_attention_layernorm.weight", hidden),
                feed_forward=feed_forward,
            )
        )
    embedding = source.full("model.embed_tokens.weight", config.vocab_size, hidden)
    tied = config.tie_word_embeddings
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=source.full("model.norm.weight", hidden),
        head=embedding if tied else source.full("lm_head.weight", config.vocab_size, hidden),
    )
    source.finish()
    return weights
