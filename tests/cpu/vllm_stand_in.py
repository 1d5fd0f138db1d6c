"""Stand-ins for the modules of vLLM that the plug-in touches, for its tests."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8 import jit
from moe_fp8.integrations import vllm as plug_in


def module(patch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    patch.setitem(sys.modules, name, made)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(patch, parent, __path__=[])
        patch.setattr(sys.modules[parent], last, made, raising=False)
    return made


class BlockScaledKernel:
    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None


class DeepGemmKernel(BlockScaledKernel):
    use_deep_gemm_e8m0 = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return compute_capability == 90, cls.__name__


class DeepGemmExperts:
    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_current_device() -> bool:
        return True


class BatchedDeepGemmExperts:
    @staticmethod
    def _supports_current_device() -> bool:
        return True


def _first_elements(workspace: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return workspace.flatten()[: math.prod(shape)].view(shape)


class Fake(SimpleNamespace):
    """vLLM's modules as far as the plug-in touches them."""

    envs: Any
    kernels: list[Any]
    named: dict[str, set[Any]]
    oracle: Any
    loader: Any
    own_loader: Any
    wrapper: Any
    platform: Any


def exchange(ranks: int = 1, sequence: int = 1, gathers: bool = True) -> SimpleNamespace:
    """How 2 groups of ranks share experts; all of them are gathered, or each of `ranks` sends its tokens."""
    parallel = SimpleNamespace(
        use_all2all_kernels=ranks > 1, use_ag_rs_all2all_kernels=ranks > 1 and gathers,
        ep_size=ranks, dp_size=2, pcp_size=1, sp_size=sequence,
    )  # fmt: skip
    return SimpleNamespace(moe_parallel_config=parallel)


def layer(weights: dict[str, tuple[int, ...]], **attributes: Any) -> torch.nn.Module:
    """A layer with FP8 weights of these shapes."""
    made = torch.nn.Module()
    for name, shape in weights.items():
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        made.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    made.__dict__.update(attributes)
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_device_capability=lambda capability: capability == 90,
        is_cpu=lambda: False, is_unspecified=lambda: False,
    )  # fmt: skip
    cuda = object()
    module(monkeypatch, "vllm.platforms", current_platform=platform, PlatformEnum=SimpleNamespace(CUDA=cuda))
    formats = SimpleNamespace(FLOAT32_CEIL_UE8M0=1, from_oracle=lambda: 1, _oracle_cache=3)
    wrapper = module(
        monkeypatch, "vllm.utils.deep_gemm", _fp8_gemm_nt_impl=print, DeepGemmQuantScaleFMT=formats,
        _paged_mqa_logits_schedule_slots=lambda num_sms, next_n: num_sms // 2,
    )  # fmt: skip
    module(monkeypatch, "vllm.utils.import_utils")
    envs = module(monkeypatch, "vllm.envs", VLLM_BATCH_INVARIANT=False, environment_variables={})
    kernels: list[Any] = [DeepGemmKernel]
    linear = "vllm.model_executor.kernels.linear"
    named: dict[str, set[Any]] = {"deep_gemm": {DeepGemmKernel}}
    module(
        monkeypatch, linear, _POSSIBLE_FP8_BLOCK_KERNELS={cuda: kernels},
        _LINEAR_BACKEND_KERNEL_MAP=named, __path__=[],
    )  # fmt: skip
    block = f"{linear}.scaled_mm.BlockScaledMMLinearKernel"
    module(monkeypatch, block, Fp8BlockScaledMMLinearKernel=BlockScaledKernel)
    module(monkeypatch, f"{linear}.scaled_mm.deep_gemm", DeepGemmFp8BlockScaledMMKernel=DeepGemmKernel)
    moe = "vllm.model_executor.layers.fused_moe"
    backends = SimpleNamespace(DEEPGEMM="deepgemm", TRITON="triton", MARLIN="marlin")
    oracle = module(
        monkeypatch, f"{moe}.oracle.fp8", Fp8MoeBackend=backends,
        backend_to_kernel_cls=lambda backend: [f"{backend} experts"],
    )  # fmt: skip
    module(monkeypatch, f"{moe}.activation", MoEActivation=SimpleNamespace(SILU="silu"))
    module(monkeypatch, f"{moe}.experts.deep_gemm_moe", DeepGemmExperts=DeepGemmExperts)
    batched = f"{moe}.experts.batched_deep_gemm_moe"
    module(monkeypatch, batched, BatchedDeepGemmExperts=BatchedDeepGemmExperts)
    module(monkeypatch, f"{moe}.utils", _resize_cache=_first_elements)
    quant = "vllm.model_executor.layers.quantization.utils.quant_utils"
    module(monkeypatch, quant, kFp8Dynamic128Sym=1, kFp8Static128BlockSym=2)

    class Loader:
        model = torch.nn.Linear(2, 2)

        def load_model(self, vllm_config: Any, model_config: Any) -> Any:
            return self.model

    class OwnLoader(Loader):
        def load_model(self, vllm_config: Any, model_config: Any) -> Any:
            return torch.nn.Linear(3, 3)

    module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=Loader)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "relax")
    monkeypatch.delenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", raising=False)
    yield Fake(
        envs=envs, kernels=kernels, named=named, oracle=oracle, loader=Loader, own_loader=OwnLoader,
        wrapper=wrapper, platform=platform,
    )  # fmt: skip
    plug_in.deactivate()
    jit.unfreeze()
    for name in ("linear", "experts"):
        sys.modules.pop(f"moe_fp8.integrations.vllm.{name}", None)
