"""Feed-forward layers: dense, and routed experts beside a shared expert (DeepSeek-V3 report, 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import moe_fp8
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.layers import Fp8Weight, Quantizer, silu_mul


@dataclass(frozen=True)
class MlpWeights:
    """`gate_up` [2I, H] (gate rows first), `down` [H, I]; routed experts add a leading dimension E."""

    gate_up: Fp8Weight
    down: Fp8Weight


class Mlp:
    def __init__(self, weights: MlpWeights, quantize: Quantizer) -> None:
        self.weights = weights
        self.quantize = quantize

    def __call__(self, x: torch.Tensor, batch: PrefillBatch | DecodeBatch) -> torch.Tensor:
        """x [T, hidden] -> fp32 [T, hidden]. `batch` is unused, because the layer treats all rows alike."""
        hidden = silu_mul(self.quantize.linear(x, self.weights.gate_up))
        return self.quantize.linear(hidden, self.weights.down)


@dataclass(frozen=True)
class MoeWeights:
    """`gate` fp32 [E, H]; `correction_bias` fp32 [E] affects the choice of experts, not their weights."""

    gate: torch.Tensor
    correction_bias: torch.Tensor
    experts: MlpWeights
    shared: MlpWeights


class Moe:
    def __init__(self, config: ModelConfig, weights: MoeWeights, quantize: Quantizer) -> None:
        self.config = config
        self.weights = weights
        self.quantize = quantize
        self.shared = Mlp(weights.shared, quantize)

    def __call__(self, x: torch.Tensor, batch: PrefillBatch | DecodeBatch) -> torch.Tensor:
        """x [T, hidden] -> fp32 [T, hidden]."""
        expert_ids, expert_weights = self.route(x)
        if isinstance(batch, DecodeBatch):
            routed = self._masked(x, expert_ids, batch.active)
        else:
            routed = self._contiguous(x, expert_ids)
        combined = (routed * expert_weights[..., None]).sum(dim=1)
        return combined + self.shared(x, batch)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids int64 [T, k] and their weights fp32 [T, k]; the choice is group-limited, in fp32."""
        config = self.config
        scores = (x.float() @ self.weights.gate.T).sigmoid()
        choice = scores + self.weights.correction_bias
        if config.n_group > 1:
            grouped = choice.view(x.shape[0], config.n_group, -1)
            group_score = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
            kept = group_score.topk(config.topk_group, dim=1).indices
            keep = torch.zeros_like(group_score).scatter_(1, kept, 1.0)
            choice = grouped.masked_fill(keep[..., None] == 0, -torch.inf).flatten(1)
        expert_ids = choice.topk(config.num_experts_per_tok, dim=1).indices
        weights = scores.gather(1, expert_ids)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return expert_ids, weights * config.routed_scaling_factor

    def _contiguous(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Prefill: rows are sorted by expert, ragged, without padding. Returns fp32 [T, k, hidden]."""
        top = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)
        experts = torch.arange(self.config.n_routed_experts, device=x.device)
        counts = (expert_ids.flatten()[:, None] == experts).sum(dim=0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        rows = x[order // top]
        for weight, activation in (
            (self.weights.experts.gate_up, silu_mul),
            (self.weights.experts.down, None),
        ):
            quantized, scale = self.quantize(rows)
            rows = moe_fp8.grouped_gemm_fp8_contiguous(
                quantized, scale, weight.weight, weight.scale, offsets=offsets
            )
            rows = activation(rows) if activation else rows.float()
        unsorted = torch.empty_like(rows).index_copy_(0, order, rows)
        return unsorted.view(x.shape[0], top, -1)

    def _masked(self, x: torch.Tensor, expert_ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Decode: each expert has a buffer of B rows, so B fixes all shapes. Returns fp32 [B, k, hidden].

        Rows of padded requests go to no expert and come back as zeros.
        """
        tokens, top = expert_ids.shape
        num_experts = self.config.n_routed_experts
        experts = torch.arange(num_experts, device=x.device)
        assigned = ((expert_ids[..., None] == experts) & active[:, None, None]).flatten(0, 1)
        masked_m = assigned.sum(dim=0).to(torch.int32)
        rank = (assigned.cumsum(dim=0) - 1).gather(1, expert_ids.view(-1, 1))[:, 0]
        present = assigned.any(dim=1)
        # Rows that are not assigned go to one row past the buffers, so the number of written rows is fixed.
        row = (expert_ids.flatten() * tokens + rank).masked_fill(~present, num_experts * tokens)
        buffer = x.new_zeros(num_experts * tokens + 1, x.shape[1])
        buffer.index_copy_(0, row, x[:, None].expand(-1, top, -1).flatten(0, 1))
        rows = buffer[:-1]
        for weight, activation in (
            (self.weights.experts.gate_up, silu_mul),
            (self.weights.experts.down, None),
        ):
            quantized, scale = self.quantize(rows)
            rows = moe_fp8.grouped_gemm_fp8_masked(
                quantized.view(num_experts, tokens, -1),
                moe_fp8.to_mn_major(scale.view(num_experts, tokens, -1)),
                weight.weight,
                weight.scale,
                masked_m,
                expected_m=max(1, tokens * top // num_experts),
            ).flatten(0, 1)
            rows = activation(rows) if activation else rows.float()
        picked = rows[row.clamp_max(num_experts * tokens - 1)]
        # Rows beyond masked_m are unspecified and may be NaN: fill them, do not multiply them by zero.
        return picked.masked_fill(~present[:, None], 0.0).view(tokens, top, -1)
