"""Multi-head latent attention: DeepSeek-V2, V3, V3.2, Kimi, GLM-5, HY-V4 and dots3.

Read from vLLM 0.33.0: model_executor/models/deepseek_v2.py (DeepseekV2MLAAttention, Indexer, DeepseekV2MoE),
models/deepseek_v32/attention.py, models/hy_v4/nvidia/{attention,moe,hc,mtp}.py and
models/dots3_note/nvidia/{model,mtp}.py; and from the modeling files of the same names in transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.derivation.parts import (
    Config,
    Piece,
    Ranks,
    cut,
    cut_blocks,
    experts,
    head,
    is_sparse,
    keeps_fp8_blocks,
    mlp,
    prefix_of,
    router,
    text_of,
)


@dataclass(frozen=True)
class Latent:
    """The sizes of one layer's attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int


def latent(text: Config) -> Latent:
    return Latent(
        text["num_attention_heads"], text.get("q_lora_rank"), text["kv_lora_rank"],
        text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"],
    )  # fmt: skip


def sliding_latent(text: Config) -> Latent:
    """The sizes of dots3's sliding layers: `swa_*`, or in transformers an entry of `per_layer_config`.

    transformers writes a layer's number with two digits and leaves out sizes that other layers have too.
    """
    if "swa_kv_lora_rank" in text:
        return latent({**text, **{key[4:]: value for key, value in text.items() if key.startswith("swa_")}})
    first = text["layer_types"].index("sliding_attention")
    return latent({**text, **text["per_layer_config"][f"{first:02d}"]})


def attention(hidden: int, sizes: Latent, tp: int, name: str) -> Iterator[Piece]:
    """The projections down are whole on each rank; those up and out are cut by heads."""
    heads = cut(sizes.heads, tp)
    kv_a = sizes.kv_rank + sizes.rope
    kv_a_name = f"{name}.kv_a_proj_with_mqa"
    if sizes.q_rank is None:
        yield Piece("q", heads * (sizes.nope + sizes.rope), hidden, (f"{name}.q_proj",))
        yield Piece("kv_a", kv_a, hidden, (kv_a_name,))
    else:
        yield Piece("q_a+kv_a", sizes.q_rank + kv_a, hidden, (f"{name}.q_a_proj", kv_a_name))
        yield Piece("q_b", heads * (sizes.nope + sizes.rope), sizes.q_rank, (f"{name}.q_b_proj",))
    yield Piece("kv_b", heads * (sizes.nope + sizes.v), sizes.kv_rank, (f"{name}.kv_b_proj",))
    yield Piece("o", hidden, heads * sizes.v, (f"{name}.o_proj",))


def indexer(text: Config, name: str) -> Iterator[Piece]:
    """The indexer is whole on each rank. vLLM fuses wk and weights_proj, in bf16 in any case."""
    heads, size = text["index_n_heads"], text["index_head_dim"]
    yield Piece("indexer.wq_b", heads * size, text["q_lora_rank"], (f"{name}.indexer.wq_b",))
    yield Piece(
        "indexer.wk+weights_proj", size + heads, text["hidden_size"],
        (f"{name}.indexer.weights_proj",), quantized=False,
    )  # fmt: skip


def feed_forward(config: Config, ranks: Ranks, name: str, *, sparse: bool) -> Iterator[Piece]:
    """A plain MLP, or experts with shared ones. dots3 pads plain and shared MLPs of FP8 to whole blocks."""
    text = text_of(config)
    hidden, size = text["hidden_size"], text["moe_intermediate_size"]
    whole_blocks = text["model_type"].startswith("dots3") and keeps_fp8_blocks(config)
    divide = cut_blocks if whole_blocks else cut
    if not sparse:
        yield from mlp("mlp", hidden, divide(text["intermediate_size"], ranks.mlp_tp), f"{name}.mlp")
        return
    count = text["n_routed_experts"]
    yield router(hidden, count, f"{name}.mlp.gate")
    yield from experts(hidden, size, count, ranks, f"{name}.mlp.experts")
    if text.get("n_shared_experts"):
        part = divide(size * text["n_shared_experts"], ranks.mlp_tp)
        yield from mlp("shared", hidden, part, f"{name}.mlp.shared_experts")


def has_indexer(text: Config, layer: int) -> bool:
    """Whether the layer has an indexer of its own. "shared" layers take the choice of the last "full" one.

    dots3 has indexers in its layers of full attention only. A layer behind the list (MTP) has one.
    """
    if "index_topk" not in text:
        return False
    types = text.get("indexer_types")
    return types is None or layer >= len(types) or types[layer] == "full"


def is_sliding(text: Config, layer: int) -> bool:
    """dots3's MTP layer slides too (transformers drops it; its names are in a public converter)."""
    types = text.get("layer_types")
    if types is None or not text["model_type"].startswith("dots3"):
        return False
    return layer >= len(types) or types[layer] == "sliding_attention"


def layer(config: Config, ranks: Ranks, number: int) -> Iterator[Piece]:
    text, name = text_of(config), f"{prefix_of(config)}layers.{number}"
    hidden, tp = text["hidden_size"], ranks.attention_tp
    mtp = number >= text["num_hidden_layers"]
    sliding = is_sliding(text, number)
    sizes = sliding_latent(text) if sliding else latent(text)
    yield from attention(hidden, sizes, tp, f"{name}.self_attn")
    if has_indexer(text, number) and not sliding:
        yield from indexer(text, f"{name}.self_attn")
    if text["model_type"].startswith("dots3"):
        # One gate a head, whole on each rank (vLLM: g_proj with attention_gate_type "headwise").
        yield Piece("gate", sizes.heads, hidden, (f"{name}.self_attn.g_proj",))
        yield from feed_forward(config, ranks, name, sparse=not mtp and is_sparse(text, number))
        return
    if text["model_type"] == "hy_v4":
        # A gate for each output channel, cut as the heads (vLLM: linear_gate with gating_type "elementwise").
        yield Piece("gate", cut(sizes.heads, tp) * sizes.v, hidden, (f"{name}.self_attn.linear_gate",))
        if not mtp:
            # fp32 gates of the four residual streams, before attention and before the MLP; MTP has none.
            wide = text["hc_mult"] * hidden
            for part in ("attn", "mlp"):
                yield Piece("hc", 2 * text["hc_mult"], wide, (f"{name}.hc_{part}_layer",), quantized=False)
    yield from feed_forward(config, ranks, name, sparse=is_sparse(text, number))


def pieces(config: Config, ranks: Ranks) -> Iterator[Piece]:
    text, name = text_of(config), prefix_of(config)
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    dots = text["model_type"].startswith("dots3")
    for number in range(count + text.get("num_nextn_predict_layers", 0)):
        yield from layer(config, ranks, number)
        if number >= count:
            # eh_proj is a plain bf16 layer in vLLM, but for dots3, where it takes the quantization.
            yield Piece("mtp.eh_proj", hidden, 2 * hidden, (f"{name}layers.{number}.eh_proj",), dots)
    if text["model_type"] == "hy_v4":
        yield Piece("hc_head", text["hc_mult"], text["hc_mult"] * hidden, ("model.hc_head",), quantized=False)
    yield head(config, ranks)
