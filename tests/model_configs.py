"""The model configs that the tests share (tests/configs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_fp8.warmup import read_config

CONFIGS = Path(__file__).resolve().parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))

_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_blocks(name: str) -> dict[str, Any]:
    """The config, in FP8 blocks of 128 x 128 even if the release has other weights."""
    config = read_config(CONFIGS / f"{name}.json")
    places = [place for place in (config, config.get("text_config")) if isinstance(place, dict)]
    found = [place["quantization_config"] for place in places if place.get("quantization_config")]
    if not any(each.get("weight_block_size") == [128, 128] for each in found):
        for place in places:
            place["quantization_config"] = _BLOCKS
    return config
