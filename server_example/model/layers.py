"""Norms, rotary embedding and FP8 linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import moe_fp8


@dataclass(frozen=True)
class Fp8Weight:
    """`weight` [N,K] or [E,N,K] float8_e4m3fn; `scale` fp32 [ceil(N/128), ceil(K/128)] for each expert."""

    weight: torch.Tensor
    scale: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """fp32 [N,K]."""
        n, k = self.weight.shape
        scale = self.scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return self.weight.float() * scale


class Quantizer:
    """Quantizes activations to FP8 in the scale format that the model was made for."""

    #: Activations are rounded to it before they are quantized, as in a bf16 model.
    dtype = torch.bfloat16

    def __init__(self, power_of_two: bool) -> None:
        self.power_of_two = power_of_two

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M,K] of any float dtype."""
        return moe_fp8.quantize_fp8(x.to(self.dtype).contiguous(), power_of_two=self.power_of_two)

    def linear(self, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """x [M,K] @ weight^T -> fp32 [M,N] with bf16 values."""
        x = x.to(self.dtype).contiguous()
        return moe_fp8.linear_fp8(
            x, weight.weight, weight.scale, power_of_two=self.power_of_two, constant_weights=True
        ).float()


def gemm(x: tuple[torch.Tensor, torch.Tensor], weight: Fp8Weight) -> torch.Tensor:
    """Quantized x [M,K] @ weight^T -> bf16 [M,N]."""
    return moe_fp8.gemm_fp8(*x, weight.weight, weight.scale, constant_weights=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 norm over the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)


def hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """Orthonormal Hadamard matrix [dim, dim], dim a power of two; it spreads outliers before FP8."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (matrix * dim**-0.5).to(device)
