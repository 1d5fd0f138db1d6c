"""Stand-ins for the modules of SGLang 0.5.23 that the plug-in touches, and for its `deep_gemm`.

The modules have the same names, and hold `deep_gemm` in the same ways: as a module, as a function, as a
function's kept result, and by an import inside a function. `tests/engines/test_sglang.py` compares the names
with SGLang's sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8 import set_num_sms
from moe_fp8 import settings as settings_module
from moe_fp8.integrations import sglang
from moe_fp8.integrations.sglang import model as described

FP8 = torch.float8_e4m3fn


class HookRegistry:
    """SGLang's registry as far as the plug-in uses it: hooks that run around a method."""

    hooks: dict[str, tuple[Callable[..., Any], str]]

    def __init__(self) -> None:
        self.hooks = {}
        self._patched: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        assert target not in self.hooks, "a hook is registered once"
        self.hooks[target] = hook, kind

    def apply_hooks(self) -> None:
        for target, (hook, kind) in self.hooks.items():
            if target in self._patched:
                continue
            assert kind == "around"
            self._patched.add(target)
            module, cls, method = target.rsplit(".", 2)
            owner = getattr(sys.modules[module], cls)
            setattr(owner, method, _around(getattr(owner, method), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return hook(original, *arguments, **options)

    return call


class KernelType(IntEnum):
    GROUPED_GEMM_NT_F8F8BF16_MASKED = 1
    GROUPED_GEMM_NT_F8F8BF16_CONTIG = 2
    GEMM_NT_F8F8BF16 = 5


class Backend:
    """An enum of SGLang's that says which kernels a layer calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_auto(self) -> bool:
        return self.name == "auto"

    def is_deep_gemm(self) -> bool:
        return self.name == "deep_gemm"

    def is_flashinfer_deepgemm(self) -> bool:
        return self.name == "flashinfer_deepgemm"


class ModelRunner:
    """Has loaded `model` when `load_model` returns."""

    loaded = False

    def __init__(self, model: torch.nn.Module, **text: int) -> None:
        self.model = model
        self.model_config = SimpleNamespace(context_len=4096, hf_text_config=SimpleNamespace(**text))

    def load_model(self) -> None:
        self.loaded = True


class StandIn:
    """The modules, put into `sys.modules`.

    `schedule`, `spec`, `parallel`, `prefill_graphs`, `overlap` and `deterministic` are SGLang's arguments.
    `longest_chunk` is what SGLang says of dynamic chunks. DeepEP takes 20 SMs.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, sm: int = 90, enabled: bool = True, cuda: bool = True
    ) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "deep_gemm")]:
            patch.delitem(sys.modules, name)
        self._patch = patch
        self.schedule = SimpleNamespace(
            chunked_prefill_size=512, max_prefill_tokens=256, max_running_requests=16
        )
        self.spec = SimpleNamespace(speculative_num_draft_tokens=None, speculative_eagle_topk=None)
        self.parallel = SimpleNamespace(attn_dp_size=1, attn_cp_size=1)
        self.prefill_graphs = SimpleNamespace(backend="breakable", bs=[64, 512])
        self.longest_chunk = 512
        self.overlap = SimpleNamespace(enable_two_batch_overlap=False)
        self.deterministic = SimpleNamespace(enable_deterministic_inference=False)
        self.backend = Backend("auto")
        self.hooks = HookRegistry()
        self._deep_gemm()
        self._sglang(sm, enabled, cuda)

    def _module(self, name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        self._patch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            if parent not in sys.modules:
                self._module(parent)
            setattr(sys.modules[parent], last, module)
        return module

    def _deep_gemm(self) -> None:
        names = ("fp8_gemm_nt", "fp8_mqa_logits", "bf16_gemm_nt", "get_num_sms")
        self.deep_gemm = self._module("deep_gemm", **{name: _function(name) for name in names})
        # The lookup of another part finds a module with a spec.
        self.deep_gemm.__file__ = "deep_gemm/__init__.py"
        for part in ("utils", "utils.math"):
            self._module(f"deep_gemm.{part}")
        self._module(
            "deep_gemm.utils.layout",
            get_mn_major_tma_aligned_tensor=_function("get_mn_major_tma_aligned_tensor"),
        )

    def _sglang(self, sm: int, enabled: bool, cuda: bool) -> None:
        self._module("sglang.srt.utils", is_cuda=lambda: cuda, get_device_sm=lambda: sm)
        self._module(
            "sglang.srt.plugins.hook_registry",
            HookRegistry=self.hooks,
            HookType=SimpleNamespace(AROUND="around"),
        )
        wrapper = "sglang.srt.layers.deep_gemm_wrapper"
        self._module(f"{wrapper}.configurer", ENABLE_JIT_DEEPGEMM=enabled)
        self.entrypoint = self._module(
            f"{wrapper}.entrypoint",
            deep_gemm=self.deep_gemm,
            _get_mn_major_tma_aligned_tensor=sys.modules[
                "deep_gemm.utils.layout"
            ].get_mn_major_tma_aligned_tensor,
        )
        self.compile_utils = self._module(
            f"{wrapper}.compile_utils",
            deep_gemm=self.deep_gemm,
            DeepGemmKernelType=KernelType,
            _INITIALIZATION_DICT={},
        )

        @lru_cache(maxsize=1)
        def resolve_fp8_mqa_logits_fn() -> Any:
            import deep_gemm

            return deep_gemm.fp8_mqa_logits

        self.resolve = resolve_fp8_mqa_logits_fn
        self._module("sglang.srt.layers.attention.dsa.utils", resolve_fp8_mqa_logits_fn=self.resolve)
        self.dsv4 = self._module(
            "sglang.kernels.ops.attention.dsv4",
            get_paged_mqa_logits_metadata=_function("get_paged_mqa_logits_metadata"),
        )
        self._module(
            "sglang.srt.runtime_context",
            get_schedule=lambda: self.schedule,
            get_spec=lambda: self.spec,
            get_parallel=lambda: self.parallel,
            get_exec=lambda: SimpleNamespace(
                overlap=self.overlap,
                deterministic=self.deterministic,
                graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=self.prefill_graphs)),
            ),
            max_prefill_buffer_tokens=lambda: self.longest_chunk,
        )
        self.deepep = self._module(
            "sglang.srt.layers.moe.token_dispatcher.deepep",
            use_deepep=True,
            DeepEPConfig=SimpleNamespace(get_instance=lambda: SimpleNamespace(num_sms=20)),
        )
        self._module(
            "sglang.srt.layers.quantization.fp8_utils", get_fp8_gemm_runner_backend=lambda: self.backend
        )
        # A class of its own, because a hook changes it.
        self.runner_class = type("ModelRunner", (ModelRunner,), {"load_model": ModelRunner.load_model})
        self._module("sglang.srt.model_executor.model_runner", ModelRunner=self.runner_class)
        self._module("sglang.srt.managers.scheduler")


def _function(name: str) -> Callable[..., str]:
    def call(*arguments: Any, **options: Any) -> str:
        return f"deep_gemm.{name}"

    call.__name__ = name
    return call


class Linear(torch.nn.Module):
    """A linear layer with FP8 weights in 128 x 128 blocks, or with one scale for all."""

    def __init__(self, n: int, k: int, blocks: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n, k).to(FP8), requires_grad=False)
        shape = (-(-n // 128), k // 128) if blocks else (1,)
        self.weight_scale_inv = torch.nn.Parameter(torch.ones(shape), requires_grad=False)


class Experts(torch.nn.Module):
    """Routed experts in FP8, whose products are computed by `backend`."""

    def __init__(self, backend: str, experts: int = 4, hidden: int = 256, width: int = 128) -> None:
        super().__init__()
        self.w13_weight = torch.zeros(experts, 2 * width, hidden).to(FP8)
        self.w2_weight = torch.zeros(experts, hidden, width).to(FP8)
        self.top_k: int | None = 2
        runner = SimpleNamespace(runner_backend=Backend(backend))
        self.quant_method = SimpleNamespace(runner=runner)


class TopK(torch.nn.Module):
    """Chooses each token's experts."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.topk_config = SimpleNamespace(top_k=top_k)


class Qwen3MoeDecoderLayer(torch.nn.Module):
    """A layer whose prefill SGLang may overlap with that of another batch."""


class Indexer(torch.nn.Module):
    """The indexer of DeepSeek's sparse attention on a GPU with 132 SMs; `given` are further attributes."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.sm_count = 132
        self.half_device_sm_count = 72
        self.alt_stream: Any = object()
        self.use_dsa_indexer_fusion = False
        self.dsa_enable_prefill_cp = False
        self.logits_with_pp_recv = False
        vars(self).update(given)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(sglang._Process, "hooked", False)
    monkeypatch.setattr(sglang._Process, "told", False)
    monkeypatch.setattr(described, "get_num_sms", lambda: 132)
    yield StandIn(monkeypatch)
    sglang.deactivate()
    set_num_sms(None)


def set_variables(monkeypatch: pytest.MonkeyPatch, *kinds: str, **variables: str) -> None:
    """The settings of a process with MOE_FP8_ENGINE (unless there are no kinds) and other variables."""
    chosen = {"MOE_FP8_ENGINE": ",".join(kinds)} if kinds else {}
    given = settings_module.parse_settings({**chosen, **variables})
    monkeypatch.setattr(sglang, "settings", lambda: given)
    monkeypatch.setattr(sglang, "engine_asked", lambda: bool(kinds))
