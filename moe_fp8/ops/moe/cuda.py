"""CUDA launches of the ops around the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops import launch, scales
from moe_fp8.ops.arguments import IN_DTYPES
from moe_fp8.ops.parameters import Prepared, Tiled, prepared
from moe_fp8.params import GEMM_SILU_MUL, MOE_COMBINE, MOE_PERMUTE, ROUTE_TOPK
from moe_fp8.problems import GemmSiluMulProblem, MoeCombineProblem, MoePermuteProblem, RouteTopkProblem
from moe_fp8.specs import select_gemm_silu_mul, select_moe_combine, select_moe_permute, select_route_topk


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
) -> Prepared:
    """x [T,K] -> a [R,K], a_scale [R,K/128], offsets [E+1], rows [T,k]."""
    (tokens, topk), k, num_experts = topk_ids.shape, x.shape[1], offsets.shape[0] - 1
    in_dtype = IN_DTYPES.get(x.dtype)
    wide = topk_ids.dtype is torch.int64
    chosen = select_moe_permute(
        MoePermuteProblem(tokens, topk, k, in_dtype, power_of_two, wide, launch.num_sms(x.get_device()))
    )
    return prepared(
        MOE_PERMUTE,
        chosen.spec,
        chosen.grid,
        x,
        x_scale,
        topk_ids,
        expert_map,
        a,
        a_scale,
        offsets,
        rows,
        x.stride(0),
        0 if x_scale is None else x_scale.stride(0),
        0 if x_scale is None else x_scale.stride(1),
        topk_ids.stride(0),
        scales.pitch(a_scale),
        tokens,
        topk,
        k,
        num_experts,
        num_experts if expert_map is None else expert_map.shape[0],
        *chosen.config,
    )


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
) -> Prepared:
    """a [M,K], interleaved b [E,2I,K] -> q [M,I], scale [M,I/128]."""
    (m, k), (num_experts, n, _) = a.shape, b.shape
    num_sms = launch.num_sms(a.get_device())
    problem = GemmSiluMulProblem(m, n, k, num_experts, expected_m, power_of_two, rounded, num_sms)
    chosen = select_gemm_silu_mul(problem)
    config = chosen.config
    return prepared(
        GEMM_SILU_MUL,
        chosen.spec,
        chosen.grid,
        Tiled(a, "uint8", (k, m), (k,), (128, config.token_box), l2_promotion=128),
        Tiled(a_scale, "float32", (m, k // 128), (scales.pitch(a_scale) * 4,), (config.block_m, 1), 0),
        Tiled(b, "uint8", (k, n * num_experts), (k,), (128, config.weight_box), l2_promotion=128),
        None,
        q,
        b_scale,
        offsets,
        n // 2,
        m,
        n,
        k,
        num_experts,
        False,
        float("inf") if limit is None else limit,
        scale,
        scales.pitch(scale),
    )


def combine(y: Tensor, rows: Tensor, weights: Tensor | None, out: Tensor) -> Prepared:
    """y [R,N], rows [T,k], weights [T,k] or None -> out [T,N]."""
    (tokens, topk), n = rows.shape, y.shape[1]
    chosen = select_moe_combine(MoeCombineProblem(tokens, topk, n, launch.num_sms(y.get_device())))
    return prepared(
        MOE_COMBINE,
        chosen.spec,
        chosen.grid,
        y,
        rows,
        weights,
        out,
        y.stride(0),
        0 if weights is None else weights.stride(0),
        out.stride(0),
        tokens,
        topk,
        n,
        y.shape[0],
    )


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
    chosen = select_route_topk(RouteTopkProblem(tokens, num_experts, topk, IN_DTYPES[logits.dtype], sms))
    return prepared(
        ROUTE_TOPK,
        chosen.spec,
        chosen.grid,
        logits,
        correction_bias,
        weights,
        ids,
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
