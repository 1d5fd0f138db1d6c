"""`deep_gemm.utils.layout`: scales and alignments."""

from __future__ import annotations

from moe_fp8.integrations import vendored
from moe_fp8.integrations.deep_gemm.layout import (
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)

get_k_alignment_for_contiguous_layout = get_m_alignment_for_contiguous_layout

__all__ = [
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]


__getattr__ = vendored.getter(__name__, "utils.layout")
