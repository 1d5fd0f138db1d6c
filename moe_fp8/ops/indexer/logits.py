"""Indexer logits of sparse attention (DeepSeek-V3.2's lightning indexer), prefill and paged decode.

`mqa_logits_fp8` says what a logit is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops.indexer import checks, contracts, reference
from moe_fp8.ops.modes import launches
from moe_fp8.ops.registry import register


def _no_scores(k: Tensor, fill: bool, out: Tensor) -> bool:
    """Without keys, no kernel runs, and `fill` fills all of out."""
    if k.shape[0] == 0 and fill and launches(out):
        out.detach().fill_(float("-inf"))
    return k.shape[0] == 0 or out.numel() == 0


_MQA_LOGITS = (
    "Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor ks, Tensor ke, bool compressed, bool fill, "
    "Tensor(a!) out"
)
_mqa_logits_parts: dict[str, Any] = {
    "check": checks.mqa_logits,
    "contract": lambda q, k, k_scale, weights, ks, ke, compressed, fill, out, *_: contracts.queries(
        "mqa_logits_fp8", k_scale, weights, ks, ke, out.shape[1]
    ),
    "empty": lambda q, k, k_scale, weights, ks, ke, compressed, fill, out, *_: _no_scores(k, fill, out),
    "reference": lambda q, k, k_scale, weights, ks, ke, compressed, fill, out, *_: reference.mqa_logits(
        q, k, k_scale, weights, ks, ke, out, compressed, fill
    ),
    "cuda": "moe_fp8.ops.indexer.cuda:mqa_logits",
    "varying": ("k", "out"),
}

mqa_logits_op = register(f"mqa_logits_fp8({_MQA_LOGITS}) -> ()", **_mqa_logits_parts)

#: Scores a chunk of a selection. The whole sizes choose its kernel, so a logit does not depend on its chunk.
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

    The logit of query i and key j is the sum over heads h of relu(q[i,h] . k[j]) * k_scale[j] * weights[i,h]
    (DeepSeek-V3.2, arXiv 2512.02556, section 2.1). q has no scales here: if q[i,h] has a scale, multiply
    weights[i,h] by it first.

    q: float8_e4m3fn `[M, H, D]`, H one of 8, 16, 32, 64, D one of 32, 64, 128. k: float8_e4m3fn `[N, D]`.
    weights: fp32 `[M, H]`. Rows of q, k and weights are contiguous, a multiple of 16 bytes apart, and do not
    overlap. All rows of q are at one distance: its stride is `(H*S, S, 1)`.
    k_scale: fp32 `[N]`. ks, ke: int32 `[M]`, 0 <= ks <= ke <= N. These three are contiguous. All are on one
    device; q, k, k_scale and weights are 16-byte aligned.
    max_seqlen_k: None for the full layout, in which out is `[M, N]` and column j is key j. A width gives the
    compressed layout, in which out is `[M, max_seqlen_k]` and column c is key ks[i] + c; no row may be wider.
    fill: write -inf to every other element. Without it those elements keep what out held; an allocated out
    is uninitialized.
    out: fp32 or bf16 of the shape above, or None. Its rows are contiguous, any distance apart.
    out_dtype: the dtype of the allocated out, fp32 unless given. Sums are fp32 and are rounded once.

    Returns out. The same call gives the same bits. No host synchronization; safe to capture: a replay reads
    ks and ke anew. M = 0 returns at once.

    Large calls take a second kernel, whose logits differ slightly and may be nonzero where all scores are
    negative: docs/ops.md, "The indexer", has the sizes of such calls and bounds of the difference.

    The -inf of `fill` is written by the blocks that compute the logits, 4,096 columns of a few queries at a
    time, one warp a row. A call with few keys has few blocks: if max_seqlen_k is far larger than N, and M is
    small, few warps write all of it, and filling out before the call is the better way.

    Raises ArgumentError (sizes beyond 32 bits too: docs/ops.md, "Sizes"), UnsupportedError (another H or D);
    in checked mode ContractError naming the row, or the key whose scale is NaN or infinite.
    """
    if out is None:
        if q.dim() != 3 or k.dim() != 2:
            arguments.rank("mqa_logits_fp8", "q", q, "[M, H, D]", 3)
            arguments.rank("mqa_logits_fp8", "k", k, "[N, D]", 2)
        columns = k.shape[0]
        if max_seqlen_k is not None:
            columns = arguments.columns("mqa_logits_fp8", "max_seqlen_k", max_seqlen_k)
        out = torch.empty(
            (q.shape[0], columns),
            dtype=arguments.out_dtype("mqa_logits_fp8", out_dtype, torch.float32),
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


def _no_requests(context_lens: Tensor, out: Tensor) -> bool:
    """Without requests, no kernel runs, and every row of the schedule is (0, 0)."""
    if context_lens.shape[0] == 0 and launches(out):
        out.zero_()
    return context_lens.shape[0] == 0


metadata_op = register(
    "paged_mqa_logits_metadata(Tensor context_lens, SymInt block_size, SymInt next_n, Tensor(a!) out) -> ()",
    check=checks.paged_mqa_logits_metadata,
    contract=lambda context_lens, block_size, next_n, out: contracts.chunk_count(context_lens, next_n),
    empty=lambda context_lens, block_size, next_n, out: _no_requests(context_lens, out),
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

    context_lens: int32 `[B]` or `[B, next_n]`, contiguous; zero is allowed. block_size: tokens of a page
    (32, 64 or 128). num_sms: the number of workers, at least 1; the default is `get_num_sms()` of the
    tensor's GPU, and on the CPU there is none. next_n: tokens of a request; a 2-D context_lens gives it by
    its shape. out: int32 `[num_sms + 1, 2]`, contiguous, 8-byte aligned, or None.

    Returns int32 `[num_sms + 1, 2]`. Each row is (request, chunk of 64 tokens), and worker s does the chunks
    from row s up to row s + 1. A request has ceil(its longest token's length / 64) chunks. Worker s starts
    at flattened chunk floor(s * total / num_sms). The last row is (B, 0); for B = 0 all rows are (0, 0).

    The kernel counts chunks in 32 bits: all requests together have at most 2^31 - 2^17 of them.

    No host synchronization; safe to capture: a replay rebuilds the schedule from context_lens. Raises
    ArgumentError, UnsupportedError; in checked mode ContractError for too many chunks.
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
    contract=contracts.paged_logits,
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

    Logits are defined in `mqa_logits_fp8`; a scale of q goes into weights here, too.

    q: float8_e4m3fn `[B, next_n, H, D]`; H one of 8, 16, 32, 64, D one of 32, 64, 128, next_n 1 to 8.
    weights: fp32 `[B * next_n, H]`. The rows of q and weights are contiguous, start at one distance, a
    multiple of 16 bytes, and do not overlap. q, weights and kv_cache are 16-byte aligned.
    kv_cache: uint8 `[pages, block_size, 1, D + 4]`, block_size 32, 64 or 128. A page is block_size * D bytes
    of fp8 keys, then block_size fp32 scales. The page stride may be larger than a page (a multiple of 16
    bytes).
    context_lens: int32, contiguous. With `[B]`, token t sees the first context_lens[b] - (next_n - 1 - t)
    positions, or none if this is below 0. With `[B, next_n]`, every token has its own length. Zero is
    allowed.
    block_table: int32 `[B, any]`: the pages of each request. Its rows are contiguous, any distance apart, 0
    included. Entries past a context's last page may be anything.
    metadata: the result of `paged_mqa_logits_metadata` for the same context_lens and next_n, and for any
    num_sms; contiguous, 8-byte aligned. max_context_len: columns of out.
    out: fp32 or bf16 `[B * next_n, max_context_len]`, or None. Its rows are contiguous, any distance apart.
    out_dtype: the dtype of the allocated out, fp32 unless given.

    Returns out. Row b * next_n + t holds token t of request b, and column j is position j. An element is
    written only if j is below the token's length. No host synchronization; safe to capture: a replay reads
    lengths, tables and metadata anew. Raises ArgumentError, UnsupportedError; in checked mode ContractError
    naming the request as `row`, for lengths, pages, cached scales, weights and a stale schedule.
    """
    if out is None:
        if q.dim() != 4:
            arguments.rank("paged_mqa_logits_fp8", "q", q, "[B, next_n, H, D]", 4)
        arguments.columns("paged_mqa_logits_fp8", "max_context_len", max_context_len)
        dtype = arguments.out_dtype("paged_mqa_logits_fp8", out_dtype, torch.float32)
        out = torch.empty((q.shape[0] * q.shape[1], max_context_len), dtype=dtype, device=q.device)
    elif out.dim() == 0 or out.size(-1) != max_context_len:
        raise ArgumentError(
            "paged_mqa_logits_fp8", "out", f"{max_context_len} columns (max_context_len)", list(out.shape)
        )
    else:
        arguments.given_out("paged_mqa_logits_fp8", out, out_dtype)
    paged_logits_op(q, kv_cache, weights, context_lens, block_table, metadata, out)
    return out
