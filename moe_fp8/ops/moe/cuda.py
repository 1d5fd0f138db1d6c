"""CUDA launches of the ops around the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops import launch, registry, scales
from moe_fp8.ops.launch import Prepared
from moe_fp8.params import MOE_COMBINE, MOE_PERMUTE, ROUTE_TOPK
from moe_fp8.problems import MoeCombineProblem, MoePermuteProblem, RouteTopkProblem
from moe_fp8.specs import select_moe_combine, select_moe_permute, select_route_topk


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
) -> Prepared | None:
    """x [T,K] -> a [R,K], a_scale [R,K/128], offsets [E+1], rows [T,k].

    If `a_scale` is not MN-major, MN-major scales are made and copied to it; then the result is None.
    """
    pitch = scales.pitch(a_scale)
    if pitch == 0:
        # to_mn_major copies the scales, so that rows that are not written keep their values.
        padded = scales.to_mn_major(a_scale)
        run = registry.OPS["moe_permute"].run
        run(x, x_scale, topk_ids, expert_map, a, padded, offsets, rows, power_of_two)
        a_scale.copy_(padded)
        return None
    (tokens, topk), k, num_experts = topk_ids.shape, x.shape[1], offsets.shape[0] - 1
    in_dtype = launch.IN_DTYPES.get(x.dtype)
    wide = topk_ids.dtype is torch.int64
    chosen = select_moe_permute(
        MoePermuteProblem(tokens, topk, k, in_dtype, power_of_two, wide, launch.num_sms(x.get_device()))
    )
    block = launch.new_block(MOE_PERMUTE)
    MOE_PERMUTE.pack_into(
        block.buffer,
        0,
        x.data_ptr(),
        0 if x_scale is None else x_scale.data_ptr(),
        topk_ids.data_ptr(),
        0 if expert_map is None else expert_map.data_ptr(),
        a.data_ptr(),
        a_scale.data_ptr(),
        offsets.data_ptr(),
        rows.data_ptr(),
        x.stride(0),
        0 if x_scale is None else x_scale.stride(0),
        0 if x_scale is None else x_scale.stride(1),
        topk_ids.stride(0),
        pitch,
        tokens,
        topk,
        k,
        num_experts,
        num_experts if expert_map is None else expert_map.shape[0],
        *chosen.config,
    )
    return chosen.spec, chosen.grid, block


def combine(y: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> Prepared:
    """y [R,N], rows [T,k], weights [T,k] or None -> out [T,N]."""
    (tokens, topk), n = rows.shape, y.shape[1]
    chosen = select_moe_combine(MoeCombineProblem(tokens, topk, n, launch.num_sms(y.get_device())))
    block = launch.new_block(MOE_COMBINE)
    MOE_COMBINE.pack_into(
        block.buffer,
        0,
        y.data_ptr(),
        rows.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        out.data_ptr(),
        y.stride(0),
        0 if weights is None else weights.stride(0),
        out.stride(0),
        tokens,
        topk,
        n,
    )
    return chosen.spec, chosen.grid, block


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
) -> Prepared:
    """logits [T,E], correction_bias [E] or None -> weights [T,k], ids [T,k]."""
    (tokens, num_experts), topk = logits.shape, ids.shape[1]
    sms = launch.num_sms(logits.get_device())
    chosen = select_route_topk(
        RouteTopkProblem(tokens, num_experts, topk, launch.IN_DTYPES[logits.dtype], sms)
    )
    block = launch.new_block(ROUTE_TOPK)
    ROUTE_TOPK.pack_into(
        block.buffer,
        0,
        logits.data_ptr(),
        0 if correction_bias is None else correction_bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        logits.stride(0),
        weights.stride(0),
        ids.stride(0),
        tokens,
        num_experts,
        topk,
        num_expert_group,
        topk_group,
        scoring == "softmax",
        renormalize,
        ids.dtype is torch.int64,
        scaling_factor,
    )
    return chosen.spec, chosen.grid, block
