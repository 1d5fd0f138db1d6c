"""The definition of the ops around the experts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops.quantize import reference as quantizing


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
    experts = topk_ids.reshape(-1).long()
    if expert_map is not None:
        known = (experts >= 0) & (experts < expert_map.shape[0])
        experts = torch.where(known, expert_map.long()[torch.where(known, experts, 0)], -1)
    local = (experts >= 0) & (experts < num_experts)
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
        scales = torch.empty((x.shape[0], x.shape[1] // 128))
        quantizing.quantize(x, values, scales, power_of_two)
    count = places.shape[0]
    # torch on a CPU gathers no FP8.
    a[:count] = values.view(torch.uint8)[tokens].view(torch.float8_e4m3fn)
    a_scale[:count] = scales[tokens]


def combine(y: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """out[t] = sum over j of weights[t, j] * y[rows[t, j]] in fp32."""
    total = torch.zeros(out.shape, dtype=torch.float32)
    for j in range(rows.shape[1]):
        given = rows[:, j] >= 0
        weight = given.float() if weights is None else torch.where(given, weights[:, j], 0.0)
        picked = y[torch.where(given, rows[:, j], 0).long()].float()
        total += weight[:, None] * torch.where(given[:, None], picked, 0.0)
    out.copy_(total)
