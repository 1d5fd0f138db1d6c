"""The meaning of the indexer's ops in plain torch: the CPU implementation, and the oracle of the tests.

Scores are computed in `compute_dtype`, float32 by default; the tests ask for float64. Nothing outside an op's
contract is read: cache entries past a context's end may hold NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.heuristics import PAGED_CHUNK
from moe_fp8.ops.quantize.reference import fp8_values, scale_from_amax, to_fp8

#: The prefill reference holds the scores of at most this many (query, head, key) triples at once.
_SCORES_AT_ONCE = 1 << 24


def indexer_quantize_and_cache(k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool) -> None:
    """Write k [T,D] into kv_cache uint8 [pages, block, 1, D+4], quantized as by `quantize` in groups of D."""
    pages, block, _, width = kv_cache.shape
    dim = width - 4
    slots = slot_mapping.long()
    kept = (slots >= 0) & (slots < pages * block)
    values = k[kept].float()
    scale = scale_from_amax(values.abs().amax(1), power_of_two)[:, None]
    page, offset = slots[kept, None] // block, slots[kept, None] % block
    # Scales are written as bytes: a view as fp32 would ask more of the page stride than the op does.
    cache = kv_cache.view(pages, -1)
    byte = torch.arange(dim, device=k.device)
    cache[page, offset * dim + byte] = to_fp8(values, scale).view(torch.uint8)
    cache[page, (block * dim + offset * 4) + byte[:4]] = scale.view(torch.uint8)


def _scores(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Return sum_h relu(q.k) * k_scale * weights, [M,N]; q [M,H,D], k [N,D], k_scale [N], weights [M,H]."""
    m, heads, dim = q.shape
    dots = (fp8_values(q, compute_dtype).view(m * heads, dim) @ fp8_values(k, compute_dtype).T).relu_()
    dots, weights = dots.view(m, heads, -1), weights.to(compute_dtype)
    total = dots.new_zeros(m, dots.shape[2])
    for head in range(heads):  # (`sum` and a product of matrices round equal columns differently.)
        total += dots[:, head] * weights[:, head, None]
    return total * k_scale.to(compute_dtype)


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    out: Tensor,
    compressed: bool,
    fill: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Write out[i, j], or out[i, j - ks[i]], for ks[i] <= j < ke[i]; the rest becomes -inf if `fill`.

    As in the kernel, keys and columns that do not exist are left out.
    """
    m, heads, _ = q.shape
    if fill:
        out.fill_(float("-inf"))
    begins, behind = ks.clamp(min=0), ke.clamp(max=k.shape[0])
    if compressed:
        behind = torch.minimum(behind, begins + out.shape[1])
    starts, ends = begins.tolist(), behind.tolist()
    step = max(1, _SCORES_AT_ONCE // max(1, heads * k.shape[0]))
    for first in range(0, m, step):
        rows = range(first, min(first + step, m))
        low, high = min(starts[i] for i in rows), max(ends[i] for i in rows)
        if low >= high:
            continue
        block = slice(first, first + step)
        scores = _scores(q[block], k[low:high], k_scale[low:high], weights[block], compute_dtype)
        for i in rows:
            begin, end = starts[i], ends[i]
            if begin < end:
                at = 0 if compressed else begin
                out[i, at : at + end - begin] = scores[i - first, begin - low : end - low]


def token_lengths(context_lens: Tensor, next_n: int) -> Tensor:
    """Return the length that each token sees, int64 [B,next_n], from context_lens [B] or [B,next_n].

    With [B], token t of a request sees all but the last next_n - 1 - t positions. Negative lengths become 0.
    """
    if context_lens.dim() == 2:
        return context_lens.long().clamp_min(0)
    behind = torch.arange(next_n - 1, -1, -1, device=context_lens.device)
    return (context_lens.long()[:, None] - behind).clamp_min(0)


def paged_mqa_logits_metadata(context_lens: Tensor, num_sms: int, next_n: int, out: Tensor) -> None:
    """Write out int32 [num_sms+1,2]: the (request, chunk) that each worker starts at, then (B, 0).

    A request has ceil(longest token length / 64) chunks; worker s starts at flattened chunk
    floor(s * total / num_sms).
    """
    chunks = (token_lengths(context_lens, next_n).amax(1) + PAGED_CHUNK - 1) // PAGED_CHUNK
    ends = chunks.cumsum(0)
    workers = torch.arange(num_sms + 1, device=ends.device)
    starts = workers * ends[-1] // num_sms
    request = torch.searchsorted(ends, starts, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[request]
    out[:, 0] = request
    out[:, 1] = starts - before


def page_contents(kv_cache: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return keys fp8 [block, D] and scales fp32 [block] of a page of kv_cache uint8 [pages,block,1,D+4]."""
    _, block, _, width = kv_cache.shape
    data = kv_cache[page].reshape(-1)
    split = block * (width - 4)
    return data[:split].view(torch.float8_e4m3fn).view(block, -1), data[split:].view(torch.float32)


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Write out[b*next_n+t, j] for j below token t's length; the rest is left as it is."""
    batch, next_n = q.shape[:2]
    block = kv_cache.shape[1]
    # As in the kernel, no length goes beyond this width.
    most = min(out.shape[1], block_table.shape[1] * block)
    lengths = token_lengths(context_lens, next_n).clamp_max(most).tolist()
    for b in range(batch):
        longest = max(lengths[b])
        if longest == 0:
            continue
        pages = block_table[b, : -(-longest // block)].tolist()
        contents = [page_contents(kv_cache, page) for page in pages]
        # Keys are gathered as bytes: torch cannot concatenate fp8 on every backend.
        k = torch.cat([keys.view(torch.uint8) for keys, _ in contents])[:longest]
        k_scale = torch.cat([scales for _, scales in contents])[:longest]
        rows = slice(b * next_n, (b + 1) * next_n)
        scores = _scores(q[b], k.view(torch.float8_e4m3fn), k_scale, weights[rows], compute_dtype)
        for t, length in enumerate(lengths[b]):
            out[b * next_n + t, :length] = scores[t, :length]


def topk_keys(values: Tensor) -> Tensor:
    """Return int64 keys in the order of `indexer_topk`: -inf lowest, -0 equal to +0, NaN above +inf."""
    bits = values.float().view(torch.int32).long()
    # The bits of a negative float are 0x80000000 + magnitude. Its key is -magnitude, so -0 gets 0.
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(values.isnan(), torch.iinfo(torch.int32).max, keys)


def indexer_topk(
    logits: Tensor,
    topk: int,
    ks: Tensor | None,
    ke: Tensor | None,
    in_order: bool,
    out: Tensor,
    values: Tensor | None,
    first_column: int = 0,
    carried: Tensor | None = None,
) -> None:
    """Write out int32 [M,topk], the columns of the greatest logits of ks[i] <= j < ke[i], and their values.

    Column j is called first_column + j. `carried` [M,W] has the names of the last W columns.
    """
    rows, columns = logits.shape
    firsts = [0] * rows if ks is None else ks.clamp(0, columns).tolist()
    lasts = [columns] * rows if ke is None else ke.clamp(0, columns).tolist()
    out.fill_(-1)
    if values is not None:
        values.fill_(float("-inf"))
    for row, (start, end) in enumerate(zip(firsts, lasts, strict=True)):
        if start >= end:
            continue
        candidates = logits[row, start:end]
        # A stable sort leaves equal keys in order of columns.
        chosen = topk_keys(candidates).sort(descending=True, stable=True).indices[:topk]
        if not in_order:
            chosen = chosen.sort().values
        names = chosen + start + first_column
        if carried is not None:
            behind = chosen + start - (columns - carried.shape[1])
            names = torch.where(behind < 0, names, carried[row].long()[behind.clamp_min(0)])
        out[row, : len(chosen)] = names
        if values is not None:
            values[row, : len(chosen)] = candidates[chosen]
