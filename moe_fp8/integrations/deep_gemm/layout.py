"""Layouts of scales, and the alignment of an expert's rows, under DeepGEMM's names.

On Hopper, DeepGEMM reads activation scales MN-major and weight scales as they are stored, both in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.integrations import vendored
from moe_fp8.integrations.forwarding import NotServed, or_vendored
from moe_fp8.ops.arguments import demand_tensors
from moe_fp8.ops.scales import empty_mn_major, mn_major_stride
from moe_fp8.problems import SEGMENT_ALIGNMENT


class _Alignment:
    """The multiple of rows at which an expert's rows start in a contiguous layout."""

    rows: int = SEGMENT_ALIGNMENT


def get_mk_alignment_for_contiguous_layout() -> int:
    """The multiple of rows at which each expert's rows start: 128, unless a caller has set another."""
    return _Alignment.rows


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Set the multiple of rows at which each expert's rows start, for all threads, until it is set again.

    The engine's own copy gets it too. Multiples of 128 cost nothing. For others, a grouped call launches two
    or three more kernels, which turn its layout into row ranges. Raises ArgumentError unless it is at least
    1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            "set_mk_alignment_for_contiguous_layout", "value", "an integer of at least 1", value
        )
    if value != _Alignment.rows:
        _Alignment.rows = value
        vendored.set_too("set_mk_alignment_for_contiguous_layout", value)


def reset() -> None:
    """Make the alignment what it is at first, without a word to the engine's own copy."""
    _Alignment.rows = SEGMENT_ALIGNMENT


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The alignment that suits our kernels for any number of rows: 128."""
    return SEGMENT_ALIGNMENT


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """x elements of `element_size` bytes, rounded up to a multiple of 16 bytes. Raises ArgumentError."""
    if element_size not in (1, 2, 4, 8, 16):
        raise ArgumentError("get_tma_aligned_size", "element_size", "1, 2, 4, 8 or 16", element_size)
    per_16_bytes = 16 // element_size
    return -(-x // per_16_bytes) * per_16_bytes


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """fp32 scales `[MN, G]` or `[E, MN, G]`, MN-major: with stride (1, P), or (P*G, 1, P).

    P is MN rounded up to a multiple of 4. Returns `sf` itself if it has these strides. Launches at most one
    copy; safe to capture. Raises ArgumentError for another dtype or rank.
    """
    demand_tensors("get_mn_major_tma_aligned_tensor", {"sf": sf})
    if sf.dim() not in (2, 3) or sf.dtype is not torch.float32:
        raise ArgumentError(
            "get_mn_major_tma_aligned_tensor", "sf", "fp32 [MN, G] or [E, MN, G]", [*sf.shape, sf.dtype]
        )
    if sf.stride() == mn_major_stride(sf.shape):
        return sf
    return empty_mn_major(sf.shape, sf).copy_(sf.detach())


@or_vendored
def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int] | None = None,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """The scales in the layout that the Hopper kernels read.

    sf: fp32 `[ceil(mn / gran_mn), ceil(k / gran_k)]`, after `[num_groups]` for experts. `recipe` has the
    granularities of both operands (m, n, k), or those of this operand alone (mn, k). `is_sfa`: activations.
    Scales of 128 x 128 blocks are returned as they are, scales of 1 x 128 groups MN-major.
    `disable_ue8m0_cast` means nothing on Hopper. Scales of another granularity, and those of rows with a
    `psum_layout`, go to the engine's own copy. Raises ArgumentError.
    """
    if psum_layout is not None:
        raise NotServed("`psum_layout` (scales of rows with gaps between the experts) is not served")
    given = tuple(recipe or (1, 128, 128))
    granularities = (given[0 if is_sfa else 1], given[2]) if len(given) == 3 else given
    if granularities not in ((1, 128), (128, 128)):
        raise NotServed(f"the kernels read scales of 1 x 128 and 128 x 128, got the recipe {given}")
    rows, columns = granularities
    groups = () if num_groups is None else (num_groups,)
    expected = (*groups, -(-mn // rows), -(-k // columns))
    if tuple(sf.shape) != expected or sf.dtype is not torch.float32:
        raise ArgumentError(
            "transform_sf_into_required_layout", "sf", f"fp32 {list(expected)}", [*sf.shape, sf.dtype]
        )
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf
