"""The choice of keys by their indexer logits (DeepSeek-V3.2 technical report, arXiv 2512.02556, 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_fp8.ops import arguments
from moe_fp8.ops.indexer import checks, contracts, reference
from moe_fp8.ops.registry import register

_TOPK = "Tensor logits, SymInt topk, Tensor? ks, Tensor? ke, bool sorted, Tensor(a!) out, Tensor(b!)? values"
_topk_parts: dict[str, Any] = {
    "check": checks.indexer_topk,
    "contract": lambda logits, topk, ks, ke, *_: contracts.column_ranges(ks, ke, logits.shape[1]),
    "empty": lambda logits, *_: logits.shape[0] == 0,
    "reference": reference.indexer_topk,
    "cuda": "moe_fp8.ops.indexer.cuda:indexer_topk",
}

topk_op = register(f"indexer_topk({_TOPK}) -> ()", **_topk_parts)

#: Takes logits that are a chunk of wider rows. In out, column j is called first_column + j, which fits int32
#: for the columns before ke. carried, int32 [M, W] and contiguous, has the names of the last W columns. Order
#: and ties go by the columns of logits.
topk_chunk_op = register(
    f"_indexer_topk_chunk({_TOPK}, SymInt first_column, Tensor? carried) -> ()", **_topk_parts
)


def indexer_topk(
    logits: Tensor,
    *,
    topk: int,
    ks: Tensor | None = None,
    ke: Tensor | None = None,
    sorted: bool = False,
    out: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Columns of the topk greatest logits of each row, exactly, among ks[i] <= j < ke[i].

    logits: fp32 or bf16 `[M, N]`, N below 2^31. Rows are contiguous, at any distance, 0 included, and at any
    address. Logits outside a row's range are not read and may be anything.
    topk: 1 to 4096; it may be larger than a range.
    ks, ke: int32 `[M]`, contiguous, 0 <= ks <= ke <= N. None means 0 and N. Other values are clamped, but
    checked mode refuses them: clamp the lengths of tokens in empty requests to 0.
    sorted: order by descending value, and equal values by ascending column. Otherwise columns ascend.
    out: int32 `[M, topk]`, contiguous, or None. values: `[M, topk]` of logits' dtype, contiguous, or None.
    Neither may overlap another argument.

    Returns out: column numbers of logits, then -1 if a range has fewer than topk. values receives the chosen
    logits, then -inf. Among equal logits the lower columns are chosen. As for `torch.topk`, -0 equals +0,
    -inf is a value like any other, and NaN is above +inf. Every call gives the same bits.

    The op launches one kernel, takes no workspace and does not synchronize the host. It is safe to capture: a
    replay reads logits and ranges anew. M = 0 returns at once. Raises ArgumentError; in checked mode
    ContractError naming a row whose ks and ke are no range.
    """
    if out is None:
        if logits.dim() != 2:
            arguments.rank("indexer_topk", "logits", logits, "[M, N]", 2)
        checks.topk_width("indexer_topk", topk)
        out = torch.empty((logits.shape[0], topk), dtype=torch.int32, device=logits.device)
    topk_op(logits, topk, ks, ke, sorted, out, values)
    return out
