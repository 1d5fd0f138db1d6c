"""DeepGEMM as a peer: its import, and the calls that an engine makes on Hopper.

It is an oracle for speed and results. Nothing here is imported unless `--peer` names a folder.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CUDA_HOME = "/usr/local/cuda"

#: Older releases have other arguments: in the place of a width of logits, a flag to fill them.
_OLDEST = (2, 8)


class DeepGemm:
    """The `deep_gemm` module of `folder`, which holds a `deep_gemm/` package or a `deep_gemm.zip`.

    Activation scales must be MN-major and TMA-aligned, as `moe_fp8.to_mn_major` makes them. The peer then
    reads them without a conversion kernel. Callers pass each input's scales through `aligned` once, which
    checks this.
    """

    #: vLLM and SGLang turn programmatic dependent launch on, as every launch of ours has it.
    pdl = True

    def __init__(self, folder: Path) -> None:
        if "CUDA_HOME" not in os.environ and Path(_CUDA_HOME, "bin/nvcc").exists():
            os.environ["CUDA_HOME"] = _CUDA_HOME
        if not (folder / "deep_gemm").is_dir():
            archive = folder / "deep_gemm.zip"
            if not archive.exists():
                raise FileNotFoundError(f"neither {folder}/deep_gemm/ nor {archive} exists")
            # The folder is always the same, because the peer's kernel cache identifies its headers by their
            # path.
            folder = folder / "unpacked"
            zipfile.ZipFile(archive).extractall(folder)
        sys.path.insert(0, str(folder.resolve()))
        self._module: Any = importlib.import_module("deep_gemm")
        version = self._module.__version__
        if tuple(map(int, version.split(".")[:2])) < _OLDEST:
            raise RuntimeError(
                f"expected DeepGEMM 2.8 or newer, since older releases have other arguments, got {version}"
            )
        self._module.set_mk_alignment_for_contiguous_layout(128)
        self._module.set_pdl(self.pdl)
        self.name = f"deep_gemm-{version}"

    def aligned(self, scale: Tensor) -> Tensor:
        """`scale` in the layout that the peer reads without a conversion kernel."""
        result: Tensor = self._module.get_mn_major_tma_aligned_tensor(scale)
        return result

    def gemm(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
        self._module.fp8_gemm_nt((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=True)

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
        """Use `m_indices` [M] if it is given, else `psum` [E]."""
        self._module.m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale),
            (b, b_scale),
            out,
            psum if m_indices is None else m_indices,
            use_psum_layout=m_indices is None,
            disable_ue8m0_cast=True,
        )

    def grouped_masked(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        out: Tensor,
        masked_m: Tensor,
        expected_m: int,
    ) -> None:
        self._module.m_grouped_fp8_gemm_nt_masked(
            (a, a_scale), (b, b_scale), out, masked_m, expected_m, disable_ue8m0_cast=True
        )

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
        """Add to `out` [E, M, N]. `a` and `b` are flat: each expert's [rows, K_e], one behind the other.

        The scales are those of [M, K] and [N, K]. `device_sizes` has every K_e, as `sizes`.
        """
        self._module.k_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (b, b_scale), out, sizes, device_sizes, out
        )

    def mqa_logits(
        self, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, width: int
    ) -> Tensor:
        """Compressed logits [M, width]; with ks = 0 they are the full matrix."""
        result: Tensor = self._module.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, width)
        return result

    def paged_metadata(self, context_lens: Tensor, block_size: int, num_sms: int) -> Tensor:
        """`context_lens` is int32 [B, next_n]. With four tokens for each request, a task takes two SMs."""
        tasks = num_sms // 2 if context_lens.shape[1] == 4 else num_sms
        result: Tensor = self._module.get_paged_mqa_logits_metadata(context_lens, block_size, tasks)
        return result

    def paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        metadata: Tensor,
        max_context_len: int,
    ) -> Tensor:
        """`context_lens` int32 [B, next_n] holds each token's own length."""
        result: Tensor = self._module.fp8_fp4_paged_mqa_logits(
            (q, None), kv_cache, weights, context_lens, block_table, metadata, max_context_len
        )
        return result


def load(folder: Path | None) -> DeepGemm | None:
    """The peer in `folder`, or None if `folder` is None. Raises the errors of its import."""
    if folder is None:
        return None
    peer = DeepGemm(folder)
    torch.cuda.synchronize()
    return peer
