"""Grouped-query attention: GLM-4.5, Qwen3-MoE, MiniMax, dots1, ERNIE, Hunyuan, HY-V3, MiMo-V2 and gpt-oss.

Read from vLLM 0.33.0 model_executor/models/{glm4_moe,qwen3_moe,minimax_m2,ernie45_moe,hy_v3,mimo_v2}.py,
model_executor/models/gpt_oss.py and models/minimax_m3/nvidia/{model,mtp}.py; from SGLang 0.5.23
srt/models/hunyuan.py; from the modeling files of dots1 and hunyuan_v1_moe in transformers 5.23.0 (vLLM 0.33.0
has no files for these two).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    pick,
    prefix_of,
    router,
    text_of,
)


class Heads(NamedTuple):
    """The attention of one layer. `index_size` is that of MiniMax-M3's index keys, 0 if there are none."""

    queries: int
    kv: int
    size: int
    v_size: int
    index_size: int = 0


class Mlps(NamedTuple):
    """The feed-forward part of one layer. With `experts` 0 it is one MLP of `intermediate` channels."""

    intermediate: int
    experts: int
    shared: int = 0


def heads(text: Config, number: int) -> Heads:
    """The heads of a layer. A config without `head_dim` divides the hidden size."""
    queries, kv = text["num_attention_heads"], text["num_key_value_heads"]
    size = pick(text, "head_dim") or text["hidden_size"] // queries
    if text["model_type"] == "mimo_v2_flash":
        # Values are narrower than queries and keys, and sliding layers have twice the key-value heads.
        if is_sliding(text, number):
            return Heads(
                pick(text, "swa_num_attention_heads", "num_attention_heads"),
                pick(text, "swa_num_key_value_heads", "num_key_value_heads"),
                pick(text, "swa_head_dim", "head_dim"),
                pick(text, "swa_v_head_dim", "v_head_dim"),
            )
        return Heads(queries, kv, size, text["v_head_dim"])
    return Heads(queries, kv, size, size, minimax_index(text, number))


def is_sliding(text: Config, number: int) -> bool:
    pattern = text.get("hybrid_layer_pattern")
    if pattern is not None:
        return bool(pattern[number])
    types: list[str] = text["layer_types"]
    return types[number] == "sliding_attention"


def minimax_index(text: Config, number: int) -> int:
    """The size of an index key in MiniMax-M3's sparse layers. The MTP layer is sparse."""
    sparse = text.get("sparse_attention_config")
    if sparse is not None:
        frequency = sparse["sparse_attention_freq"]
        on = number >= len(frequency) or bool(frequency[number])
        return sparse["sparse_index_dim"] if on else 0
    if "index_block_size" not in text:
        return 0
    types = text["layer_types"]
    on = number >= len(types) or types[number] == "minimax_m3_sparse"
    return text["index_head_dim"] if on else 0


def attention(hidden: int, sizes: Heads, tp: int, name: str) -> Iterator[Piece]:
    """One fused projection in, one out. MiniMax-M3 has its index queries and its index key in the fused one.

    There are as many index queries as key-value heads, cut and copied like these; the key is on every rank.
    """
    kv = cut_heads(sizes.kv, tp)
    names = [f"{name}.{part}_proj" for part in "qkv"]
    width = cut(sizes.queries, tp) * sizes.size + kv * (sizes.size + sizes.v_size)
    what = "qkv"
    if sizes.index_size:
        what, width = "qkv+index", width + (kv + 1) * sizes.index_size
        names += [f"{name}.index_q_proj", f"{name}.index_k_proj"]
    yield Piece(what, width, hidden, tuple(names))
    yield Piece("o", hidden, cut(sizes.queries, tp) * sizes.v_size, (f"{name}.o_proj",))


def mlps(text: Config, number: int) -> Mlps:
    """The MLP or the experts of a layer, in each model's spelling."""
    kind, plain = text["model_type"], pick(text, "intermediate_size")
    if kind == "qwen3_moe":
        listed = number in (text.get("mlp_only_layers") or [])
        if listed or (number + 1) % (pick(text, "decoder_sparse_step") or 1):
            return Mlps(plain, 0)
        return Mlps(text["moe_intermediate_size"], pick(text, "num_experts", "num_local_experts"))
    if kind in ("minimax_m2", "gpt_oss"):
        return Mlps(plain, text["num_local_experts"])  # `intermediate_size` is that of an expert
    if kind.startswith("minimax_m3"):
        if not is_sparse(text, number):
            return Mlps(text["dense_intermediate_size"], 0)
        return Mlps(plain, text["num_local_experts"], pick(text, "shared_intermediate_size") or plain)
    if kind == "ernie4_5_moe":
        first, last = text["moe_layer_start_index"], text["moe_layer_end_index"]
        if not first <= number <= last or (number + 1) % text["moe_layer_interval"]:
            return Mlps(plain, 0)
        size = text["moe_intermediate_size"]
        return Mlps(size, text["moe_num_experts"], size * text["moe_num_shared_experts"])
    if kind == "hunyuan_v1_moe":
        # Sizes may be lists with one entry a layer. A shared MLP has `intermediate_size`, not an expert's.
        sizes, shared = text.get("moe_intermediate_size") or plain, text.get("num_shared_expert") or 1
        return Mlps(
            sizes[number] if isinstance(sizes, list) else sizes,
            text["num_experts"],
            plain * (shared[number] if isinstance(shared, list) else shared),
        )
    if not is_sparse(text, number):
        return Mlps(plain, 0)
    size = text["moe_intermediate_size"]
    many = pick(text, "n_routed_experts", "num_experts")
    return Mlps(size, many, size * pick(text, "n_shared_experts", "num_shared_experts"))


def feed_forward(text: Config, ranks: Ranks, name: str, number: int) -> Iterator[Piece]:
    hidden, sizes = text["hidden_size"], mlps(text, number)
    block = f"{name}.block_sparse_moe" if text["model_type"].startswith("minimax") else f"{name}.mlp"
    if not sizes.experts:
        yield from mlp("mlp", hidden, cut(sizes.intermediate, ranks.mlp_tp), f"{name}.mlp")
        return
    gate = "router" if text["model_type"] == "gpt_oss" else "gate"
    yield router(hidden, sizes.experts, f"{block}.{gate}")
    yield from experts(hidden, sizes.intermediate, sizes.experts, ranks, f"{block}.experts")
    if sizes.shared:
        yield from mlp("shared", hidden, cut(sizes.shared, ranks.mlp_tp), f"{block}.shared_experts")


def pieces(config: Config, ranks: Ranks) -> Iterator[Piece]:
    """The layers, those for multi-token prediction that vLLM has and the config counts, and `lm_head`.

    MiniMax-M2's file counts three MTP modules, but neither vLLM nor transformers has a model for them, and
    MiMo-V2-Flash's file counts none.
    """
    text = text_of(config)
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    kind = text["model_type"]
    further = pick(text, "num_mtp_modules" if kind.startswith("minimax_m3") else "num_nextn_predict_layers")
    for number in range(count + further):
        name = f"{prefix_of(config)}layers.{number}"
        yield from attention(hidden, heads(text, number), ranks.attention_tp, f"{name}.self_attn")
        yield from feed_forward(text, ranks, name, number)
        if number >= count:
            # A bf16 layer in vLLM, but for MiniMax-M3, where it takes the quantization.
            takes = kind.startswith("minimax_m3")
            yield Piece("mtp.eh_proj", hidden, 2 * hidden, (f"{name}.eh_proj",), takes)
    yield head(config, ranks)
