"""The plug-in for SGLang 0.5.23: the entry point `sglang.srt.plugins` calls `register` in each process.

docs/sglang.md says what it replaces.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from moe_fp8.errors import SettingError, UnsupportedError
from moe_fp8.integrations import alias
from moe_fp8.integrations.kinds import KINDS, checked
from moe_fp8.settings import engine_asked, settings

_logger = logging.getLogger("sglang.moe_fp8")

#: A process that runs a model has this module. Few other processes have it; that of an offline `Engine` does.
_SCHEDULER = "sglang.srt.managers.scheduler"

_LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"

#: How to undo each change, in order.
_undo: list[Callable[[], None]] = []


class _Process:
    """What has been done once in this process: the hook is registered; the log line is written."""

    hooked: bool = False
    told: bool = False


def register() -> None:
    """What SGLang calls at the start of each process: `activate` with the kinds of MOE_FP8_ENGINE, if any.

    It does nothing in most processes that run no model. SGLang writes an error of a plug-in to its log and
    goes on without the plug-in.
    """
    if engine_asked() and not _undo and _SCHEDULER in sys.modules:
        # SGLang applies the hook after all plug-ins have been called.
        _start(settings().engine)


def activate(kinds: Iterable[str]) -> None:
    """Serve `kinds` of this process's SGLang from now on; for a script that builds a `ModelRunner` itself.

    Modules of SGLang may have been imported before; models that are loaded already are served too, but their
    kernels are not planned. A second call replaces the kinds of the first call. Raises ConfigError for an
    unknown kind; nothing is changed then. Raises UnsupportedError if the GPU is no Hopper, or if SGLang does
    not use DeepGEMM at all; then nothing is active.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    kinds = checked(kinds)
    deactivate()
    _start(kinds)
    HookRegistry.apply_hooks()


def deactivate() -> None:
    """Undo `activate`; SGLang calls its own `deep_gemm` again, if that can be imported."""
    for undo in reversed(_undo):
        undo()
    _undo.clear()
    _Process.told = False


def active() -> bool:
    """Whether `activate` is in force in this process."""
    return bool(_undo)


def _start(kinds: tuple[str, ...]) -> None:
    from sglang.srt.utils import get_device_sm, is_cuda

    from moe_fp8.integrations.sglang.names import Names
    from moe_fp8.integrations.sglang.schedule import replace_schedule

    if not is_cuda() or get_device_sm() != 90:
        raise UnsupportedError("MOE_FP8_ENGINE: the kernels need a Hopper GPU; unset it on other GPUs")
    _demand_deep_gemm()
    names = Names()
    alias.install(kinds)
    _undo.append(names.restore)
    _undo.append(alias.uninstall)
    try:
        if "indexer" in kinds:
            replace_schedule(_undo)  # before SGLang's functions forget the names that they keep
        names.replace()
        if not _Process.hooked:
            _hook_loading()
    except BaseException:
        deactivate()
        raise


def _demand_deep_gemm() -> None:
    """Raise UnsupportedError unless SGLang calls `deep_gemm`: it decides so when it imports its wrapper.

    This import must find SGLang's own `deep_gemm`. With our module in its place, SGLang would decide for
    calls of DeepGEMM that nobody serves if its own is missing.
    """
    from sglang.srt.layers.deep_gemm_wrapper import configurer

    if not configurer.ENABLE_JIT_DEEPGEMM:
        raise UnsupportedError(
            "MOE_FP8_ENGINE: SGLang has turned its use of DeepGEMM off, and our kernels have the place of "
            "DeepGEMM; unset SGLANG_ENABLE_JIT_DEEPGEMM, and install sgl-deep-gemm, which SGLang requires"
        )


def _hook_loading() -> None:
    """Have `_around_loading` called for every model that SGLang loads. SGLang has no call to undo a hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LOAD_MODEL, _around_loading, HookType.AROUND)
    _Process.hooked = True


def _around_loading(load_model: Callable[..., Any], model_runner: Any, *rest: Any, **options: Any) -> Any:
    """Load the model, and plan its kernels. If the plug-in may not serve it, no weights are loaded."""
    if not _undo:
        return load_model(model_runner, *rest, **options)
    _demand_batch_invariance()
    result = load_model(model_runner, *rest, **options)
    _after_loading(model_runner)
    return result


def _demand_batch_invariance() -> None:
    """Raise SettingError if SGLang's results must not depend on the batch and ours may.

    The error stops the server: to go on would lose, in silence, what the user asked for. `register` cannot
    raise it, because SGLang publishes its arguments later, and survives errors of `register`.
    """
    from sglang.srt.runtime_context import get_exec

    asked = get_exec().deterministic.enable_deterministic_inference
    if asked and not settings().batch_invariant:
        raise SettingError(
            "MOE_FP8_BATCH_INVARIANT", "1, as --enable-deterministic-inference is on", 0, "set it to 1"
        )


def _after_loading(model_runner: Any) -> None:
    """Plan and load the kernels of the model that `model_runner` has loaded, and tell what is replaced."""
    from moe_fp8.integrations.planning import warm
    from moe_fp8.integrations.sglang.model import describe_loaded
    from moe_fp8.integrations.sglang.warmup import skip_warmup

    loaded = describe_loaded(model_runner)
    # SGLang sets its log up after it has called the plug-ins, so a line in `register` would not be seen.
    if not _Process.told:
        _Process.told = True
        kinds = alias.installed()
        others = [kind for kind in KINDS if kind not in kinds]
        if "experts" in kinds and not loaded.experts:
            others.append("the experts of this model, which do not call deep_gemm")
        _logger.info(
            "moe_fp8 serves %s in the place of deep_gemm; SGLang's own kernels serve %s",
            ", ".join(kinds),
            ", ".join([*others, "everything else"]),
        )
    warm(loaded, _undo)
    _undo.append(skip_warmup(loaded))
