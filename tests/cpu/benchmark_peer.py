"""The reference ops behind the interface of the benchmarks' peer.

So layouts and scales agree because of the way the inputs are built, and not by luck.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_fp8


class ReferencePeer:
    """The interface of `benchmarks.peer.DeepGemm` over the reference ops."""

    name = "reference"

    def aligned(self, scale: Tensor) -> Tensor:
        assert moe_fp8.to_mn_major(scale) is scale, "the peer would have to convert these scales"
        return scale

    def gemm(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
        moe_fp8.gemm_fp8(a, a_scale, b, b_scale, out=out)

    def grouped_contiguous(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        out: Tensor,
        psum: Tensor,
        m_indices: Tensor | None,
    ) -> None:
        layout = {"psum": psum} if m_indices is None else {"m_indices": m_indices}
        moe_fp8.grouped_gemm_fp8_contiguous(a, a_scale, b, b_scale, **layout, out=out)

    def grouped_masked(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, *rest: Any
    ) -> None:
        masked_m, expected_m = rest
        moe_fp8.grouped_gemm_fp8_masked(a, a_scale, b, b_scale, masked_m, expected_m=expected_m, out=out)

    def k_grouped(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        out: Tensor,
        sizes: list[int],
        device_sizes: Tensor,
    ) -> None:
        assert device_sizes.tolist() == sizes
        whole = []
        for flat, rows in ((a, out.shape[1]), (b, out.shape[2])):
            parts = flat.view(torch.uint8).split([rows * size for size in sizes])
            columns = [part.view(rows, size) for part, size in zip(parts, sizes, strict=True)]
            whole.append(torch.cat(columns, 1).view(a.dtype))
        ends = torch.nn.functional.pad(device_sizes.cumsum(0), (1, 0)).int()
        moe_fp8.k_grouped_gemm_fp8(whole[0], a_scale, whole[1], b_scale, ends, c=out, out=out)

    def mqa_logits(
        self, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, width: int
    ) -> Tensor:
        return moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, max_seqlen_k=width)

    def paged_metadata(self, context_lens: Tensor, block_size: int, num_sms: int) -> Tensor:
        assert context_lens.dim() == 2
        return moe_fp8.paged_mqa_logits_metadata(context_lens, block_size=block_size, num_sms=num_sms)

    def paged_mqa_logits(self, *arguments: Any) -> Tensor:
        *operands, width = arguments
        return moe_fp8.paged_mqa_logits_fp8(*operands, max_context_len=width)
