"""The choice of each token's experts, rows of tokens sorted by expert, and the weighted sum of the results.

The layer is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): a token's output is the sum of its
experts' outputs, each times the router's weight.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.limits import MAX_EXPERTS, MAX_ROUTED_EXPERTS
from moe_fp8.ops import arguments
from moe_fp8.ops.modes import launches
from moe_fp8.ops.moe import checks, contracts, reference
from moe_fp8.ops.registry import register
from moe_fp8.ops.scales import empty_mn_major


class Permuted(NamedTuple):
    """The result of `moe_permute`: the experts' inputs `a`, `a_scale` and `offsets`, and tokens' `rows`."""

    a: Tensor
    a_scale: Tensor
    offsets: Tensor
    rows: Tensor


def _no_tokens(topk_ids: Tensor, offsets: Tensor) -> bool:
    """Without tokens, no kernel runs, and no expert has rows."""
    if topk_ids.numel() == 0 and launches(offsets):
        offsets.zero_()
    return topk_ids.numel() == 0


permute_op = register(
    "moe_permute(Tensor x, Tensor? x_scale, Tensor topk_ids, Tensor? expert_map, Tensor(a!) a, "
    "Tensor(b!) a_scale, Tensor(c!) offsets, Tensor(d!) rows, bool power_of_two) -> ()",
    check=checks.permute,
    contract=lambda x, x_scale, topk_ids, expert_map, a, a_scale, offsets, *_: contracts.permute(
        x_scale, topk_ids, expert_map, offsets.shape[0] - 1
    ),
    empty=lambda x, x_scale, topk_ids, expert_map, a, a_scale, offsets, *_: _no_tokens(topk_ids, offsets),
    reference=reference.permute,
    cuda="moe_fp8.ops.moe.cuda:permute",
    mn_major="a_scale",
)


def moe_permute(
    x: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    x_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    power_of_two: bool = False,
    out: Permuted | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
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
    synchronization; safe to capture: a replay reads ids anew. T = 0 returns at once. Raises ArgumentError;
    in checked mode ContractError naming the token whose scales are NaN or infinite.
    """
    if x.dim() != 2 or topk_ids.dim() != 2:
        arguments.rank("moe_permute", "x", x, "[T, K]", 2)
        arguments.rank("moe_permute", "topk_ids", topk_ids, "[T, k]", 2)
    num_experts = arguments.integer("moe_permute", "num_experts", num_experts)
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
    else:
        if not isinstance(out, Permuted):
            arguments.outputs("moe_permute", out, *Permuted._fields)
            out = Permuted(*out)
        if out.offsets.shape != (num_experts + 1,):
            raise ArgumentError("moe_permute", "offsets", f"[{num_experts + 1}]", list(out.offsets.shape))
    a, a_scale, offsets, row_of_place = out
    permute_op(x, x_scale, topk_ids, expert_map, a, a_scale, offsets, row_of_place, power_of_two)
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

    y: bf16 `[R, N]`, N a positive multiple of 8; rows as those of x in `moe_permute`. rows: int32 `[T, k]`,
    contiguous, as `moe_permute` returns them: the rows of y for each token; a row below 0, or one that y does
    not have, is left out.
    weights: fp32 `[T, k]`, rows contiguous and any distance apart, or None if every weight is 1.
    out: bf16 `[T, N]` or None; 16-byte aligned; its rows are contiguous, a multiple of 16 bytes apart, and do
    not overlap.

    Returns out[t] = sum over j of weights[t, j] * y[rows[t, j]], added in fp32 in the order of j and rounded
    once; a token without rows gets 0. Launches one kernel; no host synchronization; safe to capture. Raises
    ArgumentError; in checked mode ContractError naming the token with a row past y.
    """
    if out is None:
        if y.dim() != 2 or rows.dim() != 2:
            arguments.rank("moe_combine", "y", y, "[R, N]", 2)
            arguments.rank("moe_combine", "rows", rows, "[T, k]", 2)
        out = torch.empty((rows.shape[0], y.shape[1]), dtype=y.dtype, device=y.device)
    combine_op(y, rows, weights, out)
    return out


route_op = register(
    "route_topk(Tensor logits, Tensor? correction_bias, Tensor(a!) weights, Tensor(b!) ids, str scoring, "
    "int num_expert_group, int topk_group, bool renormalize, float scaling_factor) -> ()",
    check=checks.route,
    empty=lambda logits, *_: logits.shape[0] == 0,
    reference=reference.route,
    cuda="moe_fp8.ops.moe.cuda:route",
)


def route_topk(
    logits: Tensor,
    topk: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    correction_bias: Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int | None = None,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    ids_dtype: torch.dtype = torch.int32,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and their weights, from the router's logits.

    logits: bf16, fp16 or fp32 `[T, E]`, 1 <= E <= 1024; rows are contiguous, any distance apart, 0 included.
    topk: experts of a token, 1 to 32, at most those of the groups that are kept.
    scoring: "softmax" over all experts (Qwen3-MoE), or "sigmoid" (DeepSeek-V3, GLM-4.5, MiniMax-M2), in fp32.
    correction_bias: fp32 `[E]`, contiguous, on the device of logits, or None. It is added to the scores for
    the choice, and not to the weights.
    num_expert_group, topk_group: the experts form so many groups of neighbours, at most 32, of which each
    token keeps `topk_group`; None keeps all. The sum of a group's two greatest scores, with bias, counts.
    renormalize: divide each weight by the sum of the token's weights plus 1e-20.
    scaling_factor: multiplies each weight at the end.
    ids_dtype: int32 or int64, for ids that are allocated here; ids in `out` have their own dtype.
    out: tensors `(weights, ids)` to write to, as returned, or None. Their rows are contiguous, at any
    distance of a row or more.

    Returns `(weights, ids)`, both `[T, topk]`: the chosen experts, and their scores without bias in fp32.
    A token's experts come in descending order of score plus bias, rounded to fp32. Without bias and with all
    groups they come in descending order of logits, so that the ids do not depend on rounding. Among equal
    experts, and groups, the smaller number comes first. The same logits give the same bits in any batch.
    The CUDA kernel's sigmoid, softmax and sums may differ from the CPU's in their last bits, and therefore
    ids may differ where scores with bias differ by so little.

    An infinite logit counts as the largest finite number of its sign, and NaN as the lowest; the sum of a
    score and the bias does too. So ids are always distinct and from 0 to E - 1, and weights are finite, if
    scaling_factor is.

    Launches one kernel; no host synchronization; safe to capture. T = 0 returns at once. Raises
    ArgumentError.
    """
    if out is None:
        arguments.rank("route_topk", "logits", logits, "[T, E]", 2)
        topk = arguments.integer("route_topk", "topk", topk)
        if not 1 <= topk <= MAX_ROUTED_EXPERTS:
            raise ArgumentError("route_topk", "topk", f"1 to {MAX_ROUTED_EXPERTS}", topk)
        if ids_dtype is not torch.int32 and ids_dtype is not torch.int64:
            raise ArgumentError("route_topk", "ids_dtype", "torch.int32 or torch.int64", ids_dtype)
        shape = logits.shape[0], topk
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        out = weights, torch.empty(shape, dtype=ids_dtype, device=logits.device)
    else:
        arguments.outputs("route_topk", out, "weights", "ids")
        if out[1].shape[1:] != (topk,):
            raise ArgumentError("route_topk", "ids", f"[T, {topk}]", list(out[1].shape))
    num_expert_group = arguments.integer("route_topk", "num_expert_group", num_expert_group)
    kept = (
        num_expert_group if topk_group is None else arguments.integer("route_topk", "topk_group", topk_group)
    )
    route_op(logits, correction_bias, *out, scoring, num_expert_group, kept, renormalize, scaling_factor)
    return out
