"""The models of class engine: widths of real checkpoints, few layers, and how vLLM runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

VOCABULARY = 32768

_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _unconverted(layers: int, router: str) -> dict[str, Any]:
    return {
        **_BLOCKS,
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.{router}" for i in range(layers))],
    }


@dataclass(frozen=True)
class ServedModel:
    """A config, the tokens of each prompt, and vLLM's options for the model.

    `attention`: the attention backend, or "" for vLLM's choice. `drafts`: tokens that the MTP layer proposes
    in each step. `mode`: vLLM's compilation mode; 3 is what `vllm serve` uses, 0 leaves torch.compile out.
    `backend`: what runs the graph that torch.compile has traced; "eager" runs its ops one by one, and "" is
    vLLM's choice, which is Inductor.
    """

    config: dict[str, Any]
    prompt: int
    attention: str = ""
    drafts: int = 0
    mode: int = 0
    backend: str = ""


MODELS: dict[str, ServedModel] = {
    "qwen3_30b": ServedModel(
        {
            **_COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1e6,
            "attention_bias": False,
            "quantization_config": _unconverted(4, "mlp.gate"),
        },
        attention="TRITON_ATTN",
        prompt=192,
    ),
    "minimax_m2": ServedModel(
        {
            **_COMMON,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "num_hidden_layers": 4,
            "attn_type_list": [1, 1, 1, 1],
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "rope_theta": 5e6,
            "quantization_config": _unconverted(4, "block_sparse_moe.gate"),
        },
        attention="TRITON_ATTN",
        prompt=192,
    ),
    "deepseek_v32": ServedModel(
        {
            **_COMMON,
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 32,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "ep_size": 1,
            "quantization_config": {**_BLOCKS, "scale_fmt": "ue8m0"},
        },
        prompt=2304,
    ),
}

MODELS["qwen3_30b_compiled"] = replace(MODELS["qwen3_30b"], mode=3)
MODELS["qwen3_30b_traced"] = replace(MODELS["qwen3_30b"], mode=3, backend="eager")
_DEEPSEEK = MODELS["deepseek_v32"]
MODELS["deepseek_v32_mtp"] = replace(
    _DEEPSEEK, config=_DEEPSEEK.config | {"num_nextn_predict_layers": 1}, drafts=1
)
# The calls of a prompt of a new length are new to the process in the first layers. The others repeat them.
MODELS["deepseek_v32_12_layers"] = replace(_DEEPSEEK, config=_DEEPSEEK.config | {"num_hidden_layers": 12})
