"""Cases of class repetition for the ops around the experts, alone and as a whole layer."""

from __future__ import annotations

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


def permute(shape: MoeShape, in_fp8: bool = False) -> Work:
    """The output holds each place's row of FP8 bytes, sorted by expert, then all scales."""
    x, ids = _hidden(shape), _ids(shape)
    scale = None
    source = x
    if in_fp8:
        source, scale = moe_fp8.quantize_fp8(x)
    rows, k = ids.numel(), shape.hidden
    values = rows * k
    # The pitch of the scales is a multiple of 4, so that some of them are not written.
    pitch = -(-rows // 4) * 4
    defined = torch.ones(values + pitch * (k // 128) * 4, device=inputs.DEVICE, dtype=torch.bool)
    defined[values:].view(k // 128, pitch, 4)[:, rows:] = False
    offsets = torch.empty(shape.num_experts + 1, device=inputs.DEVICE, dtype=torch.int32)
    places = torch.empty_like(ids, dtype=torch.int32)

    def call(out: Tensor) -> None:
        a = out[:values].view(torch.float8_e4m3fn).view(rows, k)
        a_scale = out[values:].view(torch.float32).view(k // 128, pitch).T[:rows]
        made = moe_fp8.Permuted(a, a_scale, offsets, places)
        moe_fp8.moe_permute(source, ids, num_experts=shape.num_experts, x_scale=scale, out=made)

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


def layer(shape: MoeShape) -> Work:
    """Five launches that share two workspaces, as the plug-in for vLLM makes them."""
    x, ids = _hidden(shape), _ids(shape)
    w13, w13_scale = inputs.weights(2 * shape.intermediate, shape.hidden, shape.num_experts)
    w2, w2_scale = inputs.weights(shape.hidden, shape.intermediate, shape.num_experts)
    weights = torch.rand(ids.shape, device=inputs.DEVICE)
    rows, wide = ids.numel(), max(2 * shape.intermediate, shape.hidden)
    fp8 = torch.empty(rows * wide, device=inputs.DEVICE, dtype=torch.float8_e4m3fn)
    bf16 = torch.empty(rows * wide, device=inputs.DEVICE, dtype=torch.bfloat16)
    made = moe_fp8.moe_permute(x, ids, num_experts=shape.num_experts)
    made = made._replace(a=fp8[: rows * shape.hidden].view(rows, shape.hidden))
    first = bf16[: rows * 2 * shape.intermediate].view(rows, -1)
    second = bf16[: rows * shape.hidden].view(rows, -1)
    values = fp8[: rows * shape.intermediate].view(1, rows, -1)
    _, scales = moe_fp8.silu_mul_quantize(first.zero_()[None], masked_m=made.offsets[-1:])

    def call(out: Tensor) -> None:
        moe_fp8.moe_permute(x, ids, num_experts=shape.num_experts, out=made)
        moe_fp8.grouped_gemm_fp8_contiguous(
            made.a, made.a_scale, w13, w13_scale, offsets=made.offsets, out=first
        )
        moe_fp8.silu_mul_quantize(first[None], masked_m=made.offsets[-1:], rounded=True, out=(values, scales))
        moe_fp8.grouped_gemm_fp8_contiguous(
            values[0], scales[0], w2, w2_scale, offsets=made.offsets, out=second
        )
        moe_fp8.moe_combine(second, made.rows, weights, out=out)

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
    Case("moe_combine", MoeShape(64, **_QWEN), combine),
    Case("moe_combine", MoeShape(2048, **_DEEPSEEK), combine),
    Case("route_topk", MoeShape(64, **_QWEN), route),
    Case("route_topk", MoeShape(1, **_ROUTER), route, {"groups": 8}),
    Case("route_topk", MoeShape(4096, **_ROUTER), route, {"groups": 8}),
    Case("moe layer", MoeShape(1, **_QWEN), layer),
    Case("moe layer", MoeShape(64, **_QWEN), layer),
    Case("moe layer", MoeShape(16, **_DEEPSEEK), layer),
    Case("moe layer", MoeShape(1024, **_QWEN), layer),
]
