"""Every linear layer of known models, derived from a raw `config.json` and from the models' definitions.

This is a reading of `transformers` 5.23.0 and vLLM 0.33.0 that knows nothing of the planner, so that a test
can compare both. Layers behind the plain ones (multi-token prediction) are included where the config counts
them. Vision and audio towers, embeddings, norms and convolutions are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.derivation import deepseek_v4, gqa, hybrid, longcat, mla
from tests.derivation.parts import Config, Linear, Piece, Ranks, linear, text_of

Family = Callable[[Config, Ranks], Iterator[Piece]]

FAMILIES: dict[str, Family] = {
    "deepseek_v2": mla.pieces,
    "deepseek_v3": mla.pieces,
    "deepseek_v32": mla.pieces,
    "kimi_k2": mla.pieces,
    "kimi_k25": mla.pieces,
    "glm_moe_dsa": mla.pieces,
    "hy_v4": mla.pieces,
    "dots3_note": mla.pieces,
    "dots3_note_text": mla.pieces,
    "longcat_flash": longcat.pieces,
    "deepseek_v4": deepseek_v4.pieces,
    "glm5_next": hybrid.glm5_next,
    "glm5_next_text": hybrid.glm5_next,
    "qwen3_next": hybrid.qwen3_next,
    "qwen3_5_moe": hybrid.qwen3_next,
    "qwen3_5_moe_text": hybrid.qwen3_next,
    "glm4_moe": gqa.pieces,
    "qwen3_moe": gqa.pieces,
    "minimax_m2": gqa.pieces,
    "dots1": gqa.pieces,
    "ernie4_5_moe": gqa.pieces,
    "hunyuan_v1_moe": gqa.pieces,
    "hy_v3": gqa.pieces,
    "mimo_v2_flash": gqa.pieces,
    "minimax_m3_vl": gqa.pieces,
    "gpt_oss": gqa.pieces,
}


def pieces(config: Config, ranks: Ranks | None = None) -> list[Piece]:
    """The linear layers of every layer of the model, one by one. `lm_head` comes last."""
    return list(FAMILIES[config["model_type"]](config, ranks or Ranks()))


def linears(
    config: Config, attention_tp: int = 1, mlp_tp: int = 1, moe_tp: int = 1, ep: int = 1
) -> set[Linear]:
    """The distinct linear layers of one rank, as vLLM fuses them.

    `attention_tp` ranks cut attention, linear attention and `lm_head`; `mlp_tp` ranks cut plain MLPs and
    shared experts; `moe_tp` ranks cut each routed expert; `ep` ranks divide the set of experts.
    """
    ranks = Ranks(attention_tp, mlp_tp, moe_tp, ep)
    return {linear(config, piece) for piece in pieces(config, ranks)}


def parameters(config: Config) -> int:
    """The weights of all linear layers of the model and of its embedding table."""
    text = text_of(config)
    weights = sum(piece.n * piece.k * (piece.experts or 1) for piece in pieces(config))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return weights + (0 if tied else text["vocab_size"] * text["hidden_size"])


def fp8_parameters(config: Config) -> int:
    """The weights that the checkpoint and vLLM keep in FP8 blocks."""
    made = [linear(config, piece) for piece in pieces(config)]
    return sum(one.n * one.k * (one.experts or 1) for one in made if one.fp8)


__all__ = ["Config", "Linear", "fp8_parameters", "linears", "parameters", "pieces"]
