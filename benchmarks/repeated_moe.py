"""Cases of class repetition for the ops around the experts, alone and as a whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .repetition import Case, Work


@dataclass(frozen=True)
class MoeShape:
    """The experts of a layer on one rank: `tokens` tokens of `hidden` values, `topk` experts for each."""

    tokens: int
    topk: int
    num_experts: int
    hidden: int
    intermediate: int


def _ids(shape: MoeShape) -> Tensor:
    """Distinct experts for each token, drawn uniformly; int32 `[tokens, topk]`."""
    scores = torch.rand(shape.tokens, shape.num_experts, device=inputs.DEVICE)
    return scores.topk(shape.topk, dim=1).indices.int()


def _quantized(rows: int, k: int) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Bytes for FP8 `[rows, k]` and its scales behind: which bytes are written, and both as views of them."""
    values = rows * k
    # The pitch of the scales is a multiple of 4, so that some of them are not written.
    pitch = -(-rows // 4) * 4
    defined = torch.ones(values + pitch * (k // 128) * 4, device=inputs.DEVICE, dtype=torch.bool)
    defined[values:].view(k // 128, pitch, 4)[:, rows:] = False

    def views(out: Tensor) -> tuple[Tensor, Tensor]:
        q = out[:values].view(torch.float8_e4m3fn).view(rows, k)
        return q, out[values:].view(torch.float32).view(k // 128, pitch).T[:rows]

    return defined, views


def permute(shape: MoeShape, in_fp8: bool = False) -> Work:
    """The output holds each place's row of FP8 bytes, sorted by expert, then all scales."""
    x, ids = _hidden(shape), _ids(shape)
    scale = None
    source = x
    if in_fp8:
        source, scale = moe_fp8.quantize_fp8(x)
    defined, views = _quantized(ids.numel(), shape.hidden)
    offsets = torch.empty(shape.num_experts + 1, device=inputs.DEVICE, dtype=torch.int32)
    places = torch.empty_like(ids, dtype=torch.int32)

    def call(out: Tensor) -> None:
        made = moe_fp8.Permuted(*views(out), offsets, places)
        moe_fp8.moe_permute(source, ids, num_experts=shape.num_experts, x_scale=scale, out=made)

    return Work(call, (defined.numel(),), torch.uint8, inputs.DEVICE, defined)


def gemm_silu_mul(shape: MoeShape, power_of_two: bool = False, rounded: bool = False) -> Work:
    """The output holds the FP8 bytes of all rows, then all scales."""
    permuted = moe_fp8.moe_permute(_hidden(shape), _ids(shape), num_experts=shape.num_experts)
    w13, w13_scale = inputs.weights(2 * shape.intermediate, shape.hidden, shape.num_experts)
    w13 = moe_fp8.interleave_gate_up(w13)
    defined, views = _quantized(permuted.a.shape[0], shape.intermediate)

    def call(out: Tensor) -> None:
        moe_fp8.grouped_gemm_silu_mul_fp8(
            permuted.a, permuted.a_scale, w13, w13_scale, offsets=permuted.offsets,
            power_of_two=power_of_two, rounded=rounded, out=views(out),
        )  # fmt: skip

    return Work(call, (defined.numel(),), torch.uint8, inputs.DEVICE, defined)


def combine(shape: MoeShape) -> Work:
    ids = _ids(shape)
    places = moe_fp8.moe_permute(_hidden(shape), ids, num_experts=shape.num_experts).rows
    y = torch.randn(ids.numel(), shape.hidden, device=inputs.DEVICE).bfloat16()
    weights = torch.rand(ids.shape, device=inputs.DEVICE)

    def call(out: Tensor) -> None:
        moe_fp8.moe_combine(y, places, weights, out=out)

    return Work(call, (shape.tokens, shape.hidden), torch.bfloat16, inputs.DEVICE)


def route(shape: MoeShape, groups: int = 1) -> Work:
    """The output holds all weights, then all ids. Half of the groups stay, if there are some."""
    logits = torch.randn(shape.tokens, shape.num_experts, device=inputs.DEVICE).bfloat16()
    bias = torch.rand(shape.num_experts, device=inputs.DEVICE) if groups > 1 else None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if groups > 1 else "softmax"

    def call(out: Tensor) -> None:
        moe_fp8.route_topk(
            logits,
            shape.topk,
            scoring=scoring,
            correction_bias=bias,
            num_expert_group=groups,
            topk_group=-(-groups // 2),
            out=(out[0], out[1].view(torch.int32)),
        )

    return Work(call, (2, shape.tokens, shape.topk), torch.float32, inputs.DEVICE)


def layer(shape: MoeShape, interleaved: bool = False) -> Work:
    """Five launches that share a workspace, or four launches with `interleaved` weights."""
    x, ids = _hidden(shape), _ids(shape)
    w13, w13_scale = inputs.weights(2 * shape.intermediate, shape.hidden, shape.num_experts)
    w2 = inputs.weights(shape.hidden, shape.intermediate, shape.num_experts)
    if interleaved:
        w13 = moe_fp8.interleave_gate_up(w13)
    weights = torch.rand(ids.shape, device=inputs.DEVICE)
    num_bytes = moe_fp8.moe_workspace_bytes(
        num_tokens=shape.tokens, topk=shape.topk, num_experts=shape.num_experts,
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, interleaved=interleaved,
    )  # fmt: skip
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=inputs.DEVICE)

    def call(out: Tensor) -> None:
        moe_fp8.fused_moe(
            x, ids, weights, w13, w13_scale, *w2, rounded=True, workspace=workspace, out=out,
            interleaved=interleaved,
        )  # fmt: skip

    return Work(call, (shape.tokens, shape.hidden), torch.bfloat16, inputs.DEVICE)


def _hidden(shape: MoeShape) -> Tensor:
    return torch.randn(shape.tokens, shape.hidden, device=inputs.DEVICE).bfloat16()


_QWEN = {"topk": 8, "num_experts": 128, "hidden": 2048, "intermediate": 768}
_DEEPSEEK = {"topk": 8, "num_experts": 32, "hidden": 7168, "intermediate": 2048}
#: All ranks' experts.
_ROUTER = _DEEPSEEK | {"num_experts": 256}

CASES = [
    Case("moe_permute", MoeShape(64, **_QWEN), permute),
    Case("moe_permute", MoeShape(4096, **_QWEN), permute, {"in_fp8": True}),
    Case("moe_permute", MoeShape(1, **_DEEPSEEK), permute),
    # One case for each tile: 8, 16, 32 and 128 rows.
    Case("grouped_gemm_silu_mul_fp8", MoeShape(16, **_DEEPSEEK), gemm_silu_mul, {"rounded": True}),
    Case("grouped_gemm_silu_mul_fp8", MoeShape(128, **_QWEN), gemm_silu_mul),
    Case("grouped_gemm_silu_mul_fp8", MoeShape(64, **_DEEPSEEK), gemm_silu_mul, {"power_of_two": True}),
    Case("grouped_gemm_silu_mul_fp8", MoeShape(1024, **_QWEN), gemm_silu_mul, {"rounded": True}),
    Case("moe_combine", MoeShape(64, **_QWEN), combine),
    Case("moe_combine", MoeShape(2048, **_DEEPSEEK), combine),
    Case("route_topk", MoeShape(64, **_QWEN), route),
    Case("route_topk", MoeShape(1, **_ROUTER), route, {"groups": 8}),
    Case("route_topk", MoeShape(4096, **_ROUTER), route, {"groups": 8}),
    Case("fused_moe", MoeShape(1, **_QWEN), layer),
    Case("fused_moe", MoeShape(64, **_QWEN), layer),
    Case("fused_moe", MoeShape(16, **_DEEPSEEK), layer),
    Case("fused_moe", MoeShape(1024, **_QWEN), layer),
    Case("fused_moe", MoeShape(64, **_QWEN), layer, {"interleaved": True}),
    Case("fused_moe", MoeShape(1024, **_QWEN), layer, {"interleaved": True}),
]
