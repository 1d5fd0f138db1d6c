"""Models that mix full attention with linear attention: Qwen3-Next, Qwen3.5 and GLM-5.3-Flash.

Read from vLLM 0.33.0 model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py,
model_executor/models/{qwen3_next,qwen3_next_mtp}.py and models/glm5next/common/{attention,kda,model,mtp}.py,
and from the modeling files of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.derivation.mla import attention, has_indexer, indexer, latent
from tests.derivation.parts import (
    Config,
    Piece,
    Ranks,
    cut,
    cut_heads,
    experts,
    head,
    is_sparse,
    mlp,
    prefix_of,
    router,
    text_of,
)


def qwen3_next(config: Config, ranks: Ranks) -> Iterator[Piece]:
    """Qwen3-Next and Qwen3.5 have the same sizes; the checkpoints split linear attention differently."""
    text, prefix = text_of(config), prefix_of(config)
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    every, types = text.get("full_attention_interval", 4), text.get("layer_types")
    split = text["model_type"].startswith("qwen3_5")
    for number in range(count):
        name = f"{prefix}layers.{number}"
        if types[number] == "linear_attention" if types else (number + 1) % every:
            yield from _delta(text, ranks, f"{name}.linear_attn", split=split)
        else:
            yield from _full(text, ranks, f"{name}.self_attn")
        yield from _qwen_experts(text, ranks, f"{name}.mlp", number)
    # Qwen3-Next's config counts no MTP layers, and vLLM takes one. It has full attention and experts.
    for number in range(text.get("mtp_num_hidden_layers", 1)):
        yield Piece("mtp.fc", cut(hidden, ranks.attention_tp), 2 * hidden, ("mtp.fc",))
        yield from _full(text, ranks, f"mtp.layers.{number}.self_attn")
        yield from _qwen_experts(text, ranks, f"mtp.layers.{number}.mlp", None)
    yield head(config, ranks)


def _delta(text: Config, ranks: Ranks, name: str, *, split: bool) -> Iterator[Piece]:
    """Gated delta net: q, k, v and z in one projection, one number b and a for each value head in another."""
    hidden, tp = text["hidden_size"], ranks.attention_tp
    keys = cut(text["linear_num_key_heads"], tp) * text["linear_key_head_dim"]
    heads = cut(text["linear_num_value_heads"], tp)
    values = heads * text["linear_value_head_dim"]
    qkvz = ("in_proj_qkv", "in_proj_z") if split else ("in_proj_qkvz",)
    ba = ("in_proj_b", "in_proj_a") if split else ("in_proj_ba",)
    yield Piece("in_proj_qkvz", 2 * keys + 2 * values, hidden, tuple(f"{name}.{part}" for part in qkvz))
    yield Piece("in_proj_ba", 2 * heads, hidden, tuple(f"{name}.{part}" for part in ba))
    yield Piece("out_proj", hidden, values, (f"{name}.out_proj",))


def _full(text: Config, ranks: Ranks, name: str) -> Iterator[Piece]:
    """Grouped-query attention whose q_proj gives a gate as wide as the queries."""
    hidden, size, tp = text["hidden_size"], text["head_dim"], ranks.attention_tp
    heads = cut(text["num_attention_heads"], tp)
    kv = cut_heads(text["num_key_value_heads"], tp)
    gates = 2 if text.get("attn_output_gate", True) else 1
    names = tuple(f"{name}.{part}_proj" for part in "qkv")
    yield Piece("qkv", (gates * heads + 2 * kv) * size, hidden, names)
    yield Piece("o", hidden, heads * size, (f"{name}.o_proj",))


def _qwen_experts(text: Config, ranks: Ranks, name: str, number: int | None) -> Iterator[Piece]:
    hidden, count = text["hidden_size"], text["num_experts"]
    step = text.get("decoder_sparse_step", 1)
    if number is not None and (number in (text.get("mlp_only_layers") or []) or (number + 1) % step):
        yield from mlp("mlp", hidden, cut(text["intermediate_size"], ranks.mlp_tp), name)
        return
    yield router(hidden, count, f"{name}.gate")
    yield from experts(hidden, text["moe_intermediate_size"], count, ranks, f"{name}.experts")
    part = cut(text["shared_expert_intermediate_size"], ranks.mlp_tp)
    yield from mlp("shared", hidden, part, f"{name}.shared_expert")
    yield Piece("shared.gate", 1, hidden, (f"{name}.shared_expert_gate",), quantized=False)


def glm5_next(config: Config, ranks: Ranks) -> Iterator[Piece]:
    """GLM-5.3-Flash: three layers of Kimi delta attention to one of latent attention with an indexer."""
    text, prefix = text_of(config), prefix_of(config)
    hidden, count, streams = text["hidden_size"], text["num_hidden_layers"], text["hc_mult"]
    for number in range(count + text.get("num_nextn_predict_layers", 0)):
        name = f"{prefix}layers.{number}"
        if number < count and text["layer_types"][number] == "linear_attention":
            yield from _kimi_delta(text, ranks, f"{name}.self_attn")
        else:
            yield from attention(hidden, latent(text), ranks.attention_tp, f"{name}.self_attn")
            if has_indexer(text, number):
                yield from indexer(text, f"{name}.self_attn")
                # Each pool of keys is joined with weights that this product gives.
                gate = f"{name}.self_attn.indexer.index_kpool_compress_gate"
                yield Piece("indexer.kpool_gate", text["index_head_dim"], hidden, (gate,), quantized=False)
        if is_sparse(text, number):
            size, many = text["moe_intermediate_size"], text["n_routed_experts"]
            yield router(hidden, many, f"{name}.mlp.gate")
            yield from experts(hidden, size, many, ranks, f"{name}.mlp.experts")
            part = cut(size * text["n_shared_experts"], ranks.mlp_tp)
            yield from mlp("shared", hidden, part, f"{name}.mlp.shared_experts")
        else:
            yield from mlp("mlp", hidden, cut(text["intermediate_size"], ranks.mlp_tp), f"{name}.mlp")
        if number < count:
            # The streams are as in DeepSeek-V4, but their end is a plain mean, without weights.
            for block in ("attn", "ffn"):
                wide = streams * hidden
                yield Piece("hc", streams * (2 + streams), wide, (f"{name}.{block}_hc",), quantized=False)
        else:
            yield Piece("mtp.eh_proj", hidden, 2 * hidden, (f"{name}.eh_proj",), quantized=False)
    yield head(config, ranks)


def _kimi_delta(text: Config, ranks: Ranks, name: str) -> Iterator[Piece]:
    """vLLM fuses q, k, v, b and two projections down to low rank, which each rank has whole. All are bf16."""
    linear = text.get("linear_attn_config", {})
    heads = cut(linear.get("num_heads", text.get("linear_num_heads")), ranks.attention_tp)
    size = linear.get("head_dim", text.get("linear_head_dim"))
    hidden, wide = text["hidden_size"], heads * size
    yield Piece("kda.qkvbfg_a", 3 * wide + heads + 2 * size, hidden, (f"{name}.q_proj",), quantized=False)
    for part in ("f_b", "g_b"):
        yield Piece(f"kda.{part}", wide, size, (f"{name}.{part}_proj",), quantized=False)
    yield Piece("kda.o", hidden, wide, (f"{name}.o_proj",), quantized=False)
