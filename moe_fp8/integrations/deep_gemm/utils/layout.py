"""`deep_gemm.utils.layout`: scales and alignments."""

from __future__ import annotations

from typing import Any

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


def __getattr__(name: str) -> Any:
    found = None if name.startswith("__") else vendored.lookup(name, "utils.layout")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
