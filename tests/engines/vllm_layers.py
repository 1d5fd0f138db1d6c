"""vLLM's experts and its sparse-attention indexer from their sources, with stand-ins for what is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engines import ops
from tests.engines.layers import EngineLayers
from tests.engines.sources import ENGINES
from tests.engines.step import Moe, Step

(RELEASE,) = (engine for engine in ENGINES if engine.name == "vllm-0.33.0")

_QUANT = "vllm.model_executor.layers.quantization.utils"
_MOE = "vllm.model_executor.layers.fused_moe"

EXPERTS = f"{_MOE}.experts.deep_gemm_moe"
BATCHED_EXPERTS = f"{_MOE}.experts.batched_deep_gemm_moe"
KERNEL = f"{_MOE}.modular_kernel"
CONFIG = f"{_MOE}.config"
ACTIVATION = f"{_MOE}.activation"
FP8 = f"{_QUANT}.fp8_utils"
WRAPPERS = "vllm.utils.deep_gemm"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
METADATA = "vllm.v1.attention.backends.mla.indexer"

REAL = (
    EXPERTS, BATCHED_EXPERTS, KERNEL, CONFIG, ACTIVATION, FP8, WRAPPERS, INDEXER, METADATA,
    f"{_MOE}.deep_gemm_utils", f"{_MOE}.utils", f"{_MOE}.topk_weight_and_reduce",
    f"{_QUANT}.quant_utils", "vllm.utils.math_utils", "vllm.scalar_type",
    "vllm.model_executor.layers.indexer_topk", "vllm.v1.attention.ops.common",
    "vllm.model_executor.warmup.jit_warmup", "vllm.model_executor.warmup.jit_warmup_triton_helper",
)  # fmt: skip

#: Compiled extensions and copies that are absent where only the sources are.
ABSENT = ("vllm._deepselect_C", "vllm.third_party.deep_gemm")


def nothing(*arguments: Any, **options: Any) -> None:
    pass


def hopper() -> SimpleNamespace:
    """What vLLM knows of a machine with a Hopper GPU."""
    return SimpleNamespace(
        device_type="cuda", dispatch_key="CUDA", simple_compile_backend="eager",
        is_cuda=lambda: True, is_cuda_alike=lambda: True, is_rocm=lambda: False, is_xpu=lambda: False,
        is_cpu=lambda: False, is_fp8_fnuz=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn,
        support_deep_gemm=lambda: True, is_arch_support_pdl=lambda: True,
        is_device_capability=lambda capability: capability in (90, (9, 0)),
        is_device_capability_family=lambda family: family == 90,
        has_device_capability=lambda capability: capability <= 90,
    )  # fmt: skip


def wrapper_stand_ins() -> dict[str, Any]:
    """What vLLM's module in front of `deep_gemm` needs."""
    logger = SimpleNamespace(
        **dict.fromkeys(("info", "debug", "warning", "info_once", "debug_once", "warning_once"), nothing)
    )
    return {
        "vllm.envs.VLLM_USE_DEEP_GEMM": True,
        "vllm.envs.VLLM_USE_DEEP_GEMM_E8M0": True,
        "vllm.logger.logger": logger,
        "vllm.platforms.current_platform": hopper(),
        "vllm.utils.import_utils.has_deep_gemm": lambda: True,
    }


class _Op(torch.nn.Module):
    """In the place of vLLM's registry of layers that have several implementations."""

    @staticmethod
    def register(name: str) -> Callable[[type], type]:
        return lambda cls: cls


class _Workspaces:
    """In the place of vLLM's buffers that all layers share."""

    device = "cpu"

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]


def stand_ins(context: SimpleNamespace, workspaces: _Workspaces) -> dict[str, Any]:
    """What the layers need. `context` is vLLM's forward context: tests put a step's metadata there."""
    import triton
    import triton.language

    made = wrapper_stand_ins()
    logger = made["vllm.logger.logger"]
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
        pcp_shard_decode_requests=False,
    )  # fmt: skip
    kernels = SimpleNamespace(sparse_indexer_topk_backend="auto", enable_jit_warmup=False)
    made |= {
        "vllm.logger.init_logger": lambda name: logger,
        "vllm.triton_utils.HAS_TRITON": True,
        "vllm.triton_utils.triton": triton,
        "vllm.triton_utils.tl": triton.language,
        "vllm.compilation.breakable_cudagraph.eager_break_during_capture": lambda function: function,
        "vllm.config.SchedulerConfig": SimpleNamespace(DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP=256),
        "vllm.config.get_current_vllm_config": lambda: SimpleNamespace(
            parallel_config=parallel, kernel_config=kernels
        ),
        "vllm.forward_context.get_forward_context": lambda: context,
        "vllm.forward_context.is_forward_context_available": lambda: True,
        "vllm.model_executor.custom_op.CustomOp": _Op,
        "vllm.utils.flashinfer.has_flashinfer": lambda: False,
        "vllm.utils.import_utils.get_triton_kernels_version": nothing,
        "vllm.utils.torch_utils._encode_layer_name": lambda name: name,
        "vllm.utils.torch_utils._resolve_layer_name": lambda name: name,
        "vllm.utils.torch_utils.direct_register_custom_op": functools.partial(_register, {}),
        "vllm.v1.worker.workspace.current_workspace_manager": lambda: workspaces,
        "vllm._aiter_ops.rocm_aiter_ops": SimpleNamespace(
            is_fused_moe_enabled=lambda: False, is_fusion_moe_shared_experts_enabled=lambda: False
        ),
        "vllm._custom_ops.cp_gather_indexer_k_quant_cache": ops.gather_cache,
        "vllm._custom_ops.top_k_per_row_prefill": ops.top_k_per_row_prefill,
    }
    return made


def _register(known: dict[str, Any], *, op_name: str, op_func: Any, **options: Any) -> None:
    known[op_name] = op_func


class VllmLayers(EngineLayers):
    """The layers of this release of vLLM, and the forward context that they see."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(dp_metadata=None, attn_metadata=None, cudagraph_runtime_mode=None)
        self.workspaces = _Workspaces()
        super().__init__(RELEASE, REAL, stand_ins(self.context, self.workspaces), absent=ABSENT)
        ops.register_vllms()


def experts_config(layers: VllmLayers, case: Moe, scales: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
    """vLLM's own configurations of a layer of experts with FP8 blocks of 128 x 128."""
    config = layers.module(CONFIG)
    ranks = case.ranks
    parallel = config.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=1, ep_size=ranks, sp_size=1,
        tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, use_ep=ranks > 1, all2all_backend="", enable_eplb=False,
    )  # fmt: skip
    moe = config.FusedMoEConfig(
        num_experts=case.experts * ranks, experts_per_token=case.topk, hidden_dim=case.hidden,
        intermediate_size=case.intermediate, num_local_experts=case.experts,
        num_logical_experts=case.experts * ranks, activation=layers.module(ACTIVATION).MoEActivation.SILU,
        device="cuda", routing_method=config.RoutingMethodType.Default, moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )  # fmt: skip
    quant = config.fp8_w8a8_moe_quant_config(*scales, block_shape=[128, 128])
    return moe, quant


class ExpertsStep(Step):
    """vLLM's quantization of bf16 tokens and `DeepGemmExperts.apply`, or `BatchedDeepGemmExperts.apply`."""

    def __init__(self, layers: VllmLayers, case: Moe, device: str, batched: bool) -> None:
        self.layers, self.case, self.batched, self.device = layers, case, batched, device
        self.silu = layers.module(ACTIVATION).MoEActivation.SILU
        self.w13, s13, self.w2, s2 = case.weights(device)
        configs = experts_config(layers, case, (s13, s2))
        # DeepGEMM stores whole tiles of rows, so an expert's buffer has whole tiles.
        self.rows = -(-case.tokens // 128) * 128
        if batched:
            made = layers.module(BATCHED_EXPERTS).BatchedDeepGemmExperts
            self.experts = made(*configs, max_num_tokens=self.rows, num_dispatchers=1)
            self.x = torch.empty(case.experts, self.rows, case.hidden, dtype=torch.bfloat16, device=device)
        else:
            self.experts = layers.module(EXPERTS).DeepGemmExperts(*configs)
            self.x = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.empty(case.tokens, case.topk, dtype=torch.int32, device=device)
        self.topk_weights = torch.empty(case.tokens, case.topk, device=device)
        self.counts = torch.empty(case.experts, dtype=torch.int32, device=device)
        self.expert_map = case.expert_map(device)
        shapes = self.experts.workspace_shapes(
            self.rows if batched else case.tokens, 2 * case.intermediate, case.hidden, case.topk,
            case.experts * case.ranks, case.experts, None, self.silu,
        )  # fmt: skip
        self.workspaces = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]

    def draw(self, seed: int) -> None:
        ids, weights = self.case.routing(seed, self.device)
        self.ids.copy_(ids)
        self.topk_weights.copy_(weights)
        tokens = self.case.tokens_drawn(seed, self.device)
        if not self.batched:
            self.x.copy_(tokens)
            return
        # A dispatcher puts each expert's tokens into the expert's buffer; the rest of it holds anything.
        self.x.fill_(float("nan"))
        for expert in range(self.case.experts):
            own = tokens[(ids == expert).any(1)]
            self.x[expert, : len(own)] = own
            self.counts[expert] = len(own)
        total = torch.tensor([self.case.tokens])
        self.layers.context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=total)

    def poison(self) -> None:
        for workspace in self.workspaces:
            workspace.fill_(float("nan"))

    def run(self) -> None:
        q, scale = self.layers.module(FP8).per_token_group_quant_fp8(self.x, 128)
        meta = None
        if self.batched:
            meta = self.layers.module(KERNEL).ExpertTokensMetadata(self.counts, None)
            scale = scale.transpose(1, 2).contiguous().transpose(1, 2)  # as DeepEP gives them
        workspace13, workspace2, output = self.workspaces
        self.experts.apply(
            output, q, self.w13, self.w2, self.topk_weights, self.ids, self.silu,
            self.case.experts * self.case.ranks, self.expert_map, scale, None, workspace13, workspace2, meta,
            False,
        )  # fmt: skip

    def results(self) -> dict[str, Tensor]:
        output = self.workspaces[2]
        if self.batched:
            output = output.masked_fill(~ops.below(self.counts, self.rows)[..., None], 0)
        return {"output": output}

    def expected(self) -> dict[str, Tensor]:
        if self.batched:
            return {"output": self._each_row()}
        ids = self.ids if self.expert_map is None else self.expert_map[self.ids.long()]
        return {"output": self.case.expected(self.x, ids, self.topk_weights)}

    def _each_row(self) -> Tensor:
        """What each expert makes of the rows of its buffer; zero for rows without a token."""
        rows = ops.below(self.counts, self.rows)
        expert, place = rows.nonzero(as_tuple=True)
        out = torch.zeros(self.x.shape, device=self.device)
        ones = torch.ones(len(expert), 1, device=self.device)
        out[expert, place] = self.case.expected(self.x[expert, place], expert[:, None], ones)
        return out
