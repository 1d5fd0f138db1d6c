"""Rows of tokens sorted by expert, and the weighted sum of the experts' results.

The layer is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): a token's output is the sum of its
experts' outputs, each times the router's weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.limits import MAX_EXPERTS
from moe_fp8.ops import arguments
from moe_fp8.ops.moe import checks, contracts, reference
from moe_fp8.ops.registry import register
from moe_fp8.ops.scales import empty_mn_major


class Permuted(NamedTuple):
    """The result of `moe_permute`: the experts' inputs `a`, `a_scale` and `offsets`, and tokens' `rows`."""

    a: Tensor
    a_scale: Tensor
    offsets: Tensor
    rows: Tensor


def _no_tokens(x: Tensor, x_scale: Tensor | None, ids: Tensor, *others: object) -> bool:
    if ids.numel() == 0:
        offsets = others[3]
        assert isinstance(offsets, Tensor)
        offsets.zero_()
    return ids.numel() == 0


permute_op = register(
    "moe_permute(Tensor x, Tensor? x_scale, Tensor topk_ids, Tensor? expert_map, Tensor(a!) a, "
    "Tensor(b!) a_scale, Tensor(c!) offsets, Tensor(d!) rows, bool power_of_two) -> ()",
    check=checks.permute,
    contract=lambda x, x_scale, topk_ids, expert_map, a, a_scale, offsets, *_: contracts.permute(
        x_scale, topk_ids, expert_map, offsets.shape[0] - 1
    ),
    empty=_no_tokens,
    reference=reference.permute,
    cuda="moe_fp8.ops.moe.cuda:permute",
)


def moe_permute(
    x: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    x_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    power_of_two: bool = False,
    out: Permuted | None = None,
) -> Permuted:
    """Copy each token to a row for each of its experts; the rows of an expert follow one another.

    x: bf16 `[T, K]`, which is quantized as by `quantize_fp8`, or float8_e4m3fn with x_scale; K is a positive
    multiple of 128. Rows are contiguous in themselves, 16-byte aligned, and any multiple of 16 bytes apart.
    x_scale: fp32 `[T, K/128]` of any strides, for FP8 x.
    topk_ids: int32 or int64 `[T, k]`, 1 <= k <= 512: the experts of each token. Its rows are contiguous, any
    distance apart. An id below 0 is no expert.
    num_experts: experts of this rank, 1 to 1024. expert_map: int32 `[E]`, contiguous, on x's device: id ->
    the number of the expert on this rank, or -1 if another rank has it; None if ids are these numbers
    themselves. Ids and numbers that are too large count as no expert.
    power_of_two: round scales of bf16 x up to powers of two.
    out: tensors to write to, as returned, or None. `a` may have more rows than T * k. Scales of another
    stride take two more kernels.

    Returns a float8_e4m3fn `[T * k, K]`, contiguous; a_scale fp32 `[T * k, K/128]`, MN-major; offsets int32
    `[num_experts + 1]`: expert e has the rows offsets[e] to offsets[e + 1], in the order of tokens, then of
    their places; rows int32 `[T, k]`: the row of each place, -1 for no expert. `a`, `a_scale` and `offsets`
    are operands of `grouped_gemm_fp8_contiguous`; rows from offsets[num_experts] on keep their values.

    The order is that of the arguments, so the same call gives the same bits. Launches one kernel; no host
    synchronisation; safe to capture: a replay reads ids anew. T = 0 returns at once. Raises ArgumentError;
    in checked mode ContractError naming the token whose scales are NaN or infinite.
    """
    if x.dim() != 2 or topk_ids.dim() != 2:
        arguments.rank("moe_permute", "x", x, "[T, K]", 2)
        arguments.rank("moe_permute", "topk_ids", topk_ids, "[T, k]", 2)
    if out is None:
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ArgumentError("moe_permute", "num_experts", f"1 to {MAX_EXPERTS}", num_experts)
        rows, k = topk_ids.numel(), x.shape[1]
        out = Permuted(
            torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device),
            empty_mn_major((rows, k // 128), x),
            torch.empty(num_experts + 1, dtype=torch.int32, device=x.device),
            torch.empty(topk_ids.shape, dtype=torch.int32, device=x.device),
        )
    elif out.offsets.shape != (num_experts + 1,):
        raise ArgumentError("moe_permute", "offsets", f"[{num_experts + 1}]", list(out.offsets.shape))
    permute_op(x, x_scale, topk_ids, expert_map, *out, power_of_two)
    return out


combine_op = register(
    "moe_combine(Tensor y, Tensor rows, Tensor? weights, Tensor(a!) out) -> ()",
    check=checks.combine,
    contract=lambda y, rows, *_: contracts.combine(y, rows),
    empty=lambda y, rows, weights, out: out.numel() == 0,
    reference=reference.combine,
    cuda="moe_fp8.ops.moe.cuda:combine",
)


def moe_combine(
    y: Tensor, rows: Tensor, weights: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows of y, times the router's weights.

    y: bf16 `[R, N]`, N a positive multiple of 8; rows as of x in `moe_permute`. rows: int32 `[T, k]`,
    contiguous, as `moe_permute` returns them: the rows of y for each token, below R; below 0 for none.
    weights: fp32 `[T, k]`, rows contiguous and any distance apart, or None if every weight is 1.
    out: bf16 `[T, N]` or None; its rows are contiguous, a multiple of 16 bytes apart, and do not overlap.

    Returns out[t] = sum over j of weights[t, j] * y[rows[t, j]], added in fp32 in the order of j and rounded
    once; a token without rows gets 0. Launches one kernel; no host synchronisation; safe to capture. Raises
    ArgumentError; in checked mode ContractError naming the token with a row past y.
    """
    if out is None:
        if y.dim() != 2 or rows.dim() != 2:
            arguments.rank("moe_combine", "y", y, "[R, N]", 2)
            arguments.rank("moe_combine", "rows", rows, "[T, k]", 2)
        out = torch.empty((rows.shape[0], y.shape[1]), dtype=y.dtype, device=y.device)
    combine_op(y, rows, weights, out)
    return out
