"""Writes a small model with DeepSeek-V3.2's architecture: `python -m server_example.make_demo_model DIR`.

Nothing is trained. The layers have fixed random weights. The embedding is a scaled orthogonal matrix. The
head maps a token's direction to the tokens that follow it somewhere in `DEMO_TEXT`. So the residual stream
proposes next tokens that make words. The layers (attention, indexer, experts) see the whole context and
choose among these tokens. All randomness comes from integers, so that every machine makes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import moe_fp8
from server_example.demo_text import DEMO_TEXT
from server_example.model.layers import hadamard

END_OF_TEXT = "<|endoftext|>"
SEED = 20
PREFERENCE = 0.25
WALKS = 3000

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def make_tokenizer(vocab_size: int, texts: Sequence[str] = (DEMO_TEXT,)) -> Tokenizer:
    """A byte-level BPE tokenizer over `texts`; id 0 is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class _Maker:
    """Random tensors of a given spread, collected by name."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def random(self, *shape: int, std: float) -> torch.Tensor:
        """Uniform random values with this standard deviation."""
        steps = 1 << 15
        integers = torch.randint(-steps, steps + 1, shape, generator=self.generator)
        return integers.float() * (std * 3**0.5 / steps)

    def fp8(self, name: str, n: int, k: int, gain: float = 1.0) -> None:
        """A layer that maps unit-variance inputs to outputs of standard deviation `gain`."""
        weight, scale = moe_fp8.quantize_fp8_blocks(self.random(n, k, std=gain * k**-0.5))
        self.tensors[f"{name}.weight"] = weight
        self.tensors[f"{name}.weight_scale_inv"] = scale

    def full(self, name: str, tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[name] = tensor.to(dtype).contiguous()

    def norm(self, name: str, dim: int) -> None:
        self.full(name, 1 + self.random(dim, std=0.1))

    def mlp(self, name: str, hidden: int, intermediate: int) -> None:
        self.fp8(f"{name}.gate_proj", intermediate, hidden)
        self.fp8(f"{name}.up_proj", intermediate, hidden)
        self.fp8(f"{name}.down_proj", hidden, intermediate, gain=0.7)

    def layer(self, name: str, config: dict[str, Any], *, dense: bool) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        value, kv_lora = config["v_head_dim"], config["kv_lora_rank"]
        attention = f"{name}.self_attn"
        self.norm(f"{name}.input_layernorm.weight", hidden)
        self.norm(f"{name}.post_attention_layernorm.weight", hidden)
        self.fp8(f"{attention}.q_a_proj", config["q_lora_rank"], hidden)
        self.norm(f"{attention}.q_a_layernorm.weight", config["q_lora_rank"])
        self.fp8(f"{attention}.q_b_proj", heads * (nope + rope), config["q_lora_rank"], gain=2.0)
        self.fp8(f"{attention}.kv_a_proj_with_mqa", kv_lora + rope, hidden)
        self.norm(f"{attention}.kv_a_layernorm.weight", kv_lora)
        self.fp8(f"{attention}.kv_b_proj", heads * (nope + value), kv_lora, gain=1.0)
        self.fp8(f"{attention}.o_proj", hidden, heads * value, gain=2.0)
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        indexer = f"{attention}.indexer"
        self.fp8(f"{indexer}.wq_b", index_heads * index_dim, config["q_lora_rank"])
        self.fp8(f"{indexer}.wk", index_dim, hidden)
        self.full(f"{indexer}.k_norm.weight", torch.ones(index_dim), torch.float32)
        self.full(f"{indexer}.k_norm.bias", torch.zeros(index_dim), torch.float32)
        self.full(f"{indexer}.weights_proj.weight", self.random(index_heads, hidden, std=hidden**-0.5))
        if dense:
            self.mlp(f"{name}.mlp", hidden, config["intermediate_size"])
            return
        experts = config["n_routed_experts"]
        self.full(f"{name}.mlp.gate.weight", self.random(experts, hidden, std=2 * hidden**-0.5))
        bias = self.random(experts, std=0.05)
        self.full(f"{name}.mlp.gate.e_score_correction_bias", bias, torch.float32)
        for expert in range(experts):
            self.mlp(f"{name}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        shared = config["moe_intermediate_size"] * config["n_shared_experts"]
        self.mlp(f"{name}.mlp.shared_experts", hidden, shared)


def _longest_loop(follows: dict[int, list[int]], start: int) -> list[int]:
    """A long simple cycle of the graph: the longest first loop among the random walks."""
    chance = random.Random(SEED)
    best: list[int] = []
    for _ in range(WALKS):
        path, place, token = [start], {start: 0}, start
        while len(path) < len(follows):
            token = chance.choice(follows[token])
            if token in place:
                loop = path[place[token] :]
                best = max(best, loop, key=len)
                break
            place[token] = len(path)
            path.append(token)
    return best


def _followers(tokenizer: Tokenizer, vocab_size: int) -> torch.Tensor:
    """fp32 [vocab, vocab]: how well the second token follows the first; 0 if it never follows in the text.

    One follower of each token is preferred. The preferred followers form a long loop, so that the text does
    not soon repeat. The preference is about as large as the usual effect of the layers. So the layers
    overrule it now and then, and the rounding of a device rarely decides.
    """
    ids = tokenizer.encode(DEMO_TEXT).ids
    follows: dict[int, list[int]] = {}
    for token, follower in zip(ids, ids[1:] + ids[:1], strict=True):
        follows.setdefault(token, []).append(follower)
    for token in range(vocab_size):
        # A token that is not in the text leads back into the text.
        follows.setdefault(token, [ids[token % len(ids)]])
    loop = _longest_loop(follows, ids[0])
    preferred = dict(zip(loop, loop[1:] + loop[:1], strict=True))
    result = torch.zeros(vocab_size, vocab_size)
    for token, followers in follows.items():
        result[token, followers] = 1.0 - PREFERENCE
        result[token, preferred.get(token, followers[0])] = 1.0
    return result


def make_demo_model(folder: Path) -> None:
    """Writes config.json, model.safetensors (FP8 in 128 x 128 blocks) and the tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    tokenizer = make_tokenizer(vocab)
    maker = _Maker(SEED)
    signs = torch.randint(0, 2, (hidden,), generator=maker.generator).float() * 2 - 1
    # The signs of a Hadamard matrix are +-1: its rows are orthogonal, have rms 1 and are exact in bf16.
    embedding = 4 * (hadamard(hidden, torch.device("cpu")).sign() * signs)[:vocab]
    head = _followers(tokenizer, vocab).T @ embedding * (12 / hidden / 4)
    head += maker.random(vocab, hidden, std=hidden**-0.5)
    maker.full("model.embed_tokens.weight", embedding)
    for number in range(CONFIG["num_hidden_layers"]):
        maker.layer(f"model.layers.{number}", CONFIG, dense=number < CONFIG["first_k_dense_replace"])
    maker.norm("model.norm.weight", hidden)
    maker.full("lm_head.weight", head)
    save_file(maker.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}, indent=2) + "\n"
    )
    # The config is written last, so a folder with a config is complete.
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m server_example.make_demo_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the model; made if missing")
    folder = parser.parse_args().folder
    make_demo_model(folder)
    size = (folder / "model.safetensors").stat().st_size
    print(f"wrote {folder}: {size / 2**20:.1f} MiB of weights")


if __name__ == "__main__":
    main()
