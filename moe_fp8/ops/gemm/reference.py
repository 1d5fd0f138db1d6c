"""The definition of the GEMMs in plain torch: the CPU implementation and the oracle of the tests.

Values are dequantized and multiplied in `compute_dtype` (float32 for the ops, float64 in the tests).
Padding rows and their scales are not read: they may hold NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.ops import scales
from moe_fp8.ops.quantize.reference import fp8_values
from moe_fp8.problems import SEGMENT_ALIGNMENT


def dequantize_rows(a: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 [M,K] with scales [M,K/128] -> `dtype` [M,K]."""
    m, k = a.shape
    groups = fp8_values(a, dtype).view(m, k // SCALE_BLOCK, SCALE_BLOCK)
    return groups.mul_(scale.to(dtype)[..., None]).view(m, k)


def dequantize_blocks(b: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 [N,K] with scales [ceil(N/128), K/128] -> `dtype` [N,K]."""
    n, k = b.shape
    row_scale = scale.to(dtype).repeat_interleave(SCALE_BLOCK, 0)[:n]
    return fp8_values(b, dtype).view(n, k // SCALE_BLOCK, SCALE_BLOCK).mul_(row_scale[..., None]).view(n, k)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    accumulate: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """out [M,N] (+)= a [M,K] @ b [N,K]^T, rounded to out's dtype; b has scales of 128 x 128 or 1 x 128."""
    dequantize_b = dequantize_rows if scales.row_scaled(b, b_scale) else dequantize_blocks
    product = dequantize_rows(a, a_scale, compute_dtype) @ dequantize_b(b, b_scale, compute_dtype).T
    out.copy_(out.to(compute_dtype) + product if accumulate else product)


def segments(layout: str, index: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, one past the last row) of every non-empty run of rows, in row order.

    `layout` is "psum" (ends, starts aligned to 128), "offsets" ([E+1]) or "m_indices" (the expert
    of each row, -1 for padding).
    """
    values = index.tolist()
    runs: list[tuple[int, int, int]] = []
    if layout == "offsets":
        runs = [(e, values[e], values[e + 1]) for e in range(len(values) - 1)]
    elif layout == "psum":
        start = 0
        for expert, end in enumerate(values):
            runs.append((expert, start, end))
            start = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
    elif layout == "m_indices":
        first = 0
        for row in range(1, len(values) + 1):
            if row == len(values) or values[row] != values[first]:
                runs.append((values[first], first, row))
                first = row
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return [(e, start, end) for e, start, end in runs if e >= 0 and start < end]


def gemm_contiguous(
    layout: str,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    index: Tensor,
    out: Tensor,
    accumulate: bool = False,
) -> None:
    """out[rows of e] (+)= a[rows of e] @ b[e]^T; rows of no expert do not change."""
    for e, start, end in segments(layout, index):
        rows = slice(start, end)
        gemm(a[rows], a_scale[rows], b[e], b_scale[e], out[rows], accumulate)


def gemm_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    out: Tensor,
    accumulate: bool = False,
) -> None:
    """out[e,:masked_m[e]] (+)= a[e,:masked_m[e]] @ b[e]^T; other rows do not change."""
    for e, count in enumerate(masked_m.tolist()):
        if count > 0:
            rows = slice(count)
            gemm(a[e, rows], a_scale[e, rows], b[e], b_scale[e], out[e, rows], accumulate)


def k_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    accumulate: bool,
) -> None:
    """out[e] (+)= a[:, ke] @ b[:, ke]^T; a [M,K] and b [N,K] with 1 x 128 scales, offsets [E+1]."""
    ends = offsets.tolist()
    for e in range(len(ends) - 1):
        columns = slice(ends[e], ends[e + 1])
        groups = slice(ends[e] // SCALE_BLOCK, ends[e + 1] // SCALE_BLOCK)
        left, right = (a[:, columns], a_scale[:, groups]), (b[:, columns], b_scale[:, groups])
        gemm(*left, *right, out[e], accumulate)
