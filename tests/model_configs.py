"""The model configs that the tests share (tests/configs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_fp8.warmup import ModelDescription, Parallelism, describe, gemm_shapes, read_config

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


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A shipped config with some fields replaced; a field whose value is `...` is removed."""
    merged = {**read_config(CONFIGS / f"{name}.json"), **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def model(name: str, **changes: Any) -> ModelDescription:
    return describe(config(name, **changes), name=name)


def shapes(name: str, tp: int, ep: int, **changes: Any) -> dict[str, tuple[int, int, int | None]]:
    return shapes_of(model(name, **changes), tp, ep)


def shapes_of(
    description: ModelDescription, tp: int = 1, ep: int = 1
) -> dict[str, tuple[int, int, int | None]]:
    found = gemm_shapes(description, Parallelism(tp, ep))
    return {shape.what: (shape.n, shape.k, shape.num_experts) for shape in found}
