"""The choice of keys by their indexer logits (DeepSeek-V3.2 technical report, arXiv 2512.02556, 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops import arguments
from moe_fp8.ops.indexer import checks, contracts, reference
from moe_fp8.ops.registry import register

topk_op = register(
    "indexer_topk(Tensor logits, SymInt k, Tensor? starts, Tensor? ends, bool by_value, Tensor(a!) out, "
    "Tensor(b!)? values, SymInt first_column=0, Tensor? carried=None) -> ()",
    check=checks.indexer_topk,
    contract=lambda logits, k, starts, ends, *_: contracts.column_ranges(
        starts, ends, logits.shape[0], logits.shape[1]
    ),
    empty=lambda logits, *_: logits.shape[0] == 0,
    reference=reference.indexer_topk,
    cuda="moe_fp8.ops.indexer.cuda:indexer_topk",
)


def indexer_topk(
    logits: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    sorted: bool = False,
    out: Tensor | None = None,
    values: Tensor | None = None,
    first_column: int = 0,
    carried: Tensor | None = None,
) -> Tensor:
    """Columns of the k greatest logits of each row, exactly, among starts[i] <= j < ends[i].

    logits: fp32 or bf16 `[M, N]`, contiguous rows of any stride and alignment; what lies outside a row's
    range is not read and may be anything. k: 1 to 4096, larger than a range or not.
    starts, ends: int32 `[M]`, contiguous, 0 <= starts <= ends <= N; None: 0 and N. Others are clamped.
    sorted: by descending value, equal values by ascending column; otherwise by ascending column.
    out: int32 `[M, k]`, contiguous, or None. values: of logits' dtype, `[M, k]`, contiguous, or None. Neither
    may overlap another argument.

    first_column, carried: what columns are called in out, where logits are a part of wider rows: column j
    first_column + j, but the last W what carried, int32 `[M, W]`, contiguous, says. Order and ties go by
    columns of logits.

    Returns out: column numbers of logits, then -1 where a range has fewer than k. values receives the chosen
    logits, then -inf. Of equal logits the lower columns are chosen; -0 equals +0, -inf is a value like any
    other and NaN is above +inf, as for `torch.topk`. Results are the same bit for bit in every call.

    One kernel, no workspace, no host synchronisation; safe to capture: a replay reads logits and ranges
    anew. M = 0 returns at once. Raises ArgumentError; in checked mode ContractError naming the row whose
    range is not one.
    """
    if out is None:
        if logits.dim() != 2:
            arguments.rank("indexer_topk", "logits", logits, "[M, N]", 2)
        checks.topk_width(k)
        out = torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
    topk_op(logits, k, starts, ends, sorted, out, values, first_column, carried)
    return out
