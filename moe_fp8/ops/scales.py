"""MN-major activation scales: the layout that TMA reads, and conversion into it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def empty_mn_major(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised fp32 scales [M,G] or [E,M,G], MN-major (`is_mn_major`), on `like`'s device."""
    return torch.empty_strided(shape, _mn_major_stride(shape), dtype=torch.float32, device=like.device)


def _mn_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    m, groups = shape[-2:]
    pitch = (m + 3) & -4
    return (1, pitch) if len(shape) == 2 else (pitch * groups, 1, pitch)


def is_mn_major(scale: Tensor) -> bool:
    """Whether [M,G] has stride (1, align(M,4)) or [E,M,G] stride (align(M,4)*G, 1, align(M,4)).

    The stride of a dimension of size 1 does not matter. The address must be 16-byte aligned.
    """
    stride = scale.stride()
    if len(stride) == 2:
        m, groups = scale.shape
        pitch = (m + 3) & -4
        # The usual case first: this is on every GEMM call's path.
        if stride != (1, pitch) and m > 0:
            fits = (stride[0] == 1 or m == 1) and (stride[1] == pitch or groups == 1)
            return fits and not scale.data_ptr() & 15
        return not scale.data_ptr() & 15
    num_experts, m, groups = scale.shape
    pitch = (m + 3) & -4
    fits = (
        (stride[0] == pitch * groups or num_experts <= 1)
        and (stride[1] == 1 or m == 1)
        and (stride[2] == pitch or groups == 1)
    )
    return (fits or m == 0) and not scale.data_ptr() & 15


def to_mn_major(scale: Tensor) -> Tensor:
    """Activation scales in the layout that the GEMMs read without conversion.

    scale: fp32 `[M, G]` or `[E, M, G]` of any strides (G = K/128). Returns the same values with
    stride `(1, align(M,4))`, or `(align(M,4)*G, 1, align(M,4))` for three dimensions; `scale` itself
    where it already is so. One copy kernel at most; safe to capture. Units are unchanged.
    """
    if is_mn_major(scale):
        return scale
    stride = _mn_major_stride(scale.shape)
    return torch.empty_strided(scale.shape, stride, dtype=scale.dtype, device=scale.device).copy_(scale)


@cache
def _count_conversion() -> Callable[[str], None]:
    """`count_scale_conversion` of `moe_fp8.jit.runtime`, which the import of the ops alone does not load."""
    count: Callable[[str], None] = importlib.import_module("moe_fp8.jit.runtime").count_scale_conversion
    return count


def converted(op: str, scale: Tensor) -> Tensor:
    """`to_mn_major` on behalf of `op`, which was given another layout: counted and logged."""
    _count_conversion()("gemm_fp8")  # the kernel of all GEMMs
    _log.debug(
        "%s: a_scale %s with stride %s converted to MN-major; quantize_fp8 writes that layout itself",
        op,
        tuple(scale.shape),
        scale.stride(),
    )
    return to_mn_major(scale)
