"""DeepSeek-V4: one latent head for keys and values, grouped output projection, compressors, residual streams.

Read from vLLM 0.33.0 models/deepseek_v4/{attention,compressor}.py and nvidia/{model,mtp}.py, and from
transformers 5.23.0 modeling_deepseek_v4.py (DeepseekV4HyperConnection for the four streams).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.derivation.parts import (
    Config,
    Piece,
    Ranks,
    cut,
    cut_blocks,
    down,
    experts,
    gate_up,
    head,
    router,
)

#: transformers' names of the layers that have a compressor, and its rate.
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}


def rate(config: Config, number: int) -> int:
    """How many tokens the layer's compressor joins. 0: none. An MTP layer has none."""
    ratios = config.get("compress_ratios")
    if ratios is not None:
        value: int = ratios[number]
        return value
    types = config["layer_types"]
    return RATES[types[number]] if number < len(types) else 0


def pieces(config: Config, ranks: Ranks) -> Iterator[Piece]:
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    streams = config["hc_mult"]
    wide = streams * hidden
    for number in range(count + config.get("num_nextn_predict_layers", 0)):
        name = f"layers.{number}"
        yield from _attention(config, ranks, rate(config, number), f"{name}.attn")
        yield from _experts(config, ranks, f"{name}.ffn")
        for part in ("attn", "ffn"):
            # Weights of the streams' way in, way out and mixing, in fp32.
            yield Piece("hc", streams * (2 + streams), wide, (f"{name}.hc_{part}",), quantized=False)
        if number >= count:
            for part in ("e_proj", "h_proj"):
                yield Piece(f"mtp.{part}", hidden, hidden, (f"mtp.{part}",))
            yield Piece("hc_head", streams, wide, ("mtp.hc_head",), quantized=False)
    yield Piece("hc_head", streams, wide, ("hc_head",), quantized=False)
    yield head(config, ranks)


def _attention(config: Config, ranks: Ranks, joined: int, name: str) -> Iterator[Piece]:
    hidden, q_rank, size = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, tp = config["num_attention_heads"], ranks.attention_tp
    groups, o_rank = config["o_groups"], config["o_lora_rank"]
    yield Piece("wq_a+wkv", q_rank + size, hidden, (f"{name}.wq_a", f"{name}.wkv"))
    yield Piece("wq_b", cut(heads, tp) * size, q_rank, (f"{name}.wq_b",))
    # A batched product: each group of heads has its own weights.
    yield Piece("wo_a", o_rank, cut(heads, groups) * size, (f"{name}.wo_a",), experts=cut(groups, tp))
    yield Piece("wo_b", hidden, cut(groups, tp) * o_rank, (f"{name}.wo_b",))
    if not joined:
        return
    # A compressor projects to values and weights, twice as wide where windows overlap (rate 4). It is bf16.
    overlap = 2 if joined == 4 else 1
    yield Piece("compressor", 2 * overlap * size, hidden, (f"{name}.compressor",), quantized=False)
    if joined != 4:
        return
    # Only layers of rate 4 choose positions. The indexer has its own compressor and is whole on each rank.
    count, width = config["index_n_heads"], config["index_head_dim"]
    yield Piece("indexer.wq_b", count * width, q_rank, (f"{name}.indexer.wq_b",))
    yield Piece("indexer.weights_proj", count, hidden, (f"{name}.indexer.weights_proj",), quantized=False)
    yield Piece("indexer.compressor", 4 * width, hidden, (f"{name}.indexer.compressor",), quantized=False)


def _experts(config: Config, ranks: Ranks, name: str) -> Iterator[Piece]:
    """Every layer has experts; the first three choose them by token, but have router weights too."""
    hidden, size, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield router(hidden, count, f"{name}.gate")
    quantization = config.get("quantization_config", {})
    fp8 = config.get("expert_dtype", quantization.get("expert_dtype", "fp4")) == "fp8"
    yield from experts(hidden, size, count, ranks, f"{name}.experts", quantized=fp8)
    # vLLM gives each rank whole blocks of the shared expert, the last ranks zeros.
    part = cut_blocks(size * config["n_shared_experts"], ranks.mlp_tp)
    yield gate_up("shared", hidden, part, f"{name}.shared_experts")
    yield down("shared", hidden, part, f"{name}.shared_experts")
