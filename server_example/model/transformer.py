"""The whole model: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from server_example.cache import LayerCache
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.indexer import Indexer, IndexerWeights
from server_example.model.layers import Quantizer, hadamard, rms_norm
from server_example.model.mla import Mla, MlaWeights
from server_example.model.moe import Mlp, MlpWeights, Moe, MoeWeights
from server_example.model.rope import Rope
from server_example.sampling import likeliest


@dataclass(frozen=True)
class LayerWeights:
    input_norm: torch.Tensor
    attention: MlaWeights
    indexer: IndexerWeights
    post_norm: torch.Tensor
    feed_forward: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """`embedding`, `head` fp32 [vocab, hidden]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Layer:
    def __init__(self, weights: LayerWeights, attention: Mla, feed_forward: Mlp | Moe, eps: float) -> None:
        self.weights = weights
        self.attention = attention
        self.feed_forward = feed_forward
        self.eps = eps

    def __call__(self, x: torch.Tensor, batch: PrefillBatch | DecodeBatch, cache: LayerCache) -> torch.Tensor:
        x = x + self.attention(rms_norm(x, self.weights.input_norm, self.eps), batch, cache)
        return x + self.feed_forward(rms_norm(x, self.weights.post_norm, self.eps), batch)


class Transformer:
    """GEMMs run in FP8; the residual stream, norms, softmax and router run in fp32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_positions: int,
        num_workers: int,
    ) -> None:
        """The model is on the device of `weights`. `num_workers`: see `Indexer`."""
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        quantize = Quantizer(config.power_of_two_scales)
        rope = Rope(config.qk_rope_head_dim, config.rope, max_positions, self.device)
        rotation = hadamard(config.index_head_dim, self.device)
        self.layers = []
        for layer in weights.layers:
            indexer = Indexer(config, layer.indexer, quantize, rope, rotation, num_workers)
            attention = Mla(config, layer.attention, indexer, quantize, rope)
            feed_forward: Mlp | Moe
            if isinstance(layer.feed_forward, MoeWeights):
                feed_forward = Moe(config, layer.feed_forward, quantize)
            else:
                feed_forward = Mlp(layer.feed_forward, quantize)
            self.layers.append(Layer(layer, attention, feed_forward, config.rms_norm_eps))
        #: The tokens that each expert has got in all layers together, int64 [1 + E]; [0] counts padding.
        self.expert_tokens = torch.zeros(1 + config.n_routed_experts, dtype=torch.int64, device=self.device)

    def _forward(self, batch: PrefillBatch | DecodeBatch, caches: list[LayerCache]) -> torch.Tensor:
        x = self.weights.embedding[batch.tokens]  # -1, of a request that ends, takes the last row.
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, cache)
        if batch.routed:
            # Once for all layers, and on the device: a captured step counts at each replay.
            chosen = torch.stack(batch.routed).flatten() + 1
            self.expert_tokens.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps) @ self.weights.head.T

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, caches: list[LayerCache]) -> torch.Tensor:
        """fp32 logits [R, vocab] after each run's last token; the runs are in the caches afterwards."""
        return self._logits(self._forward(batch, caches)[batch.last])

    @torch.inference_mode()
    def score(self, batch: PrefillBatch, caches: list[LayerCache]) -> torch.Tensor:
        """As `prefill`, with the logits after every token of `batch`: fp32 [T, vocab]."""
        return self._logits(self._forward(batch, caches))

    @torch.inference_mode()
    def decode(self, inputs: Mapping[str, torch.Tensor], caches: list[LayerCache]) -> dict[str, torch.Tensor]:
        """`logits` fp32 [B, vocab] after one token of each request, and `tokens` int64 [B] by `likeliest`.

        Safe to capture: see `DecodeBatch`.
        """
        logits = self._logits(self._forward(DecodeBatch.of(inputs), caches))
        return {"logits": logits, "tokens": likeliest(logits)}
