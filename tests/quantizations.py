"""`quantization_config` of checkpoints, for tests of the planner."""

from __future__ import annotations

from typing import Any

from moe_fp8.warmup import ModelDescription, describe
from tests.model_configs import config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def tensors(**changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors with changed fields, such as weights_strategy="channel"."""
    weights: dict[str, Any] = {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "dynamic": False,
    }  # fmt: skip
    inputs: dict[str, Any] = {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True,
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("_")
        (weights if part == "weights" else inputs)[field] = value
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def quantized(quantization: Any, quantize: str | None = None) -> ModelDescription:
    """Qwen3-30B with another `quantization_config`."""
    given = config("qwen3_30b", quantization_config=quantization)
    return describe(given, quantize=quantize)
