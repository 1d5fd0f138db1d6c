"""MN-major activation scales: the layout that TMA reads, and the conversion to this layout."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import demand_tensors, no_overlap

_log = logging.getLogger(__name__)


def empty_mn_major(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialized fp32 scales [M,G] or [E,M,G], MN-major (`is_mn_major`), on `like`'s device."""
    return torch.empty_strided(shape, mn_major_stride(shape), dtype=torch.float32, device=like.device)


def mn_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    m, groups = shape[-2:]
    pitch = (m + 3) // 4 * 4  # an exporter cannot reason about `&`
    return (1, pitch) if len(shape) == 2 else (pitch * groups, 1, pitch)


def pitch(scale: Tensor) -> int:
    """Elements between the groups of MN-major scales; 0 if `scale` is not MN-major.

    MN-major scales [M,G] have stride (1, P), and [E,M,G] have stride (P*G, 1, P). P is a multiple of 4, at
    least M. The address is a multiple of 16 bytes. The stride of a dimension of size 1 does not matter.
    """
    *experts, m, groups = scale.shape
    usual = (m + 3) // 4 * 4
    # The usual case comes first, because every GEMM call that is prepared runs this check.
    if scale.stride() == (1, usual):
        return 0 if scale.data_ptr() & 15 else max(usual, 4)
    *expert_strides, row_stride, stride = scale.stride()
    if m == 0 or 0 in experts:
        return 4
    if groups == 1:
        # The only group has no next group. If there are several experts, their distance is P.
        stride = expert_strides[0] if experts and experts[0] > 1 else usual
    fits = (
        (row_stride == 1 or m == 1)
        and stride >= m
        and not stride & 3
        and (not experts or experts[0] == 1 or expert_strides[0] == stride * groups)
    )
    return stride if fits and not scale.data_ptr() & 15 else 0


def is_mn_major(scale: Tensor) -> bool:
    """Whether the GEMMs read `scale` as it is (`pitch`)."""
    return pitch(scale) > 0


def check_written(op: str, name: str, scale: Tensor) -> None:
    """Check scales that an op writes: MN-major, or of other strides without elements in common."""
    if not is_mn_major(scale):
        no_overlap(op, name, scale)


def to_mn_major(scale: Tensor) -> Tensor:
    """Convert activation scales to the layout that the GEMMs read without conversion.

    scale: fp32 `[M, G]` or `[E, M, G]` of any strides (G = K/128). Returns the same values with
    stride `(1, align(M,4))`, or `(align(M,4)*G, 1, align(M,4))` for three dimensions. Returns `scale`
    itself if it is MN-major already, also with a larger multiple of 4 in place of `align(M,4)`. Units do not
    change. Launches at most one copy kernel; safe to capture. Raises ArgumentError.
    """
    demand_tensors("to_mn_major", {"scale": scale})
    if scale.dim() not in (2, 3):
        raise ArgumentError("to_mn_major", "scale", "shape [M, G] or [E, M, G]", list(scale.shape))
    if scale.dtype is not torch.float32:
        raise ArgumentError("to_mn_major", "scale", "dtype float32", scale.dtype, "call .float() on it")
    if is_mn_major(scale):
        return scale
    return empty_mn_major(scale.shape, scale).copy_(scale.detach())


def row_scaled(b: Tensor, b_scale: Tensor) -> bool:
    """Whether weights [N,K] have a scale for each 1 x 128, as activations have, and not for each 128 x 128.

    N is a multiple of 64, so that scales of blocks are always fewer than rows.
    """
    return b_scale.shape[:1] == b.shape[:1]


@cache
def _count_conversion() -> Callable[[str], None]:
    """`count_scale_conversion` of `moe_fp8.jit.runtime`, which the import of the ops alone does not load."""
    count: Callable[[str], None] = importlib.import_module("moe_fp8.jit.runtime").count_scale_conversion
    return count


def mn_major(op: str, scale: Tensor, kernel: str, name: str = "a_scale") -> Tensor:
    """`scale` if it is MN-major, else `to_mn_major` of it, which is counted and logged.

    `op` and `name`: the op and its argument. `kernel`: the kernel that reads the scales, for the count.
    """
    if is_mn_major(scale):
        return scale
    _count_conversion()(kernel)
    _log.debug(
        "%s: %s %s with stride %s converted to MN-major; quantize_fp8 writes that layout itself",
        op,
        name,
        tuple(scale.shape),
        scale.stride(),
    )
    return to_mn_major(scale)
