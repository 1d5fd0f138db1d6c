"""vLLM's linear layers with block-scaled FP8 weights, on our GEMM and quantizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel

from moe_fp8.limits import refuse_k, refuse_n
from moe_fp8.ops import linear_fp8


class MoeFp8LinearKernel(DeepGemmFp8BlockScaledMMKernel):
    """Quantizes bf16 activations and multiplies, in two kernels, for any number of rows.

    It treats weights as vLLM's kernel for DeepGEMM does: with VLLM_USE_DEEP_GEMM_E8M0, which is on by
    default, scales of weights and activations are rounded up to powers of two if DeepGEMM is used at all. So
    both kernels multiply the same numbers.
    """

    apply_input_quant: ClassVar[bool] = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if compute_capability != 90:
            return False, "the kernels need Hopper"
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        possible, reason = super(DeepGemmFp8BlockScaledMMKernel, cls).can_implement(config)
        if not possible:
            return possible, reason
        if config.out_dtype is not torch.bfloat16 or config.input_dtype is not torch.bfloat16:
            return False, "activations and output are bf16"
        groups = config.activation_quant_key.scale.group_shape, config.weight_quant_key.scale.group_shape
        if [tuple(group) for group in groups] != [(1, 128), (128, 128)]:
            return False, "scales are of 1 x 128 and 128 x 128"
        n, k = config.weight_shape
        refusal = refuse_n(n) or refuse_k(k)
        return not refusal, refusal or None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """A: bf16 `[M, K]`; `As` is a placeholder. B: fp8 `[N, K]`, Bs: fp32 `[ceil(N/128), K/128]`."""
        # The engine does not write weights while it serves.
        return linear_fp8(A, B, Bs, power_of_two=self.use_deep_gemm_e8m0, constant_weights=True)


assert issubclass(MoeFp8LinearKernel, Fp8BlockScaledMMLinearKernel)
