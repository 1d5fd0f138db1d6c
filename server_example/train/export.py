"""Writes a trained model as Hugging Face folders: FP8 for the server, and bf16 beside it for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import moe_fp8
from server_example.model.layers import Fp8Weight
from server_example.train.data import END_OF_TEXT
from server_example.train.model import TrainedModel

BF16 = "bf16"
HELD_OUT_TEXT = "heldout.txt"
#: Matrices that stay in bf16: they are no FP8 GEMMs in published checkpoints either.
UNQUANTIZED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")
#: Small tensors that published checkpoints keep in fp32.
IN_FP32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")


def export(model: TrainedModel, config: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `folder` (FP8 in 128 x 128 blocks) and `folder/bf16`; the config is the `config.json` of FP8."""
    plain: dict[str, torch.Tensor] = {}
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        dtype = torch.float32 if name.endswith(IN_FP32) else torch.bfloat16
        plain[name] = tensor.detach().cpu().to(dtype).contiguous()
        if tensor.dim() == 2 and not name.endswith(UNQUANTIZED):
            # The bf16 weights are what is quantized, so that both folders hold one model.
            quantized[name], quantized[f"{name}_scale_inv"] = moe_fp8.quantize_fp8_blocks(plain[name])
        else:
            quantized[name] = plain[name]
    bf16_config = {name: value for name, value in config.items() if name != "quantization_config"}
    for to, tensors, its_config in ((folder / BF16, plain, bf16_config), (folder, quantized, config)):
        to.mkdir(parents=True, exist_ok=True)
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(to / "tokenizer.json"))
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        (to / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
        (to / "config.json").write_text(json.dumps(its_config, indent=2) + "\n")


def load_plain(folder: Path, model: TrainedModel) -> str:
    """Loads `folder/bf16` into `model`, or FP8 weights times their scales if it is missing; says which."""
    bf16 = (folder / BF16).is_dir()
    tensors = load_file((folder / BF16 if bf16 else folder) / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in plain:
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            plain[name] = Fp8Weight(plain[name], scale).dequantized()
    if model.config.tie_word_embeddings:
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    model.load_state_dict(plain)
    return "bf16 weights" if bf16 else "bf16 arithmetic on the FP8 weights"
