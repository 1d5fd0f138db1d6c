"""vLLM's routed experts with block-scaled FP8 weights, on our kernels from the tokens to their sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.ops import fused_moe, moe_workspace_bytes
from moe_fp8.settings import settings


class MoeFp8Experts(DeepGemmExperts):
    """Five launches: permute (with the quantization, unless ranks exchange tokens), GEMM, SiLU, GEMM, sum.

    Experts' rows follow one another without padding. Scales are rounded as vLLM's kernels for DeepGEMM round
    them: up to powers of two with VLLM_USE_DEEP_GEMM_E8M0, if DeepGEMM is used at all.
    """

    # Elastic EP builds experts again, but only if their constructor has no parameters of its own.
    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config)
        self.power_of_two = DeepGemmQuantScaleFMT.from_oracle() == DeepGemmQuantScaleFMT.FLOAT32_CEIL_UE8M0

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        supported, reason = DeepGemmExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return supported, reason
        if moe_config.in_dtype is not torch.bfloat16:
            return False, f"activations are bf16, not {moe_config.in_dtype}"
        if getattr(moe_config, "has_bias", False):
            return False, "the kernels add no bias"
        alpha, beta = (getattr(moe_config, name, None) for name in ("swiglu_alpha", "swiglu_beta"))
        if alpha not in (None, 1) or beta not in (None, 0):
            return False, f"the kernels compute SiLU(gate) * up, not SwiGLU with alpha {alpha}, beta {beta}"
        sizes = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        if any(size % 128 for size in sizes):
            return False, f"the kernels need sizes that 128 divides, got {sizes}"
        if moe_config.num_local_experts > MAX_EXPERTS:
            return False, f"a rank has at most {MAX_EXPERTS} experts, got {moe_config.num_local_experts}"
        return True, None

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_device_capability(90))

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return bool((weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym))

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return settings().batch_invariant

    @property
    def expects_unquantized_inputs(self) -> bool:
        # Ranks exchange FP8 tokens, which are half as large.
        return not bool(self.moe_config.moe_parallel_config.use_all2all_kernels)

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, *others: Any, **options: Any
    ) -> tuple[tuple[int, ...], ...]:
        num_bytes = moe_workspace_bytes(
            num_tokens=M, topk=topk, num_experts=self.moe_config.num_local_experts, hidden_size=K,
            intermediate_size=N // 2,
        )  # fmt: skip
        # vLLM's output may lie in the first workspace, so all of ours is the second, counted in bf16.
        return (0,), (-(-num_bytes // 2),), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        weights = None if apply_router_weight_on_input else topk_weights.float()
        fused_moe(
            hidden_states,
            topk_ids,
            weights,
            w1,
            self.w1_scale,
            w2,
            self.w2_scale,
            x_scale=a1q_scale,
            expert_map=expert_map,
            limit=self.gemm1_clamp_limit,
            power_of_two=self.power_of_two,
            rounded=True,
            workspace=workspace2.view(torch.uint8),
            out=output,
        )
