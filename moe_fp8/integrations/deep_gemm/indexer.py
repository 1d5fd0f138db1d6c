"""The logits of sparse attention's indexer under DeepGEMM's names.

vLLM 0.24 and SGLang 0.5.23 pass `clean_logits`. DeepGEMM 2.8, which vLLM 0.33 calls, has other arguments in
its place: `max_seqlen_k` of prefill, which means compressed rows, and `indices` of decode. The type of the
argument tells them apart: a bool, an int or a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.integrations.deep_gemm.utils.math import align
from moe_fp8.integrations.forwarding import NotServed
from moe_fp8.limits import MAX_NEXT_N
from moe_fp8.ops import mqa_logits_fp8, paged_mqa_logits_fp8
from moe_fp8.ops import paged_mqa_logits_metadata as make_metadata
from moe_fp8.ops.arguments import integer

Pair = tuple[Tensor, Tensor]

#: Rows of logits begin at multiples of so many elements, as in DeepGEMM. (SGLang's top-k needs multiples
#: of 4.)
_ROW_ALIGNMENT = 256

_DTYPES = (torch.float32, torch.bfloat16)


def fp8_mqa_logits(
    q: Tensor | tuple[Tensor, Tensor | None],
    kv: Pair,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | int | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Logits of each query over its range of keys; see `moe_fp8.mqa_logits_fp8`.

    q: fp8 `[M, H, D]`, or (fp8, None). kv: (fp8 `[N, D]`, fp32 `[N]`). weights: fp32 `[M, H]`. The ranges:
    int32 `[M]`. max_seqlen_k > 0, or an int of this meaning in the place of `clean_logits`: compressed rows
    of so many columns. clean_logits: write -inf outside of the ranges; the default is True unless rows are
    compressed. Returns fp32 or bf16 `[M, N]` or `[M, max_seqlen_k]`, the first columns of rows whose distance
    is a multiple of 256. `schedule_meta` has no meaning on Hopper. Safe to capture.
    """
    if clean_logits is not None and not isinstance(clean_logits, bool):
        clean_logits, max_seqlen_k = False, clean_logits
    if clean_logits is None:
        clean_logits = max_seqlen_k == 0
    values, columns = _values(q), max_seqlen_k or kv[0].shape[:1].numel()
    return mqa_logits_fp8(
        values, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k=max_seqlen_k or None,
        fill=clean_logits, out=_rows(values, 3, columns, logits_dtype), out_dtype=logits_dtype,
    )  # fmt: skip


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """The schedule of a batch for `num_sms` tasks, int32 `[num_sms + 1, 2]`.

    context_lens: int32 `[B]` or `[B, next_n]`. More than 8 tokens for each request and `indices` (rows of
    different requests in one batch) are served by no kernel of ours on Hopper. Safe to capture.
    """
    _no_indices(indices)
    if context_lens.dim() == 2 and context_lens.shape[1] > MAX_NEXT_N:
        raise NotServed(f"more than {MAX_NEXT_N} tokens for each request are not served")
    return make_metadata(context_lens.contiguous(), block_size=block_kv, num_sms=num_sms)


def fp8_paged_mqa_logits(
    q: Tensor | tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Logits of each request's tokens over its paged keys; see `moe_fp8.paged_mqa_logits_fp8`.

    q: fp8 `[B, next_n, H, D]`, or (fp8, None). kv_cache: uint8 `[pages, block, 1, D + 4]`. context_lens:
    int32 `[B]` or `[B, next_n]`; zero is allowed. Returns fp32 or bf16 `[B * next_n, max_context_len]`, the
    first columns of rows as above. Only columns below a token's length are written. clean_logits: the others
    are -inf, which one more kernel writes before. A tensor in its place means `indices`, which are not
    served, as above. Safe to capture.
    """
    if isinstance(clean_logits, Tensor):
        indices, clean_logits = clean_logits, False
    _no_indices(indices)
    values = _values(q)
    out = _rows(values, 4, max_context_len, logits_dtype)
    if clean_logits and out is not None:
        out.detach().fill_(float("-inf"))
    return paged_mqa_logits_fp8(
        values, kv_cache, weights, context_lens.contiguous(), block_table, schedule_meta,
        max_context_len=max_context_len, out=out, out_dtype=logits_dtype,
    )  # fmt: skip


def _rows(q: Tensor, dims: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """Room for the logits `[rows, columns]` of `q`; None if an argument is wrong, which the op then tells."""
    try:
        columns = integer("deep_gemm", "columns", columns)
    except ArgumentError:
        return None
    if q.dim() != dims or columns < 0 or dtype not in _DTYPES:
        return None
    rows = q.shape[:-2].numel()
    return torch.empty((rows, align(columns, _ROW_ALIGNMENT)), dtype=dtype, device=q.device)[:, :columns]


def _values(q: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    if isinstance(q, Tensor):
        return q
    values, scales = q
    if scales is not None:
        raise NotServed("queries with scales of their own (FP4, MXFP8) are not served")
    return values


def _no_indices(indices: Tensor | None) -> None:
    if indices is not None:
        raise NotServed("`indices` (rows of different requests in one batch) are not served on Hopper")
