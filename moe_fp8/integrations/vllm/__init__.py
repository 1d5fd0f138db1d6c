"""The plug-in for vLLM 0.24 and 0.33: the entry point `vllm.general_plugins` calls `register` per process.

docs/vllm.md says what it replaces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moe_fp8 import __version__
from moe_fp8.errors import SettingError, UnsupportedError
from moe_fp8.integrations import alias, vendored
from moe_fp8.integrations.kinds import KINDS, checked
from moe_fp8.settings import engine_asked, settings

_logger = logging.getLogger("vllm.moe_fp8")

#: vLLM's own warmup of DeepGEMM kernels, which takes thousands of launches.
_WARMUP = "VLLM_DEEP_GEMM_WARMUP"

#: vLLM copies variables whose names begin with these prefixes to its Ray workers.
_COPIED_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_PREFIX = "MOE_FP8_"

#: How to undo each change, in order.
_undo: list[Callable[[], None]] = []


def register() -> None:
    """What vLLM calls at the start of each process: `activate` with the kinds of MOE_FP8_ENGINE, if any.

    It does nothing where there is no GPU: such a process serves no model on one. vLLM also calls plug-ins for
    `vllm bench serve`, `vllm launch render` and its other commands, which need no GPU.
    """
    if not engine_asked() or _undo:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or current_platform.is_unspecified():
        _logger.warning("MOE_FP8_ENGINE has no effect: vLLM finds no GPU here")
        return
    activate(settings().engine)


def activate(kinds: Iterable[str]) -> None:
    """Serve `kinds` of this process's vLLM from now on; models that are loaded already keep their layers.

    A second call replaces the kinds of the first call. Raises UnsupportedError if the GPU is no Hopper,
    ConfigError for an unknown kind, and SettingError if vLLM's results must not depend on the batch and ours
    may; nothing is changed then.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or not current_platform.is_device_capability(90):
        raise UnsupportedError("MOE_FP8_ENGINE: the kernels need a Hopper GPU; unset it on other GPUs")
    kinds = checked(kinds)
    if envs.VLLM_BATCH_INVARIANT and not settings().batch_invariant:
        raise SettingError("MOE_FP8_BATCH_INVARIANT", "1, as VLLM_BATCH_INVARIANT is on", 0, "set it to 1")
    deactivate()
    try:
        _change(kinds)
    except BaseException:
        deactivate()  # half of the changes would be worse than none
        raise
    others = [kind for kind in KINDS if kind not in kinds]
    _logger.info(
        "moe_fp8 serves %s in the place of deep_gemm; vLLM's own kernels serve %s",
        ", ".join(kinds),
        ", ".join([*others, "experts of other backends", "everything else"]),
    )


def _change(kinds: tuple[str, ...]) -> None:
    alias.install(kinds)
    _undo.append(alias.uninstall)
    _forget_symbols()
    _undo.append(_forget_symbols)
    _separate_compiled_models(kinds)
    _share_settings()
    if "dense" in kinds:
        _register_linear_kernel()
    else:
        _refuse_linear_kernel_without_copy()
    if "experts" in kinds:
        _register_experts()
    else:
        _refuse_experts_without_copy()
    if "indexer" in kinds:
        _schedule_for_all_sms()
    if set(kinds) >= {"dense", "experts"}:
        _set_environment(_WARMUP, "skip")
    _plan_after_loading()


def deactivate() -> None:
    """Undo `activate`; models that are loaded already keep their layers."""
    for undo in reversed(_undo):
        undo()
    _undo.clear()


def _forget_symbols() -> None:
    """Make vLLM look the functions of `deep_gemm` up again."""
    import vllm.utils.deep_gemm as wrapper
    import vllm.utils.import_utils as imports

    for module in (wrapper, imports):
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "cache_clear"):
                value.cache_clear()
    for name in [name for name in vars(wrapper) if name.startswith("_") and name.endswith("_impl")]:
        setattr(wrapper, name, None)
    if hasattr(wrapper.DeepGemmQuantScaleFMT, "_oracle_cache"):
        wrapper.DeepGemmQuantScaleFMT._oracle_cache = None


def _separate_compiled_models(kinds: tuple[str, ...]) -> None:
    """Keep vLLM from loading a model that it compiled with other kinds, or with another version of ours.

    The plug-in changes which ops torch.compile sees. vLLM names a compiled model by the values of its
    variables, among other things, and this table has a function for each value.
    """
    from vllm import envs

    table, name = envs.environment_variables, "MOE_FP8_ENGINE"
    table[name] = lambda: f"{','.join(kinds)} {__version__}"
    _undo.append(lambda: table.pop(name))


def _share_settings() -> None:
    """Make vLLM copy all our variables to its Ray workers.

    vLLM also copies the variables of the table above, but their values are a part of a compiled model's name.
    """
    prefixes = [text.strip() for text in os.environ.get(_COPIED_PREFIXES, "").split(",") if text.strip()]
    # A worker gets these prefixes, too. They are a part of that name, so they must stay the same there.
    if _PREFIX not in prefixes:
        _set_environment(_COPIED_PREFIXES, ",".join([*prefixes, _PREFIX]))


def _register_linear_kernel() -> None:
    """Put our kernel in front of vLLM's list of kernels for block-scaled FP8 layers.

    vLLM's `register_linear_kernel` appends to the list, and the first kernel that can serve a layer wins.
    `--linear-backend deep_gemm` chooses among kernels of that name, and ours becomes one of them.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from moe_fp8.integrations.vllm.linear import MoeFp8LinearKernel

    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    kernels.insert(0, MoeFp8LinearKernel)
    _undo.append(lambda: kernels.remove(MoeFp8LinearKernel))
    named = linear._LINEAR_BACKEND_KERNEL_MAP["deep_gemm"]
    named.add(MoeFp8LinearKernel)
    _undo.append(lambda: named.discard(MoeFp8LinearKernel))


def _register_experts() -> None:
    """Offer our experts before vLLM's where vLLM would call DeepGEMM or Triton for them."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle

    from moe_fp8.integrations.vllm.experts import MoeFp8Experts

    original = oracle.backend_to_kernel_cls
    replaced = (oracle.Fp8MoeBackend.DEEPGEMM, oracle.Fp8MoeBackend.TRITON)

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        classes: list[type] = original(backend)
        return [MoeFp8Experts, *classes] if backend in replaced else classes

    _replace(oracle, "backend_to_kernel_cls", backend_to_kernel_cls)


def _refuse_linear_kernel_without_copy() -> None:
    """Keep vLLM from its own dense layers of `deep_gemm` if its copy is missing or cannot be imported.

    vLLM believes that it has `deep_gemm`, since our module has this name. But we serve no dense layers now,
    and without a copy nobody does. (The import of the copy fails without a CUDA toolkit.)
    """
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel

    supported = vars(DeepGemmFp8BlockScaledMMKernel)["is_supported"]

    def is_supported(cls: Any, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if vendored.find() is None:
            return False, "needs deep_gemm, which cannot be imported"
        answer: tuple[bool, str | None] = supported.__get__(None, cls)(compute_capability)
        return answer

    _replace(DeepGemmFp8BlockScaledMMKernel, "is_supported", classmethod(is_supported))


def _refuse_experts_without_copy() -> None:
    """The same for vLLM's own experts of `deep_gemm`."""
    from vllm.model_executor.layers.fused_moe.experts import batched_deep_gemm_moe, deep_gemm_moe

    for experts in (deep_gemm_moe.DeepGemmExperts, batched_deep_gemm_moe.BatchedDeepGemmExperts):
        _refuse_without_copy(experts)


def _refuse_without_copy(experts: Any) -> None:
    supports = experts._supports_current_device

    def supports_current_device() -> bool:
        return vendored.find() is not None and bool(supports())

    _replace(experts, "_supports_current_device", staticmethod(supports_current_device))


def _schedule_for_all_sms() -> None:
    """Make vLLM 0.33 ask for schedules with a task for each SM.

    With four tokens for each request it asks for half as many, because DeepGEMM's kernel uses two SMs for
    each task. Ours uses one SM for each task.
    """
    import vllm.utils.deep_gemm as wrapper

    name = "_paged_mqa_logits_schedule_slots"
    if hasattr(wrapper, name):
        _replace(wrapper, name, lambda num_sms, next_n: num_sms)


def _replace(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def _set_environment(name: str, value: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = value

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    _undo.append(restore)


def _plan_after_loading() -> None:
    """Plan and load the kernels of each model as soon as vLLM has loaded it."""
    import vllm.model_executor.model_loader  # noqa: F401 - has all loaders
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    for loader in _with_subclasses(BaseModelLoader):
        if "load_model" in vars(loader):
            _plan_after(loader)


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _plan_after(loader: Any) -> None:
    from moe_fp8.integrations.planning import warm
    from moe_fp8.integrations.vllm.model import describe_loaded

    original = loader.load_model

    def load_model(self: Any, vllm_config: Any, model_config: Any, *arguments: Any, **options: Any) -> Any:
        model = original(self, vllm_config, model_config, *arguments, **options)
        # (If a loader leaves its work to another loader, all kernels are there the second time.)
        warm(describe_loaded(model, vllm_config, model_config), _undo)
        return model

    _replace(loader, "load_model", load_model)


def active() -> bool:
    """Whether `activate` is in force in this process."""
    return bool(_undo)
