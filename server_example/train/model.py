"""DeepSeek-V3.2 for training: plain modules whose names are the checkpoint's names.

Attention keeps K and V expanded, and every expert computes every token: at this size that is faster than
sorting tokens by expert. The indexer learns as the DeepSeek-V3.2-Exp report describes (section 2.2).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from server_example.model.config import ModelConfig
from server_example.model.mla import LATENT_EPS
from server_example.model.rope import Rope

#: "dense": all tokens are attended to, and the indexer rests. "distil": so too, and the indexer learns to
#: predict the attention. "sparse": the indexer's tokens are attended to, and it learns on them.
Phase = Literal["dense", "distil", "sparse"]


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.RMSNorm):
    """In fp32 under autocast too, as the model is served."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Indexer(nn.Module):
    def __init__(self, config: ModelConfig, rope: Rope) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rope, self.rope_dim = rope, config.qk_rope_head_dim
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        rotated = self.rope(x[..., : self.rope_dim], positions, interleaved=False)
        return torch.cat((rotated.to(x.dtype), x[..., self.rope_dim :]), dim=-1)

    def forward(self, x: torch.Tensor, q_latent: torch.Tensor) -> torch.Tensor:
        """Scores [B, T, T] of every pair of tokens, without the causal mask."""
        queries = self._rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)))
        keys = self._rotate(self.k_norm(self.wk(x))[:, :, None])[:, :, 0]
        weights = self.weights_proj(x) * (self.heads * self.dim) ** -0.5
        # [B, T, H, T] in rows of queries, so that the sum over heads is one product of matrices.
        scores = (queries.flatten(1, 2) @ keys.transpose(1, 2)).relu().unflatten(1, (-1, self.heads))
        return (weights[:, :, None] @ scores)[:, :, 0]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: Rope) -> None:
        super().__init__()
        self.config, self.rope = config, rope
        hidden, heads = config.hidden_size, config.num_attention_heads
        nope, rope_dim, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = Norm(config.q_lora_rank, eps=LATENT_EPS)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope_dim))
        self.kv_a_proj_with_mqa = linear(hidden, config.latent_dim)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, eps=LATENT_EPS)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + value))
        self.o_proj = linear(heads * value, hidden)
        self.indexer = Indexer(config, rope)

    def forward(self, x: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, hidden] -> the output, and the indexer's loss (0 in the dense phase)."""
        config, length = self.config, x.shape[1]
        positions = torch.arange(length, device=x.device)
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = self.q_b_proj(q_latent).unflatten(-1, (heads, -1)).tensor_split((nope,), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).tensor_split((config.kv_lora_rank,), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, values = kv.tensor_split((nope,), dim=-1)
        q_rope = self.rope(q_rope, positions, interleaved=True).to(q_nope.dtype)
        k_rope = self.rope(k_rope[:, :, None], positions, interleaved=True).to(k_nope.dtype)
        queries = torch.cat((q_nope, q_rope), dim=-1).transpose(1, 2)
        keys = torch.cat((k_nope, k_rope.expand(-1, -1, heads, -1)), dim=-1).transpose(1, 2)
        values = values.transpose(1, 2)

        loss = x.new_zeros(())
        if phase == "dense":
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=config.softmax_scale
            )
        else:
            # The indexer learns from the attention alone; the language model's loss does not reach it.
            index = self.indexer(x.detach(), q_latent.detach()).float()
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            index = index.masked_fill(~visible, -torch.inf)
            if phase == "sparse" and config.index_topk < length:
                chosen = index.topk(config.index_topk, dim=-1).indices
                visible = torch.zeros_like(index, dtype=torch.bool).scatter_(-1, chosen, True) & visible
                index = index.masked_fill(~visible, -torch.inf)
                visible = visible[:, None]
            scores = (queries @ keys.transpose(-1, -2)).float() * config.softmax_scale
            shares = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            attended = shares.to(values.dtype) @ values
            target = shares.detach().mean(dim=1)
            # 0 * log 0 is 0, and masked keys have target 0.
            prediction = index.log_softmax(dim=-1).masked_fill(target == 0, 0.0)
            loss = (torch.special.xlogy(target, target) - target * prediction).sum(dim=-1).mean()
        return self.o_proj(attended.transpose(1, 2).flatten(2)), loss


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses experts. A bias keeps their load even, as in the DeepSeek-V3 report (section 2.1.2)."""

    e_score_correction_bias: torch.Tensor
    load: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> the share fp32 [..., E] of every expert; 0 if it is not chosen."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.weight.float().T).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        if config.n_group > 1:
            groups = choice.unflatten(-1, (config.n_group, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            choice = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        ids = choice.topk(config.num_experts_per_tok, dim=-1).indices
        chosen = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
        if self.training:
            self.load += chosen.flatten(0, -2).sum(0)
        shares = scores * chosen
        if config.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares * config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Moves the bias against the load since the last call; returns the largest load / the mean load."""
        mean = self.load.mean()
        self.e_score_correction_bias += rate * (mean - self.load).sign()
        excess = float(self.load.max() / mean)
        self.load.zero_()
        return excess


class Moe(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = nn.ModuleList(Mlp(hidden, intermediate) for _ in range(config.n_routed_experts))
        self.shared_experts = Mlp(hidden, intermediate * config.n_shared_experts)

    def _joined(self, name: str, dim: int) -> torch.Tensor:
        return torch.cat([getattr(expert, name).weight for expert in self.experts], dim=dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functional.linear(x, self._joined("gate_proj", 0))
        hidden = functional.silu(gate) * functional.linear(x, self._joined("up_proj", 0))
        shares = self.gate(x)[..., None].to(hidden.dtype)
        hidden = (hidden.unflatten(-1, (len(self.experts), -1)) * shares).flatten(-2)
        return functional.linear(hidden, self._joined("down_proj", 1)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, rope: Rope, number: int, dropout: float) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = Norm(hidden, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, rope)
        self.post_attention_layernorm = Norm(hidden, eps=config.rms_norm_eps)
        dense = number < config.first_k_dense_replace
        self.mlp = Mlp(hidden, config.intermediate_size) if dense else Moe(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        attended, loss = self.self_attn(self.input_layernorm(x), phase)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x))), loss


class Body(nn.Module):
    def __init__(self, config: ModelConfig, rope: Rope, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, rope, number, dropout) for number in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)


class TrainedModel(nn.Module):
    """fp32 parameters; `torch.autocast` around a call makes the products bf16."""

    def __init__(
        self, config: ModelConfig, max_positions: int, device: torch.device, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        rope = Rope(config.qk_rope_head_dim, config.rope, max_positions, device)
        self.model = Body(config, rope, dropout)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.to(device)

    def initialize(self) -> None:
        """Normal weights; those that write to the residual stream are smaller, by the number of writers."""
        writers = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = writers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T] -> logits [B, T, vocab], and the mean of the indexers' losses."""
        x = self.model.embed_tokens(tokens)
        losses = []
        for layer in self.model.layers:
            x, loss = layer(x, phase)
            losses.append(loss)
        return self.lm_head(self.model.norm(x)), torch.stack(losses).mean()

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]
