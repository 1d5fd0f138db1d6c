"""vLLM's own routed experts as peers of class moe_layer: its path around DeepGEMM, and its Triton kernels.

vLLM 0.24 must be importable; `load` returns nothing if it is not.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Name of a peer -> module and class of its experts.
_EXPERTS = {
    "deep_gemm": ("deep_gemm_moe", "DeepGemmExperts"),
    "triton": ("triton_moe", "TritonExperts"),
}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def load(
    weights: tuple[Tensor, Tensor, Tensor, Tensor], topk: int, num_experts: int, expert_map: Tensor | None
) -> dict[str, Layer]:
    """Name -> a layer of these weights (w13, its scales, w2, its scales): tokens, weights, ids -> sums."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return {
            f"vllm-{vllm.__version__} {name}": _layer(name, weights, topk, num_experts, expert_map)
            for name in _EXPERTS
        }


def _layer(
    name: str,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    topk: int,
    num_experts: int,
    expert_map: Tensor | None,
) -> Layer:
    from vllm.model_executor.layers.fused_moe import config, modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    w13, w13_scale, w2, w2_scale = weights
    if not is_workspace_manager_initialized():
        init_workspace_manager(w13.device)
    moe: Any = config.FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=topk,
        hidden_dim=w13.shape[2],
        intermediate_size=w2.shape[2],
        num_local_experts=w13.shape[0],
        num_logical_experts=num_experts,
        activation=MoEActivation.SILU,
        device=w13.device,
        routing_method=config.RoutingMethodType.TopK,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        max_num_tokens=1 << 15,
    )
    quantization = config.fp8_w8a8_moe_quant_config(
        w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[128, 128]
    )
    module, cls = _EXPERTS[name]
    experts = getattr(importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{module}"), cls)
    prepare: Any = maybe_make_prepare_finalize(moe, quantization, allow_new_interface=True)
    kernel = modular_kernel.FusedMoEKernel(prepare, experts(moe_config=moe, quant_config=quantization))

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out: Tensor = kernel.apply(
            x, w13, w2, topk_weights, topk_ids, MoEActivation.SILU, num_experts, expert_map, False
        )
        return out

    return layer
