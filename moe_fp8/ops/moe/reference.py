"""The definition of the ops around the experts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops.gemm import reference as gemms
from moe_fp8.ops.quantize import reference as quantizing


def experts_of(ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """The number on this rank of each id's expert, int64 of the shape of `ids`; -1 for no expert here."""
    experts = ids.long()
    if expert_map is not None:
        numbers = torch.nn.functional.pad(expert_map.long(), (0, 1), value=-1)  # the last: ids not in the map
        known = (experts >= 0) & (experts < expert_map.shape[0])
        experts = numbers[torch.where(known, experts, -1)]
    return torch.where((experts >= 0) & (experts < num_experts), experts, -1)


def permute(
    x: Tensor,
    x_scale: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    a: Tensor,
    a_scale: Tensor,
    offsets: Tensor,
    rows: Tensor,
    power_of_two: bool,
) -> None:
    """x [T,K] -> a fp8 [R,K] and a_scale [R,K/128], sorted by expert; offsets [E+1]; rows [T,k]."""
    num_experts = offsets.shape[0] - 1
    experts = experts_of(topk_ids.reshape(-1), expert_map, num_experts)
    local = experts >= 0
    counts = torch.bincount(experts[local], minlength=num_experts)
    offsets.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    places = torch.nonzero(local).reshape(-1)
    places = places[experts[places].argsort(stable=True)]
    of_place = torch.full_like(experts, -1)
    of_place[places] = torch.arange(places.shape[0])
    rows.copy_(of_place.view(rows.shape))
    tokens = places // topk_ids.shape[1]
    if x_scale is not None:
        values, scales = x, x_scale
    else:
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty((x.shape[0], x.shape[1] // 128), dtype=torch.float32)
        quantizing.quantize(x, values, scales, power_of_two)
    count = places.shape[0]
    # torch on a CPU gathers no FP8.
    a[:count] = values.view(torch.uint8)[tokens].view(torch.float8_e4m3fn)
    a_scale[:count] = scales[tokens]


def gemm_silu_mul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    expected_m: int | None,
    limit: float | None,
    power_of_two: bool,
    rounded: bool,
    q: Tensor,
    scale: Tensor,
) -> None:
    """`gemm_contiguous` with de-interleaved weights, rounded to bf16, then `silu_mul_quantize`."""
    num_experts, n, k = b.shape
    halves = b.view(torch.uint8).view(num_experts, n // 16, 2, 8, k).transpose(1, 2)
    weights = halves.reshape(b.shape).view(b.dtype)
    product = torch.zeros((a.shape[0], n), dtype=torch.bfloat16)
    gemms.gemm_contiguous("offsets", a, a_scale, weights, b_scale, offsets, product)
    # Rows of no expert keep their values.
    begin, end = offsets[[0, -1]].clamp(0, a.shape[0]).tolist()
    rows = slice(begin, max(begin, end))
    quantizing.silu_mul_quantize(product[rows], None, q[rows], scale[rows], power_of_two, limit, rounded)


def combine(y: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """out[t] = sum over j of weights[t, j] * y[rows[t, j]] in fp32."""
    total = torch.zeros(out.shape, dtype=torch.float32)
    for j in range(rows.shape[1]):
        given = (rows[:, j] >= 0) & (rows[:, j] < y.shape[0])
        weight = given.float() if weights is None else torch.where(given, weights[:, j], 0.0)
        picked = y[torch.where(given, rows[:, j], 0).long()].float() if y.shape[0] else total
        total += weight[:, None] * torch.where(given[:, None], picked, 0.0)
    out.copy_(total)


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    scoring: str,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    """weights [T,k] and ids [T,k] of the experts with the greatest scores, in descending order."""
    # Softmax over infinities is NaN; over the largest numbers it is not.
    logits = _finite(logits.float())
    # (torch.sigmoid rounds equal numbers differently at different places of a tensor.)
    scores = logits.softmax(dim=-1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
    in_groups = topk_group < num_expert_group
    choices = logits
    if in_groups or correction_bias is not None:
        choices = _finite(scores if correction_bias is None else scores + correction_bias)
    if in_groups:
        by_group = choices.view(logits.shape[0], num_expert_group, -1)
        sums = by_group.topk(2, dim=-1).values.sum(dim=-1)
        left_out = torch.ones_like(sums, dtype=torch.bool)
        left_out.scatter_(1, _greatest(sums, topk_group), False)
        choices = by_group.masked_fill(left_out[..., None], -torch.inf).view(logits.shape)
    chosen = _greatest(choices, ids.shape[1])
    picked = scores.gather(1, chosen)
    if renormalize:
        picked = picked / (picked.sum(dim=-1, keepdim=True) + 1e-20)
    ids.copy_(chosen)
    weights.copy_(picked * scaling_factor)


def _finite(values: Tensor) -> Tensor:
    """`values` with the nearest finite numbers in place of infinities, and the lowest in place of NaN."""
    limits = torch.finfo(values.dtype)
    return values.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)


def _greatest(values: Tensor, count: int) -> Tensor:
    """The columns of the `count` greatest values of each row, the smaller column first among equal values."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]
