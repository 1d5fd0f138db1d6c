"""SGLang's DeepGEMM runner of experts from its sources, with stand-ins for what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.engines import ops
from tests.engines.layers import EngineLayers
from tests.engines.sources import ENGINES
from tests.engines.step import Moe, Step

(RELEASE,) = (engine for engine in ENGINES if engine.name == "sglang-0.5.23")

_RUNNERS = "sglang.srt.layers.moe.moe_runner"
_WRAPPER = "sglang.srt.layers.deep_gemm_wrapper"

RUNNER = f"{_RUNNERS}.deep_gemm"
BASE = f"{_RUNNERS}.base"
ENTRYPOINT = f"{_WRAPPER}.entrypoint"
KERNELS = "sglang.kernels.ops.moe.ep_moe_kernels"

#: The modules in front of `deep_gemm`.
WRAPPERS = (_WRAPPER, ENTRYPOINT, f"{_WRAPPER}.configurer")
REAL = (
    RUNNER, BASE, f"{_RUNNERS}.deep_gemm_sm120", "sglang.srt.layers.moe.utils", KERNELS,
    "sglang.kernels.ops.moe.triton_pad_expert_counts", "sglang.kernels.ops.quantization.fp8_kernel",
    "sglang.kernels.ops.quantization.fp8_utils", *WRAPPERS,
)  # fmt: skip


class KernelType(Enum):
    """SGLang's names of the calls that it compiles ahead."""

    GEMM_NT_F8F8BF16 = 0
    GEMM_NT_F8F8BF16_BLOCK32 = 1
    GROUPED_GEMM_NT_F8F8BF16_CONTIG = 2
    GROUPED_GEMM_NT_F8F8BF16_MASKED = 3


class Dispatched(NamedTuple):
    """SGLang's input of a runner without communication."""

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: tuple[Tensor, Tensor, None]


class Combined(NamedTuple):
    """SGLang's output of a runner without communication."""

    hidden_states: Tensor


def _setting(value: Any) -> SimpleNamespace:
    return SimpleNamespace(get=lambda: value)


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def wrapper_stand_ins() -> dict[str, Any]:
    """What SGLang's modules in front of `deep_gemm` need on Hopper."""
    settings = {
        "SGLANG_ENABLE_JIT_DEEPGEMM": True,
        "SGLANG_DEEPGEMM_SANITY_CHECK": False,
        "SGLANG_DEEPGEMM_PDL": True,
    }
    return {
        "sglang.srt.environ.envs": SimpleNamespace(**{name: _setting(on) for name, on in settings.items()}),
        "sglang.srt.runtime_context.get_platform": lambda: SimpleNamespace(is_sm100=False),
        "sglang.srt.utils.get_device_sm": lambda: 90,
        "sglang.srt.utils.is_cuda": _yes,
        "sglang.srt.utils.is_musa": _no,
        f"{_WRAPPER}.compile_utils.DeepGemmKernelType": KernelType,
        f"{_WRAPPER}.compile_utils.deep_gemm_execution_hook": lambda *arguments: nullcontext(),
    }


def dispose_tensor(x: Tensor) -> None:
    """Free the memory of `x` at once, except in a graph: what SGLang does with a tensor that it has used."""
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        x.set_(torch.empty(0, dtype=x.dtype, device=x.device))


def stand_ins() -> dict[str, Any]:
    """What the runner needs."""
    made = wrapper_stand_ins()
    settings = vars(made["sglang.srt.environ.envs"])
    for name in (
        "SGLANG_USE_AITER", "SGLANG_DEEPEP_V2_TRACE_CONTIG", "SGLANG_DEEPEP_V2_TRACE_MASKED",
        "SGLANG_OPT_DG_COMPACT_EAGER", "SGLANG_OPT_DG_MASKED_M_CAP",
    ):  # fmt: skip
        settings[name] = _setting(False)
    settings["SGLANG_DEEPGEMM_STANDARD_LAYOUT"] = _setting("auto")
    flags = SimpleNamespace(
        moe=SimpleNamespace(a2a_backend=None), capture=SimpleNamespace(disable_dispose_tensor=False)
    )
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    return made | {
        **{f"sglang.srt.utils.{name}": _no for name in ("is_hip", "is_npu", "is_xpu", "is_sm120_supported")},
        "sglang.srt.utils.get_bool_env_var": lambda name: False,
        "sglang.srt.utils.ceil_div": lambda x, y: -(-x // y),
        "sglang.srt.utils.ceil_align": lambda x, y: -(-x // y) * y,
        "sglang.srt.utils.dispose_tensor": dispose_tensor,
        "sglang.srt.runtime_context.get_flags": lambda: flags,
        "sglang.srt.runtime_context.get_exec": lambda: SimpleNamespace(deterministic=deterministic),
        "sglang.srt.runtime_context.get_parallel": lambda: SimpleNamespace(tp_group=None),
        "sglang.srt.layers.dp_attention.is_allocation_symmetric": _no,
        "sglang.srt.layers.moe.token_dispatcher.standard.StandardCombineInput": Combined,
        "sglang.srt.distributed.device_communicators.pynccl_allocator.use_symmetric_memory": (
            lambda group, disabled: nullcontext()
        ),
        "sglang.kernels.jit.utils.is_hip_runtime": _no,
        "sglang.kernels.jit.utils.is_musa_runtime": _no,
        "sglang.kernels.ops.activation.activation.silu_and_mul": _silu_and_mul,
        "sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant": _Quantizer(),
    }


def _silu_and_mul(x: Tensor, out: Tensor) -> None:
    out.copy_(ops.silu_mul(x))


class _Quantizer:
    """SGLang's kernel that quantizes, after SiLU if the caller says so, into the caller's or new outputs."""

    #: SGLang's own function that allocates the scales.
    new_scale: Callable[..., Tensor]

    def __call__(
        self, x: Tensor, q: Tensor | None = None, scale: Tensor | None = None, group_size: int = 128, *,
        scale_ue8m0: bool = False, fuse_silu_and_mul: bool = False, masked_m: Tensor | None = None,
        expected_m: int | None = None, column_major_scales: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        values = ops.silu_mul(x) if fuse_silu_and_mul else x
        assert group_size == 128 and not scale_ue8m0
        if q is None or scale is None:
            q = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=x.device)
            scale = self.new_scale(
                x_shape=values.shape, device=x.device, group_size=128, scale_ue8m0=False,
                column_major_scales=column_major_scales, scale_tma_aligned=column_major_scales,
            )  # fmt: skip
        live = None if masked_m is None else ops.below(masked_m, x.shape[1])
        ops.quantize(values, q, scale, False, live)
        return q, scale


class SglangLayers(EngineLayers):
    """The layers of this release of SGLang; `layout` is "compact", "masked" or "auto"."""

    def __init__(self) -> None:
        super().__init__(RELEASE, REAL, stand_ins())
        self.layout = "auto"
        settings = self.provided["sglang.srt.environ.envs"]
        settings.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get = lambda: self.layout
        quantize = self.provided[
            "sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant"
        ]
        fp8 = "sglang.kernels.ops.quantization.fp8_kernel"
        quantize.new_scale = lambda **options: self.module(fp8).create_per_token_group_quant_fp8_output_scale(
            **options
        )


class RunnerStep(Step):
    """SGLang's permutation, `DeepGemmRunnerCore.run` and the permutation back, for tokens of all ranks."""

    def __init__(self, layers: SglangLayers, case: Moe, device: str, layout: str) -> None:
        self.layers, self.case, self.device, self.layout = layers, case, device, layout
        runner = layers.module(RUNNER)
        self.config = layers.module(BASE).MoeRunnerConfig(
            num_experts=case.experts * case.ranks, num_local_experts=case.experts, hidden_size=case.hidden,
            intermediate_size_per_partition=case.intermediate, top_k=case.topk, inplace=False,
        )  # fmt: skip
        w13, s13, w2, s2 = case.weights(device)
        self.weights = runner.DeepGemmMoeQuantInfo(
            w13_weight=w13, w2_weight=w2, use_fp8=True, w13_scale=s13, w2_scale=s2, block_shape=[128, 128]
        )
        self.core = runner.DeepGemmRunnerCore(self.config)
        self.x = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.empty(case.tokens, case.topk, dtype=torch.int32, device=device)
        self.topk_weights = torch.empty(case.tokens, case.topk, device=device)
        self.output = torch.empty_like(self.x)

    def draw(self, seed: int) -> None:
        ids, weights = self.case.routing(seed, self.device)
        numbers = self.case.expert_map(self.device)
        # SGLang's dispatcher gives the runner numbers of this rank's experts, or -1.
        self.ids.copy_(ids if numbers is None else numbers[ids.long()])
        self.topk_weights.copy_(weights)
        self.x.copy_(self.case.tokens_drawn(seed, self.device))

    def poison(self) -> None:
        self.output.fill_(float("nan"))

    def run(self) -> None:
        self.layers.layout = self.layout
        runner = self.layers.module(RUNNER)
        state: dict[str, Any] = {}
        given = Dispatched(self.x, None, (self.topk_weights, self.ids, None))
        packed = runner.pre_permute_standard_to_deep_gemm(given, self.weights, self.config, state)
        assert packed.use_masked_gemm == (self.layout == "masked")
        done = self.core.run(packed, self.weights, state)
        combined = runner.post_permute_deep_gemm_to_standard(done, self.weights, self.config, state)
        self.output.copy_(combined.hidden_states)

    def results(self) -> dict[str, Tensor]:
        return {"output": self.output}

    def expected(self) -> dict[str, Tensor]:
        return {"output": self.case.expected(self.x, self.ids, self.topk_weights)}
