"""LongCat-Flash: each layer has two latent attentions, two plain MLPs and one set of experts.

Read from vLLM 0.33.0 model_executor/models/longcat_flash.py (FlashDecoderLayer, LongcatMoe, LongcatRouter)
and longcat_flash_mtp.py, and transformers 5.23.0 modeling_longcat_flash.py. The config counts no MTP layers;
vLLM makes one, with a single attention and a plain MLP, in FP8 with its `eh_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.derivation.mla import attention, latent
from tests.derivation.parts import Config, Piece, Ranks, cut, experts, head, mlp, router


def pieces(config: Config, ranks: Ranks) -> Iterator[Piece]:
    hidden, sizes = config["hidden_size"], latent(config)
    # `num_layers` counts these layers; `num_hidden_layers`, where written, counts attentions.
    for number in range(config["num_layers"]):
        name = f"model.layers.{number}"
        for half in range(2):
            yield from attention(hidden, sizes, ranks.attention_tp, f"{name}.self_attn.{half}")
            part = cut(config["ffn_hidden_size"], ranks.mlp_tp)
            yield from mlp("mlp", hidden, part, f"{name}.mlps.{half}")
        # Zero experts return their input: the router scores them, but they have no weights.
        scored = config["n_routed_experts"] + config["zero_expert_num"]
        yield router(hidden, scored, f"{name}.mlp.router.classifier")
        yield from experts(
            hidden, config["expert_ffn_hidden_size"], config["n_routed_experts"], ranks, f"{name}.mlp.experts"
        )
    yield Piece("mtp.eh_proj", hidden, 2 * hidden, ("model.mtp.layers.0.eh_proj",))
    name = "model.mtp.layers.0.transformer_layer"
    yield from attention(hidden, sizes, ranks.attention_tp, f"{name}.self_attn")
    yield from mlp("mlp", hidden, cut(config["ffn_hidden_size"], ranks.mlp_tp), f"{name}.mlp")
    yield head(config, ranks)
