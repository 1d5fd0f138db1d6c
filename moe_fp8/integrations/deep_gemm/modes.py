"""The modes of DeepGEMM's module: SMs, dependent launches, and compilation without a launch."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_fp8 import ops
from moe_fp8.integrations import vendored
from moe_fp8.ops import compile_only, get_num_sms

__all__ = [
    "get_compile_mode",
    "get_num_sms",
    "get_pdl",
    "set_compile_mode",
    "set_num_sms",
    "set_pdl",
]


class _Modes:
    early_weights: bool = False
    compiling: ExitStack | None = None
    limits_sms: bool = False


def set_num_sms(num_sms: int) -> None:
    """Use at most `num_sms` SMs from now on, in all threads; see `moe_fp8.set_num_sms`."""
    everything = (
        torch.cuda.is_available() and num_sms >= torch.cuda.get_device_properties().multi_processor_count
    )
    ops.set_num_sms(None if everything else num_sms)
    _Modes.limits_sms = not everything
    vendored.set_too("set_num_sms", num_sms)


def set_pdl(enable: bool) -> None:
    """With True, a dense GEMM reads a model's weights while the kernel before it still runs.

    The kernel before must not write weights, so `b` counts as weights only if it and its scales are a
    `torch.nn.Parameter`, and the scales are of 128 x 128. Otherwise, and with False, only the launch itself
    overlaps (`constant_weights` of `moe_fp8.gemm_fp8`).
    """
    _Modes.early_weights = bool(enable)
    vendored.set_too("set_pdl", bool(enable))


def get_pdl() -> bool:
    """What `set_pdl` set; False at first."""
    return _Modes.early_weights


def early_weights(values: Tensor, scale: Tensor) -> bool:
    """Whether a dense GEMM may read this operand early."""
    # isinstance would ask Parameter's metaclass, which takes five times as long.
    return _Modes.early_weights and Parameter in type(values).__mro__ and Parameter in type(scale).__mro__


def set_compile_mode(mode: int) -> None:
    """1: calls on a GPU load their kernels, compile them if need be, and launch nothing; 0: they launch."""
    if mode and _Modes.compiling is None:
        _Modes.compiling = ExitStack()
        _Modes.compiling.enter_context(compile_only())
    elif not mode:
        _launch_again()
    vendored.set_too("set_compile_mode", mode)


def _launch_again() -> None:
    if _Modes.compiling is not None:
        _Modes.compiling.close()
        _Modes.compiling = None


def reset() -> None:
    """Make our modes what they are at first, without a word to the engine's own copy."""
    _launch_again()
    _Modes.early_weights = False
    if _Modes.limits_sms:
        ops.set_num_sms(None)
        _Modes.limits_sms = False


def get_compile_mode() -> int:
    """What `set_compile_mode` set; 0 at first."""
    return int(_Modes.compiling is not None)
