"""Multi-head latent attention over the tokens that the indexer selected (DeepSeek-V2 report, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server_example.cache import LayerCache
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.indexer import Indexer
from server_example.model.layers import Fp8Weight, Quantizer, rms_norm
from server_example.model.rope import Rope

#: The epsilon of the latents' norms: a constant in DeepSeek's and transformers' models, not the config's.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class MlaWeights:
    """`qkv_a` joins q_a_proj and kv_a_proj_with_mqa. `k_up`, `v_up`: fp32 [heads, nope | v, kv_lora]."""

    qkv_a: Fp8Weight
    q_norm: torch.Tensor
    q_b: Fp8Weight
    kv_norm: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor
    o: Fp8Weight


class Mla:
    """The up-projections of K and V are absorbed into the query and the output, in prefill and in decode.

    So the cache holds one latent row for each token, and both phases do the same arithmetic on it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MlaWeights,
        indexer: Indexer,
        quantize: Quantizer,
        rope: Rope,
    ) -> None:
        self.config = config
        self.weights = weights
        self.indexer = indexer
        self.quantize = quantize
        self.rope = rope

    def __call__(self, x: torch.Tensor, batch: PrefillBatch | DecodeBatch, cache: LayerCache) -> torch.Tensor:
        """x [T, hidden], normalized -> fp32 [T, hidden]; writes the tokens into `cache`."""
        config, weights = self.config, self.weights
        tokens, positions = x.shape[0], batch.positions
        q_latent, kv_latent, k_rope = self.quantize.linear(x, weights.qkv_a).split(
            (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim), dim=1
        )
        q_latent = rms_norm(q_latent, weights.q_norm, LATENT_EPS)
        kv_latent = rms_norm(kv_latent, weights.kv_norm, LATENT_EPS)
        k_rope = self.rope(k_rope[:, None], positions, interleaved=True)[:, 0]
        cache.write_latent(batch.slots, torch.cat((kv_latent, k_rope), dim=1))

        selection = self.indexer.select(x, q_latent, batch, cache)

        queries = self.quantize.linear(q_latent, weights.q_b).view(tokens, config.num_attention_heads, -1)
        q_nope, q_rope = queries.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=2)
        q_rope = self.rope(q_rope, positions, interleaved=True)
        q_absorbed = torch.einsum("thn,hnl->thl", q_nope, weights.k_up)
        selected = cache.latent[selection.slots].float()
        scores = (
            torch.einsum("thd,tkd->thk", torch.cat((q_absorbed, q_rope), dim=2), selected)
            * config.softmax_scale
        )
        # A finite value, because a padded row sees nothing and its softmax must not be NaN.
        scores = scores.masked_fill(~selection.valid[:, None], torch.finfo(torch.float32).min)
        attended = torch.einsum("thk,tkl->thl", scores.softmax(dim=-1), selected[..., : config.kv_lora_rank])
        values = torch.einsum("thl,hvl->thv", attended, weights.v_up)
        return self.quantize.linear(values.flatten(1), weights.o)
