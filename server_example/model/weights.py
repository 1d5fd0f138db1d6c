"""Reads FP8 block-quantized safetensors with Hugging Face names, and fuses weights that run as one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moe_fp8.errors import ModelError
from server_example.model.config import ModelConfig
from server_example.model.indexer import IndexerWeights
from server_example.model.layers import Fp8Weight
from server_example.model.mla import MlaWeights
from server_example.model.moe import MlpWeights, MoeWeights
from server_example.model.transformer import LayerWeights, ModelWeights


class Checkpoint:
    """Tensors by name, from all `*.safetensors` of a folder. Every mismatch raises `ModelError`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    found = {name: file.get_tensor(name) for name in list(file.keys())}
            except (OSError, SafetensorError) as error:
                raise ModelError(str(path), "a readable safetensors file", str(error)) from error
            if twice := sorted(found.keys() & self._tensors.keys()):
                raise ModelError(twice[0], "one tensor of this name", "another in " + path.name)
            self._tensors |= found
        if not self._tensors:
            raise ModelError("model", "a folder with *.safetensors", str(folder))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The checked tensor on the CPU. `dtype` None: bf16, fp16 or fp32, converted to fp32."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(name, f"a tensor of shape {shape}", None, "the checkpoint lacks it")
        # An FP8 tensor without its scale, or an integer tensor, would load as numbers without meaning.
        allowed = (torch.bfloat16, torch.float16, torch.float32) if dtype is None else (dtype,)
        if tuple(tensor.shape) != shape or tensor.dtype not in allowed:
            names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise ModelError(name, f"{names} of shape {shape}", f"{tensor.dtype} {tuple(tensor.shape)}")
        return tensor if dtype else tensor.float()

    def full(self, name: str, *shape: int) -> torch.Tensor:
        """An unquantized tensor, as fp32 on the device."""
        return self.take(name, shape).to(self.device)

    def fp8(self, name: str, n: int, k: int) -> Fp8Weight:
        """`name.weight` and `name.weight_scale_inv` on the CPU; despite its name the scale multiplies."""
        return Fp8Weight(
            self.take(f"{name}.weight", (n, k), torch.float8_e4m3fn),
            self.take(f"{name}.weight_scale_inv", (-(-n // 128), k // 128), torch.float32),
        )

    def place(self, weight: Fp8Weight) -> Fp8Weight:
        return Fp8Weight(
            weight.weight.to(self.device).contiguous(), weight.scale.to(self.device).contiguous()
        )

    def finish(self) -> None:
        """Raises if a tensor was never taken, because the config then describes another model."""
        if self._tensors:
            raise ModelError(
                "model", "a checkpoint with only the tensors of its config", sorted(self._tensors)[:5]
            )


def _join(first: Fp8Weight, second: Fp8Weight) -> Fp8Weight:
    """Rows of `first`, then rows of `second`. `first` must have whole scale blocks, which cannot straddle."""
    if first.weight.shape[0] % 128:
        raise ModelError("weight", "a multiple of 128 rows to fuse behind", first.weight.shape[0])
    # Join the bytes, because torch cannot concatenate fp8 on every backend.
    rows = torch.cat((first.weight.view(torch.uint8), second.weight.view(torch.uint8)))
    return Fp8Weight(rows.view(torch.float8_e4m3fn), torch.cat((first.scale, second.scale)))


def _stack(weights: list[Fp8Weight]) -> Fp8Weight:
    data = torch.stack([weight.weight.view(torch.uint8) for weight in weights])
    return Fp8Weight(data.view(torch.float8_e4m3fn), torch.stack([weight.scale for weight in weights]))


def _mlp(checkpoint: Checkpoint, name: str, hidden: int, intermediate: int) -> MlpWeights:
    """The weights stay on the CPU."""
    gate = checkpoint.fp8(f"{name}.gate_proj", intermediate, hidden)
    up = checkpoint.fp8(f"{name}.up_proj", intermediate, hidden)
    return MlpWeights(_join(gate, up), checkpoint.fp8(f"{name}.down_proj", hidden, intermediate))


def _place_mlp(checkpoint: Checkpoint, weights: MlpWeights) -> MlpWeights:
    return MlpWeights(checkpoint.place(weights.gate_up), checkpoint.place(weights.down))


def _moe(checkpoint: Checkpoint, name: str, config: ModelConfig) -> MoeWeights:
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    experts = [
        _mlp(checkpoint, f"{name}.experts.{expert}", hidden, intermediate)
        for expert in range(config.n_routed_experts)
    ]
    shared = _mlp(checkpoint, f"{name}.shared_experts", hidden, intermediate * config.n_shared_experts)
    stacked = MlpWeights(
        _stack([expert.gate_up for expert in experts]), _stack([expert.down for expert in experts])
    )
    return MoeWeights(
        gate=checkpoint.full(f"{name}.gate.weight", config.n_routed_experts, hidden),
        correction_bias=checkpoint.full(f"{name}.gate.e_score_correction_bias", config.n_routed_experts),
        experts=_place_mlp(checkpoint, stacked),
        shared=_place_mlp(checkpoint, shared),
    )


def _attention(checkpoint: Checkpoint, name: str, config: ModelConfig) -> MlaWeights:
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    kv_b = checkpoint.fp8(f"{name}.kv_b_proj", heads * (nope + value), config.kv_lora_rank)
    k_up, v_up = kv_b.dequantized().view(heads, nope + value, -1).split((nope, value), dim=1)
    qkv_a = _join(
        checkpoint.fp8(f"{name}.q_a_proj", config.q_lora_rank, hidden),
        checkpoint.fp8(f"{name}.kv_a_proj_with_mqa", config.latent_dim, hidden),
    )
    return MlaWeights(
        qkv_a=checkpoint.place(qkv_a),
        q_norm=checkpoint.full(f"{name}.q_a_layernorm.weight", config.q_lora_rank),
        q_b=checkpoint.place(checkpoint.fp8(f"{name}.q_b_proj", heads * (nope + rope), config.q_lora_rank)),
        kv_norm=checkpoint.full(f"{name}.kv_a_layernorm.weight", config.kv_lora_rank),
        k_up=k_up.contiguous().to(checkpoint.device),
        v_up=v_up.contiguous().to(checkpoint.device),
        o=checkpoint.place(checkpoint.fp8(f"{name}.o_proj", hidden, heads * value)),
    )


def _indexer(checkpoint: Checkpoint, name: str, config: ModelConfig) -> IndexerWeights:
    heads, dim = config.index_n_heads, config.index_head_dim
    return IndexerWeights(
        wq_b=checkpoint.place(checkpoint.fp8(f"{name}.wq_b", heads * dim, config.q_lora_rank)),
        wk=checkpoint.place(checkpoint.fp8(f"{name}.wk", dim, config.hidden_size)),
        k_norm=checkpoint.full(f"{name}.k_norm.weight", dim),
        k_norm_bias=checkpoint.full(f"{name}.k_norm.bias", dim),
        weights_proj=checkpoint.full(f"{name}.weights_proj.weight", heads, config.hidden_size),
    )


def load_weights(folder: Path, config: ModelConfig, device: torch.device) -> ModelWeights:
    """All weights of `folder` on `device`. Raises `ModelError` with the name of a wrong tensor."""
    checkpoint = Checkpoint(folder, device)
    hidden, layers = config.hidden_size, []
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}"
        feed_forward: MlpWeights | MoeWeights
        if number < config.first_k_dense_replace:
            dense = _mlp(checkpoint, f"{name}.mlp", hidden, config.intermediate_size)
            feed_forward = _place_mlp(checkpoint, dense)
        else:
            feed_forward = _moe(checkpoint, f"{name}.mlp", config)
        layers.append(
            LayerWeights(
                input_norm=checkpoint.full(f"{name}.input_layernorm.weight", hidden),
                attention=_attention(checkpoint, f"{name}.self_attn", config),
                indexer=_indexer(checkpoint, f"{name}.self_attn.indexer", config),
                post_norm=checkpoint.full(f"{name}.post_attention_layernorm.weight", hidden),
                feed_forward=feed_forward,
            )
        )
    weights = ModelWeights(
        embedding=checkpoint.full("model.embed_tokens.weight", config.vocab_size, hidden),
        layers=tuple(layers),
        norm=checkpoint.full("model.norm.weight", hidden),
        head=checkpoint.full("lm_head.weight", config.vocab_size, hidden),
    )
    checkpoint.finish()
    return weights
