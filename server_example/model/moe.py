"""Feed-forward layers: dense, and routed experts beside a shared expert (DeepSeek-V3 report, 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import moe_fp8
from server_example.model.batch import DecodeBatch, PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.layers import Fp8Weight, Quantizer, gemm


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
        gate_up = gemm(self.quantize(x), self.weights.gate_up)
        hidden = moe_fp8.silu_mul_quantize(gate_up, power_of_two=self.quantize.power_of_two)
        return gemm(hidden, self.weights.down).float()


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
        weights, ids = self.route(x)
        if isinstance(batch, DecodeBatch):
            ids = ids.masked_fill(~batch.active[:, None], -1)  # padded requests go to no expert
        batch.routed.append(ids)
        experts = self.weights.experts
        routed = moe_fp8.fused_moe(
            x.to(self.quantize.dtype),
            ids,
            weights,
            experts.gate_up.weight,
            experts.gate_up.scale,
            experts.down.weight,
            experts.down.scale,
            power_of_two=self.quantize.power_of_two,
        )
        return routed.float() + self.shared(x, batch)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 [T, k] and expert ids int32 [T, k]; the choice is group-limited, in fp32."""
        config = self.config
        return moe_fp8.route_topk(
            x.float() @ self.weights.gate.T,
            config.num_experts_per_tok,
            scoring="sigmoid",
            correction_bias=self.weights.correction_bias,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            renormalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
