"""The fields of a DeepSeek-V3.2 `config.json` that the model needs, with checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_fp8.errors import ModelError
from moe_fp8.warmup import read_config
from server_example.model.rope import RopeConfig

FP8_BLOCK = 128


class ModelConfig(BaseModel):
    """Names are the names of the Hugging Face config; other fields of that config are ignored.

    A field is refused, and not ignored, if it would change the arithmetic and is not implemented (a rope
    scaling other than YaRN, an activation other than SiLU, another scoring function). Fields that some
    configs leave out have the architecture's value.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["deepseek_v32"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope: RopeConfig
    rope_interleave: Literal[True] = True
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    #: Layers behind the model that predict further tokens (MTP). The model does not run them.
    num_nextn_predict_layers: int = Field(0, ge=0)

    num_attention_heads: int = Field(gt=0)
    q_lora_rank: int = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)

    index_n_heads: Literal[8, 16, 32, 64]
    index_head_dim: Literal[128]
    index_topk: int = Field(gt=0)

    intermediate_size: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    first_k_dense_replace: int = Field(ge=0)
    n_routed_experts: int = Field(gt=0)
    n_shared_experts: int = Field(gt=0)
    num_experts_per_tok: int = Field(gt=0)
    n_group: int = Field(gt=0)
    topk_group: int = Field(gt=0)
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None

    quantization_config: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Gives `RopeConfig` the rope's fields, and takes an end token out of a list of one."""
        rope = {name: raw[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in raw}
        end = raw.get("eos_token_id")
        if isinstance(end, list) and len(end) == 1:
            end = end[0]
        return {**raw, "rope": rope, "eos_token_id": end}

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        quantization = self.quantization_config
        if quantization.get("quant_method") != "fp8" or quantization.get("weight_block_size") != [128, 128]:
            raise ValueError(
                "quantization_config: expected quant_method 'fp8' with weight_block_size [128, 128]"
            )
        if self.n_routed_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError("n_group must divide n_routed_experts and topk_group lie in 1..n_group")
        if self.num_experts_per_tok > self.n_routed_experts // self.n_group * self.topk_group:
            raise ValueError("num_experts_per_tok exceeds the experts of topk_group groups")
        types = self.mlp_layer_types
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        if types and types != ["dense"] * dense + ["sparse"] * (self.num_hidden_layers - dense):
            raise ValueError("mlp_layer_types must be first_k_dense_replace dense layers, then sparse ones")
        for name in (
            "hidden_size",
            "q_lora_rank",
            "kv_lora_rank",
            "intermediate_size",
            "moe_intermediate_size",
        ):
            if getattr(self, name) % FP8_BLOCK:
                raise ValueError(f"{name} must be a multiple of {FP8_BLOCK}: it is the K of an FP8 GEMM")
        if self.num_attention_heads * self.v_head_dim % FP8_BLOCK:
            raise ValueError(f"num_attention_heads * v_head_dim must be a multiple of {FP8_BLOCK}")
        if self.qk_rope_head_dim not in (64, 128):
            raise ValueError(
                "qk_rope_head_dim must be 64 or 128: it ends an FP8 weight and starts an index head"
            )
        if self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim) % 64:
            raise ValueError("num_attention_heads * qk_nope_head_dim must be a multiple of 64")
        return self

    @property
    def latent_dim(self) -> int:
        """Elements of one token in the attention cache: compressed KV, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What the attention multiplies its scores by."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        yarn = self.rope.rope_scaling
        return scale if yarn is None else scale * yarn.softmax_scale

    @property
    def power_of_two_scales(self) -> bool:
        return self.quantization_config.get("scale_fmt") == "ue8m0"

    @classmethod
    def load(cls, folder: Path, **overrides: Any) -> ModelConfig:
        """Reads `folder/config.json`, or a config file, with `overrides` in the place of its fields.

        Fewer layers than the file's take the first of its `mlp_layer_types`.
        Raises `ModelError` with the name of the wrong field.
        """
        raw = {**read_config(folder), **overrides}
        layers, types = overrides.get("num_hidden_layers"), raw.get("mlp_layer_types")
        if layers is not None and isinstance(types, list):
            raw["mlp_layer_types"] = types[:layers]
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "config.json"
            raise ModelError(field, first["msg"], first["input"] if first["loc"] else str(folder)) from None
