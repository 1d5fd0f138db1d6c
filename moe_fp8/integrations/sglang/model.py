"""What a model that SGLang has loaded calls: shapes of weights, limits, the indexer, numbers of SMs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_fp8.integrations import kinds
from moe_fp8.integrations.planning import LoadedEngine
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.ops import get_num_sms
from moe_fp8.warmup.models import Indexer

#: The most requests that SGLang decodes together if `--max-running-requests` does not say it.
_MOST_REQUESTS = 4096

#: Layers whose prefill leaves SMs to DeepEP if SGLang overlaps two batches.
_OVERLAPPED = ("DeepseekV2DecoderLayer", "MiMoV2DecoderLayer", "Qwen3MoeDecoderLayer")


def describe_loaded(model_runner: Any) -> LoadedEngine:
    """The layers of the runner's model that our kernels serve, within the limits of SGLang's arguments."""
    from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec

    config, parallel, spec = model_runner.model_config, get_parallel(), get_spec()
    served = kinds.served()
    # On Hopper, SGLang takes each drafted token of a request for a request of its own. A step of the draft
    # model has a token for each branch of the tree.
    drafts = max(spec.speculative_num_draft_tokens or 1, spec.speculative_eagle_topk or 1)
    dense = "dense" in served and _dense_calls_deep_gemm()
    loaded = LoadedEngine(
        engine="sglang",
        name=type(model_runner.model).__name__,
        max_tokens=_most_tokens(config.context_len),
        max_batch=(get_schedule().max_running_requests or _MOST_REQUESTS) * drafts,
        max_positions=config.context_len,
        num_sms=tuple(dict.fromkeys(_sms(model_runner.model, dense, "indexer" in served))),
        # Ranks of context parallelism share the tokens of a prefill, but each of them has all other tokens.
        data_parallel=parallel.attn_dp_size * parallel.attn_cp_size,
    )
    chosen = _most_chosen(model_runner.model)
    for module in model_runner.model.modules():
        weight = getattr(module, "weight", None)
        if dense and isinstance(weight, torch.Tensor) and _is_in_blocks(module, weight):
            loaded.add_dense(weight)
        if "experts" in served and _experts_call_deep_gemm(module):
            loaded.add_experts(module, otherwise=chosen)
        if "experts" in served and getattr(module, "use_deep_gemm_bmm", False):
            # Latent attention multiplies each head as the masked layout does an expert.
            loaded.add_grouped(module.w_kc, module.w_vc)
    text = config.hf_text_config
    loaded.kv_lora_rank = getattr(text, "kv_lora_rank", None)
    if "indexer" in served and getattr(text, "index_topk", None):
        loaded.indexer = Indexer(text.index_n_heads, text.index_head_dim, text.index_topk)
    return loaded


def _most_tokens(context_len: int) -> int:
    """The most tokens of a prefill, and of the graphs that SGLang captures for it."""
    from sglang.srt.runtime_context import get_exec, get_schedule, max_prefill_buffer_tokens

    schedule, graphs = get_schedule(), get_exec().graph.cuda_graph_config.prefill
    # Without chunks, one pass takes a whole prompt; chunked_prefill_size is then -1.
    longest = schedule.chunked_prefill_size or -1
    if longest < 0:
        longest = context_len
    captured = max(graphs.bs or (0,)) if graphs.backend != "disabled" else 0
    # With dynamic chunks, SGLang's own limit is longer than a chunk.
    return int(max(longest, schedule.max_prefill_tokens or 0, max_prefill_buffer_tokens(), captured))


def _sms(model: torch.nn.Module, dense: bool, logits: bool) -> Iterator[int]:
    """The numbers of SMs with which SGLang calls our kernels; other kernels run on the SMs that are left.

    `dense` and `logits`: whether we serve linear layers and the indexer's logits. SGLang refuses single-batch
    overlap on Hopper, so its numbers do not occur.
    """
    from sglang.srt.runtime_context import get_exec

    yield get_num_sms()
    overlaps = get_exec().overlap.enable_two_batch_overlap
    for module in model.modules():
        if overlaps and type(module).__name__ in _OVERLAPPED:
            yield from _sms_beside_deepep()
        # Both classes of DeepSeek's sparse indexer have it.
        if hasattr(module, "half_device_sm_count"):
            yield from _sms_of_indexer(module, dense, logits)


def _sms_beside_deepep() -> Iterator[int]:
    """The SMs of prefill with two-batch overlap; --deepep-config may say how many DeepEP takes."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    if deepep.use_deepep:  # Without its library, no prefill can run.
        yield get_num_sms() - deepep.DeepEPConfig.get_instance().num_sms


def _sms_of_indexer(indexer: Any, dense: bool, logits: bool) -> Iterator[int]:
    """Half of the SMs for the queries, which two streams compute beside the keys while a graph is captured.

    The fused indexer takes all SMs, except in prefill with context parallelism. With pipeline parallelism,
    prefill logits leave one SM to the data of the next batch.
    """
    fused = getattr(indexer, "use_dsa_indexer_fusion", False)
    if dense and indexer.alt_stream is not None and (not fused or indexer.dsa_enable_prefill_cp):
        yield indexer.half_device_sm_count
    if logits and getattr(indexer, "logits_with_pp_recv", False):
        yield indexer.sm_count - 1


def _dense_calls_deep_gemm() -> bool:
    """Whether linear layers call `deep_gemm`: by default they do; `--fp8-gemm-backend` may name another.

    "flashinfer_deepgemm" calls it from 32 rows on.
    """
    from sglang.srt.layers.quantization.fp8_utils import get_fp8_gemm_runner_backend

    backend = get_fp8_gemm_runner_backend()
    return bool(backend.is_auto() or backend.is_deep_gemm() or backend.is_flashinfer_deepgemm())


def _is_in_blocks(module: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether the layer has FP8 weights in 128 x 128 blocks."""
    if weight.dtype is not torch.float8_e4m3fn or weight.dim() != 2:
        return False
    n, k = weight.shape
    blocks = (-(-n // SCALE_BLOCK), k // SCALE_BLOCK)
    scales = (getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale"))
    return any(isinstance(scale, torch.Tensor) and tuple(scale.shape) == blocks for scale in scales)


def _most_chosen(model: torch.nn.Module) -> int:
    """The most experts that a router chooses. (Modules of experts of Llama 4, Hunyuan and OLMoE lack it.)"""
    routers = (getattr(module, "topk_config", None) for module in model.modules())
    return max((router.top_k for router in routers if router is not None), default=1)


def _experts_call_deep_gemm(module: torch.nn.Module) -> bool:
    """Whether the module has routed experts in FP8 whose products SGLang leaves to `deep_gemm`."""
    weight = getattr(module, "w13_weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is not torch.float8_e4m3fn:
        return False
    methods = (getattr(module, name, None) for name in ("quant_method", "scheme"))
    runners = (getattr(method, "runner", None) for method in methods)
    return any(runner is not None and runner.runner_backend.is_deep_gemm() for runner in runners)
