"""Indexer logits of sparse attention (DeepSeek-V3.2's lightning indexer), prefill and paged decode.

logit of query i and key j = sum over heads h of relu(q[i,h] . k[j]) * k_scale[j] * weights[i,h]; the scale
of q is folded into `weights` by the caller (DeepSeek-V3.2 technical report, arXiv 2512.02556, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops.indexer import checks, contracts, reference
from moe_fp8.ops.registry import register


def _no_scores(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    compressed: bool,
    fill: bool,
    out: Tensor,
    *_: int,
) -> bool:
    if out.numel() == 0:
        return True
    if k.shape[0] == 0 and fill:
        out.fill_(float("-inf"))
    return k.shape[0] == 0


_MQA_LOGITS = (
    "Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor ks, Tensor ke, bool compressed, bool fill, "
    "Tensor(a!) out"
)
_mqa_logits_parts: dict[str, Any] = {
    "check": checks.mqa_logits,
    "contract": lambda q, k, k_scale, weights, ks, ke, compressed, fill, out, *_: contracts.query_ranges(
        ks, ke, k.shape[0], out.shape[1]
    ),
    "empty": _no_scores,
    "reference": lambda q, k, k_scale, weights, ks, ke, compressed, fill, out, *_: reference.mqa_logits(
        q, k, k_scale, weights, ks, ke, out, compressed, fill
    ),
    "cuda": "moe_fp8.ops.indexer.cuda:mqa_logits",
    "varying": ("k", "out"),
}

mqa_logits_op = register(f"mqa_logits_fp8({_MQA_LOGITS}) -> ()", **_mqa_logits_parts)

#: A chunk of a selection of so many queries and keys: it gets the kernel of the whole, and so its bits.
mqa_logits_chunk_op = register(
    f"_mqa_logits_fp8_chunk({_MQA_LOGITS}, SymInt whole_queries, SymInt whole_keys) -> ()",
    **_mqa_logits_parts,
)


def mqa_logits_fp8(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    max_seqlen_k: int | None = None,
    fill: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Prefill indexer logits of query i over keys ks[i] <= j < ke[i].

    q: float8_e4m3fn `[M, H, D]`, H one of 8, 16, 32, 64, D one of 32, 64, 128. k: float8_e4m3fn `[N, D]`.
    k_scale: fp32 `[N]`. weights: fp32 `[M, H]`. ks, ke: int32 `[M]`, 0 <= ks <= ke <= N. All contiguous and
    on one device; q, k, k_scale and weights 16-byte aligned.
    max_seqlen_k: None for the full layout, where out is `[M, N]` and column j is key j; a width for the
    compressed layout, where out is `[M, max_seqlen_k]` and column c is key ks[i] + c; no row may be wider.
    fill: write -inf to every other element; otherwise those keep what out held (uninitialised if allocated).
    out: fp32 or bf16 of the shape above, contiguous rows of any stride, or None.
    out_dtype: of the allocated out, fp32 unless given; sums are fp32 and rounded once.

    Returns out. The same call gives the same bits; M and N choose between two kernels (not in batch-invariant
    mode), whose logits differ, usually by 1e-4 of k_scale[j] * sum_h |weights[i,h] * q[i,h].k[j]|. No host
    synchronisation; safe to capture: a replay reads ks and ke anew. M = 0 returns at once. Raises
    ArgumentError, UnsupportedError (another H or head dimension); in checked mode ContractError naming the
    row.
    """
    if out is None:
        if q.dim() != 3 or k.dim() != 2:
            arguments.rank("mqa_logits_fp8", "q", q, "[M, H, D]", 3)
            arguments.rank("mqa_logits_fp8", "k", k, "[N, D]", 2)
        columns = k.shape[0] if max_seqlen_k is None else max_seqlen_k
        if columns < 0:
            raise ArgumentError("mqa_logits_fp8", "max_seqlen_k", "at least 0", max_seqlen_k)
        out = torch.empty(
            (q.shape[0], columns),
            dtype=checks.logits_dtype("mqa_logits_fp8", out_dtype),
            device=q.device,
        )
    elif max_seqlen_k is not None and (out.dim() == 0 or out.shape[-1] != max_seqlen_k):
        raise ArgumentError(
            "mqa_logits_fp8", "out", f"{max_seqlen_k} columns (max_seqlen_k)", list(out.shape)
        )
    else:
        arguments.given_out("mqa_logits_fp8", out, out_dtype)
    mqa_logits_op(q, k, k_scale, weights, ks, ke, max_seqlen_k is not None, fill, out)
    return out


def _no_requests(context_lens: Tensor, block_size: int, next_n: int, out: Tensor) -> bool:
    if context_lens.shape[0] == 0:
        out.zero_()
    return context_lens.shape[0] == 0


metadata_op = register(
    "paged_mqa_logits_metadata(Tensor context_lens, SymInt block_size, SymInt next_n, Tensor(a!) out) -> ()",
    check=checks.paged_mqa_logits_metadata,
    contract=lambda context_lens, block_size, next_n, out: contracts.schedule(context_lens, next_n),
    empty=_no_requests,
    reference=lambda context_lens, block_size, next_n, out: reference.paged_mqa_logits_metadata(
        context_lens, out.shape[0] - 1, next_n, out
    ),
    cuda="moe_fp8.ops.indexer.cuda:paged_mqa_logits_metadata",
)


def paged_mqa_logits_metadata(
    context_lens: Tensor,
    *,
    block_size: int,
    num_sms: int | None = None,
    next_n: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Divide a batch's KV evenly among `num_sms` workers, on the device.

    context_lens: int32 `[B]` or `[B, next_n]`, contiguous; zero is allowed. block_size: tokens of a page (32,
    64 or 128). num_sms: workers, at least 1; by default the SMs of the tensor's GPU. next_n: tokens of a
    request, taken from the shape if 2-D. out: int32 `[num_sms + 1, 2]`, contiguous, or None.

    Returns int32 `[num_sms + 1, 2]`: worker s does what lies from row s to row s + 1, each (request, chunk of
    64 tokens). Requests have ceil(longest token's length / 64) chunks; worker s starts at flattened chunk
    floor(s * total / num_sms); the last row is (B, 0), and for B = 0 all are (0, 0).

    No host synchronisation; safe to capture: rebuilt from context_lens at each replay.
    Raises ArgumentError, UnsupportedError.
    """
    op = "paged_mqa_logits_metadata"
    if context_lens.dim() == 2:
        next_n = context_lens.shape[1]
    if out is None:
        rows = arguments.workers(op, context_lens, num_sms) + 1
        out = torch.empty((rows, 2), dtype=torch.int32, device=context_lens.device)
    elif num_sms is not None and (out.dim() == 0 or out.shape[0] != num_sms + 1):
        raise ArgumentError(op, "out", f"{num_sms + 1} rows (num_sms + 1)", list(out.shape))
    metadata_op(context_lens, block_size, next_n, out)
    return out


paged_logits_op = register(
    "paged_mqa_logits_fp8(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, Tensor metadata, Tensor(a!) out) -> ()",
    check=checks.paged_mqa_logits,
    contract=lambda q, kv_cache, weights, context_lens, block_table, metadata, out: contracts.paged_contexts(
        context_lens, q.shape[1], block_table, kv_cache.shape[1], kv_cache.shape[0], out.shape[1]
    ),
    empty=lambda q, kv_cache, weights, context_lens, block_table, metadata, out: (
        out.numel() == 0 or kv_cache.shape[0] == 0 or block_table.shape[1] == 0
    ),
    reference=lambda q, kv_cache, weights, context_lens, block_table, metadata, out: (
        reference.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, out)
    ),
    cuda="moe_fp8.ops.indexer.cuda:paged_mqa_logits",
    varying=("out",),
)


def paged_mqa_logits_fp8(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    *,
    max_context_len: int,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Decode indexer logits of each request's tokens over its own paged keys.

    q: float8_e4m3fn `[B, next_n, H, D]`, contiguous; H one of 8, 16, 32, 64, D one of 32, 64, 128, next_n 1
    to 8. kv_cache: uint8 `[pages, block_size, 1, D + 4]`, block_size 32, 64 or 128: a page is block_size * D
    bytes of fp8 keys, then block_size fp32 scales; the page stride may be larger (a multiple of 16 bytes).
    weights: fp32 `[B * next_n, H]`, contiguous. context_lens: int32 `[B]` (token t sees the first
    context_lens[b] - (next_n - 1 - t) positions) or `[B, next_n]` (each token's own length); zero is allowed.
    block_table: int32 `[B, any]`, contiguous rows: pages of each request; entries past a context's last page
    may be anything. metadata: from `paged_mqa_logits_metadata` with the same context_lens and next_n, for any
    num_sms. max_context_len: columns of out. out: fp32 or bf16 `[B * next_n, max_context_len]`, contiguous
    rows of any stride, or None. out_dtype: of the allocated out, fp32 unless given.

    Returns out: row b * next_n + t, column j = position j, written only where j is below the token's length.
    No host synchronisation; safe to capture: a replay reads lengths, tables and metadata anew.
    Raises ArgumentError, UnsupportedError; in checked mode ContractError naming the request as `row`.
    """
    if out is None:
        if q.dim() != 4:
            arguments.rank("paged_mqa_logits_fp8", "q", q, "[B, next_n, H, D]", 4)
        if max_context_len < 0:
            raise ArgumentError("paged_mqa_logits_fp8", "max_context_len", "at least 0", max_context_len)
        dtype = checks.logits_dtype("paged_mqa_logits_fp8", out_dtype)
        out = torch.empty((q.shape[0] * q.shape[1], max_context_len), dtype=dtype, device=q.device)
    elif out.dim() == 0 or out.size(-1) != max_context_len:
        raise ArgumentError(
            "paged_mqa_logits_fp8", "out", f"{max_context_len} columns (max_context_len)", list(out.shape)
        )
    else:
        arguments.given_out("paged_mqa_logits_fp8", out, out_dtype)
    paged_logits_op(q, kv_cache, weights, context_lens, block_table, metadata, out)
    return out
