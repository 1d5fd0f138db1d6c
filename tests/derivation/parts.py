"""The pieces that models are made of, and what a checkpoint's config says of their quantization."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

Config = dict[str, Any]
BLOCK = 128


class Linear(NamedTuple):
    """One matrix product with weights `[n, k]` (`[experts, n, k]` if batched) as one rank has it.

    `fp8`: the weights stay FP8 in 128 x 128 blocks in vLLM 0.33. It is False for bf16 and fp32 weights and
    for other formats (FP4, INT4, MXFP8, one scale per channel).
    """

    what: str
    n: int
    k: int
    experts: int | None
    fp8: bool


class Piece(NamedTuple):
    """A projection of one layer, with the checkpoint's names of the modules that it fuses.

    `quantized`: the engine gives this layer the checkpoint's quantization at all.
    """

    what: str
    n: int
    k: int
    names: tuple[str, ...]
    quantized: bool = True
    experts: int | None = None


@dataclass(frozen=True)
class Ranks:
    """The numbers of ranks that cut attention, plain MLPs and experts, and that divide the set of experts."""

    attention_tp: int = 1
    mlp_tp: int = 1
    moe_tp: int = 1
    ep: int = 1


def text_of(config: Config) -> Config:
    """The fields of the language model: `text_config` over the outer fields, if there is one."""
    return {**config, **config["text_config"]} if "text_config" in config else config


def prefix_of(config: Config) -> str:
    """What stands before `layers.0` in the checkpoint. Two models with vision have a name of their own."""
    return "model.language_model." if config["model_type"] in ("glm5_next", "qwen3_5_moe") else "model."


def pick(text: Config, *names: str) -> int:
    """The number in the first of these fields that is given, or 0."""
    for name in names:
        if text.get(name) is not None:
            value: int = text[name]
            return value
    return 0


def cut(size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{ranks} ranks do not divide {size}")
    return size // ranks


def cut_heads(heads: int, ranks: int) -> int:
    """The key-value heads of one rank: with more ranks than heads, several ranks have the same head."""
    return cut(heads, ranks) if ranks < heads else 1


def cut_blocks(size: int, ranks: int) -> int:
    """One rank's part of an MLP in whole blocks, the last ranks' parts zero-filled (DeepSeek-V4, dots3)."""
    return ceil(ceil(size / BLOCK) / ranks) * BLOCK


def keeps_fp8_blocks(config: Config) -> bool:
    quantization = text_of(config).get("quantization_config") or {}
    block = quantization.get("weight_block_size")
    return quantization.get("quant_method") == "fp8" and block == [BLOCK, BLOCK]


def excluded(config: Config, name: str) -> bool:
    """Whether the checkpoint leaves the module as it was (vLLM: `is_layer_skipped` in quant_utils.py).

    An entry is a whole name, the name of a module around it, the end of a name, or a pattern (`re:`, `*`).
    """
    quantization = text_of(config).get("quantization_config") or {}
    entries = [quantization.get(key) or [] for key in ("modules_to_not_convert", "ignored_layers", "ignore")]
    return any(_matches(entry, name) for some in entries for entry in some)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if "*" in entry:
        return re.match(re.escape(entry).replace(r"\*", ".*"), name) is not None
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}")


def linear(config: Config, piece: Piece) -> Linear:
    """The piece with the word on its weights. Parts of a fused piece must agree."""
    left = {excluded(config, name) for name in piece.names}
    if len(left) > 1:
        raise ValueError(f"{piece.what} fuses quantized and unquantized modules: {piece.names}")
    fp8 = piece.quantized and keeps_fp8_blocks(config) and left == {False}
    return Linear(piece.what, piece.n, piece.k, piece.experts, fp8)


def gate_up(what: str, hidden: int, part: int, name: str) -> Piece:
    return Piece(f"{what}.gate_up", 2 * part, hidden, (f"{name}.gate_proj", f"{name}.up_proj"))


def down(what: str, hidden: int, part: int, name: str) -> Piece:
    return Piece(f"{what}.down", hidden, part, (f"{name}.down_proj",))


def mlp(what: str, hidden: int, part: int, name: str) -> Iterator[Piece]:
    """A gated MLP of which the rank has `part` intermediate channels."""
    yield gate_up(what, hidden, part, name)
    yield down(what, hidden, part, name)


def experts(
    hidden: int, size: int, count: int, ranks: Ranks, name: str, *, quantized: bool = True
) -> Iterator[Piece]:
    """Routed experts. Each of `moe_tp` ranks has a part of every expert, each of `ep` ranks some experts."""
    part, local = cut(size, ranks.moe_tp), cut(count, ranks.ep)
    yield Piece("experts.gate_up", 2 * part, hidden, (f"{name}.0.gate_proj",), quantized, local)
    yield Piece("experts.down", hidden, part, (f"{name}.0.down_proj",), quantized, local)


def router(hidden: int, count: int, name: str) -> Piece:
    """The router is in bf16 or fp32 and whole on each rank, whatever the config lists (vLLM: GateLinear)."""
    return Piece("router", count, hidden, (name,), quantized=False)


def head(config: Config, ranks: Ranks) -> Piece:
    """vLLM pads the vocabulary to a multiple of 64 (ParallelLMHead) and leaves the weights in bf16."""
    text = text_of(config)
    rows = ceil(text["vocab_size"] / 64) * 64
    return Piece("lm_head", cut(rows, ranks.attention_tp), text["hidden_size"], ("lm_head",), quantized=False)


def is_sparse(text: Config, layer: int) -> bool:
    """Whether the layer has experts, in the spellings of DeepSeek, GLM, dots, HY and MiMo.

    `mlp_layer_types` covers the plain layers; a layer behind them (MTP) is as the config's rule gives it.
    """
    types = text.get("mlp_layer_types")
    if types is not None and layer < len(types):
        return bool(types[layer] != "dense")
    frequency = text.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return layer >= len(frequency) or bool(frequency[layer])
    return layer >= pick(text, "first_k_dense_replace") and layer % int(frequency) == 0
