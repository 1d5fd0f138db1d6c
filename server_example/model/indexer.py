"""The lightning indexer chooses the cached tokens of a query (DeepSeek-V3.2-Exp report, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import moe_fp8
from server_example.cache import LayerCache
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.layers import Fp8Weight, Quantizer, layer_norm
from server_example.model.rope import Rope

#: Most bytes for the logits of a prefill chunk, for a context of any length.
PREFILL_BYTES = 256 << 20


@dataclass(frozen=True)
class IndexerWeights:
    wq_b: Fp8Weight
    wk: Fp8Weight
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    weights_proj: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """The cache's `slots` int64 [T, k], and bool [T, k]: False if a query has fewer than k tokens.

    A slot that is not valid is that of the request's own first token: attention weighs what it holds by zero,
    and zero times another request's NaN would be NaN.
    """

    slots: torch.Tensor
    valid: torch.Tensor


class Indexer:
    def __init__(
        self,
        config: ModelConfig,
        weights: IndexerWeights,
        quantize: Quantizer,
        rope: Rope,
        rotation: torch.Tensor,
        num_workers: int,
    ) -> None:
        """`rotation`: Hadamard matrix of the head dimension. `num_workers`: SMs that share a decode step."""
        self.weights = weights
        self.quantize = quantize
        self.rope = rope
        self.rotation = rotation
        self.num_workers = num_workers
        self.heads = config.index_n_heads
        self.dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, heads, D]: rotary embedding on the first rope_dim elements, then Hadamard on all elements."""
        rotated = self.rope(x[..., : self.rope_dim], positions, interleaved=False)
        return torch.cat((rotated, x[..., self.rope_dim :].float()), dim=-1) @ self.rotation

    def select(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
        cache: LayerCache,
    ) -> Selection:
        """Caches the keys of `x` [T, hidden], scores every visible token, keeps the best `topk`."""
        tokens = x.shape[0]
        positions = batch.positions
        keys = layer_norm(
            self.quantize.linear(x, self.weights.wk), self.weights.k_norm, self.weights.k_norm_bias
        )
        moe_fp8.indexer_quantize_and_cache(
            self._rotate(keys[:, None], positions)[:, 0].to(self.quantize.dtype),
            cache.index,
            batch.slots,
            power_of_two=self.quantize.power_of_two,
        )

        queries = self.quantize.linear(q_latent, self.weights.wq_b).view(tokens, self.heads, self.dim)
        queries, query_scale = self.quantize(self._rotate(queries, positions).flatten(0, 1))
        queries = queries.view(tokens, self.heads, self.dim)
        # A query's own FP8 scale can go into its head weight, because relu is positively homogeneous.
        head_weights = (x.float() @ self.weights.weights_proj.T * query_scale.reshape(tokens, self.heads)) * (
            self.heads * self.dim
        ) ** -0.5

        if isinstance(batch, DecodeBatch):
            chosen = moe_fp8.paged_indexer_select(
                queries[:, None],
                cache.index,
                head_weights,
                batch.context_lens,
                batch.block_table,
                topk=min(self.topk, batch.max_context_len),
                max_context_len=batch.max_context_len,
                num_sms=self.num_workers,
            )
            filled = chosen.clamp(min=0)
        else:
            keys, key_scale = cache.read_index(batch.context_slots)
            topk = min(self.topk, keys.shape[0])
            num_bytes = moe_fp8.indexer_workspace_bytes(
                num_queries=tokens, num_keys=keys.shape[0], topk=topk, max_bytes=PREFILL_BYTES
            )
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
            chosen = moe_fp8.indexer_select(
                queries,
                keys,
                key_scale,
                head_weights,
                batch.key_start,
                batch.key_end,
                topk=topk,
                workspace=workspace,
            )
            filled = chosen.maximum(batch.key_start[:, None])
        return Selection(batch.to_slots(filled.long()), chosen >= 0)
