"""MN-major activation scales: the layout that TMA reads, and the conversion to this layout."""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_implicit = 0


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
        # The usual case comes first, because every new GEMM call runs this check.
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
    """Convert activation scales to the layout that the GEMMs read without conversion.

    scale: fp32 `[M, G]` or `[E, M, G]` of any strides (G = K/128). Returns the same values with
    stride `(1, align(M,4))`, or `(align(M,4)*G, 1, align(M,4))` for three dimensions. Returns `scale`
    itself if it already has this layout. Units do not change. Launches at most one copy kernel; safe to
    capture.
    """
    if is_mn_major(scale):
        return scale
    stride = _mn_major_stride(scale.shape)
    return torch.empty_strided(scale.shape, stride, dtype=scale.dtype, device=scale.device).copy_(scale)


def converted(op: str, scale: Tensor) -> Tensor:
    """Convert `scale`, which `op` got in another layout, by `to_mn_major`; count and log the conversion."""
    global _implicit
    with _lock:
        _implicit += 1
    _log.debug(
        "%s: a_scale %s with stride %s converted to MN-major; quantize_fp8 writes that layout itself",
        op,
        tuple(scale.shape),
        scale.stride(),
    )
    return to_mn_major(scale)


def implicit_scale_conversions() -> int:
    """The number of times that an op of this process had to convert `a_scale` to MN-major first."""
    return _implicit
