"""What a model that vLLM has loaded calls: shapes of weights, limits, the indexer, numbers of SMs."""

from __future__ import annotations

from typing import Any

import torch

from moe_fp8.integrations import kinds
from moe_fp8.integrations.planning import LoadedEngine
from moe_fp8.ops import get_num_sms
from moe_fp8.warmup.models import Indexer

#: vLLM pads fewer heads of an indexer with zeros.
_LEAST_HEADS = 32

#: The pages that vLLM may choose if an indexer's keys are pooled.
_POOLED_PAGES = (32, 64)


def describe_loaded(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> LoadedEngine:
    """The layers of `model` that our kernels serve, within the limits of `vllm_config`."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
    served = kinds.served()
    loaded = LoadedEngine(
        engine="vllm",
        name=type(model).__name__,
        max_tokens=scheduler.max_num_batched_tokens,
        max_batch=scheduler.max_num_seqs,
        max_positions=model_config.max_model_len,
        num_sms=_sms(parallel),
        next_n=1 + drafts,
        data_parallel=parallel.data_parallel_size,  # ranks share experts with expert parallelism or without
    )
    if "dense" in served:
        from moe_fp8.integrations.vllm.linear import MoeFp8LinearKernel

        loaded.dense |= MoeFp8LinearKernel.loaded
    if "experts" in served:
        from moe_fp8.integrations.vllm.experts import MoeFp8Experts

        loaded.experts |= MoeFp8Experts.loaded
        loaded.experts_per_token = MoeFp8Experts.most_experts_per_token
    for module in model.modules():
        weights = [getattr(module, name, None) for name in ("w13_weight", "w2_weight")]
        if "experts" in served and _calls_deep_gemm(module):
            loaded.experts |= {tuple(weight.shape) for weight in weights if weight is not None}
            top_k: Any = module.top_k
            loaded.experts_per_token = max(loaded.experts_per_token, top_k)
    text = model_config.hf_text_config
    loaded.kv_lora_rank = getattr(text, "kv_lora_rank", None)
    if "indexer" in served and getattr(text, "index_topk", None):
        heads = max(text.index_n_heads, _LEAST_HEADS)
        loaded.indexer = Indexer(heads, text.index_head_dim, text.index_topk)
        if (getattr(text, "index_kpool", None) or 1) > 1:
            loaded.block_size = _POOLED_PAGES
    return loaded


def _sms(parallel: Any) -> tuple[int, ...]:
    """The numbers of SMs with which vLLM calls our kernels.

    If micro-batches overlap, communication takes VLLM_DBO_COMM_SMS of them, or the fewer that it can use.
    """
    all_sms = get_num_sms()
    if not parallel.use_ubatching:
        return (all_sms,)
    from vllm import envs
    from vllm.distributed.parallel_state import get_ep_group

    taken = envs.VLLM_DBO_COMM_SMS
    if parallel.enable_expert_parallel:
        manager = getattr(get_ep_group().device_communicator, "all2all_manager", None)
        most = None if manager is None else manager.max_sms_used()
        taken = taken if most is None else min(taken, most)
    return all_sms, all_sms - taken


def _calls_deep_gemm(module: torch.nn.Module) -> bool:
    """Whether the module has routed experts in FP8 whose products vLLM leaves to `deep_gemm`."""
    weight = getattr(module, "w13_weight", None)
    if weight is None or weight.dtype is not torch.float8_e4m3fn:
        return False
    experts = getattr(getattr(module, "quant_method", None), "experts_cls", None)
    return "DeepGemm" in getattr(experts, "__name__", "")
