"""What a model that vLLM has loaded calls: shapes of weights, limits, the indexer, numbers of SMs."""

from __future__ import annotations

from typing import Any

import torch

from moe_fp8.integrations import kinds
from moe_fp8.integrations.planning import LoadedEngine
from moe_fp8.ops import get_num_sms
from moe_fp8.warmup.models import Indexer

#: The attributes that lead from a layer to its kernel. The object in `quant_method` holds the kernel in most
#: formats, and the layer's `scheme` holds it in compressed-tensors and Quark.
_HOLDERS = ("quant_method", "scheme", "linear_method")


def describe_loaded(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> LoadedEngine:
    """The layers of `model` that our kernels serve, within the limits of `vllm_config`."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    # vLLM 0.33 gives a draft model of its own one token more of each request than the model gets.
    added = scheduler.max_num_seqs if getattr(speculative, "method", None) == "draft_model" else 0
    served = kinds.served()
    loaded = LoadedEngine(
        engine="vllm",
        name=type(model).__name__,
        max_tokens=scheduler.max_num_batched_tokens + added,
        max_batch=scheduler.max_num_seqs,
        max_positions=model_config.max_model_len,
        num_sms=_sms(parallel),
        next_n=1 + drafts,
        data_parallel=_groups(parallel),  # ranks share experts with expert parallelism or without
    )
    copies = 1
    for module in model.modules():
        if "dense" in served and _calls_our_gemm(module):
            loaded.add_dense(module.weight)
        if "experts" in served and _calls_our_experts(module):
            loaded.add_experts(module)
            copies = max(copies, _copies(module))
    loaded.data_parallel *= copies
    text = model_config.hf_text_config
    loaded.kv_lora_rank = getattr(text, "kv_lora_rank", None)
    if "indexer" in served and getattr(text, "index_topk", None):
        pooled = (getattr(text, "index_kpool", None) or 1) > 1
        loaded.indexer = Indexer(text.index_n_heads, text.index_head_dim, text.index_topk, pooled=pooled)
    return loaded


def _groups(parallel: Any) -> int:
    """The groups of ranks with tokens of their own: as many as elastic expert parallelism may reach.

    With prefill context parallelism, each rank of a group may have as many tokens as a whole pass has: decode
    context parallelism gives all ranks the tokens of a decode step.
    """
    most = getattr(parallel, "elastic_ep_max_dp_size", None)  # vLLM 0.33 has it
    return int((most or parallel.data_parallel_size) * parallel.prefill_context_parallel_size)


def _copies(module: Any) -> int:
    """How often experts may get the tokens of a group, because several of its ranks send all of them.

    Libraries such as DeepEP have each rank send the tokens that it has. Tensor-parallel ranks all have the
    same tokens, unless the model divides them before its experts (sequence parallelism).
    """
    parallel = module.moe_config.moe_parallel_config
    if not parallel.use_all2all_kernels or parallel.use_ag_rs_all2all_kernels:
        return 1
    return int(parallel.ep_size // (parallel.dp_size * parallel.pcp_size * parallel.sp_size))


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


def _calls_our_gemm(holder: Any) -> bool:
    """Whether a layer, or an object that leads to its kernel, leads to a kernel that calls our GEMM.

    Ours is a kernel of vLLM's class for `deep_gemm`, and the others of this class call our module. One kernel
    of FlashInfer's has such a kernel as `fallback` and calls `deep_gemm` from 32 rows on.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel

    held = getattr(holder, "__dict__", {})
    for value in held.values():
        for kernel in (value, getattr(value, "fallback", None)):
            if isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
                return True
    return any(_calls_our_gemm(held[name]) for name in _HOLDERS if name in held)


def _calls_our_experts(module: torch.nn.Module) -> bool:
    """Whether the module has routed experts in FP8 that are ours, or whose products vLLM leaves to ours."""
    weight = getattr(module, "w13_weight", None)
    if weight is None or weight.dtype is not torch.float8_e4m3fn:
        return False
    experts = getattr(getattr(module, "quant_method", None), "experts_cls", None)
    name = getattr(experts, "__name__", "")
    return name == "MoeFp8Experts" or "DeepGemm" in name
