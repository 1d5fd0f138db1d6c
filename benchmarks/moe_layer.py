"""Class moe_layer: the routed experts of a layer from tokens and ids to their sums, beside vLLM's own.

The floor of a shape is the time that reading the weights of the experts in use takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

import moe_fp8

from . import inputs, vllm_layer
from .compare import Contestant, Session
from .peer import DeepGemm
from .results import CEILINGS, Row, four_digits
from .shapes import MOE_LAYER, MoeLayerShape
from .timing import Call

#: Three quantizations of activations to FP8 make a relative error of about 5e-2.
TOLERANCE = 8e-2

#: Routings that a graph goes through, so that small batches do not find their experts in the L2 cache.
_SETS = 8

#: Tokens whose result is checked.
_CHECKED = 64


@dataclass
class Weights:
    """The local experts of a model, and the map from ids to them."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    expert_map: Tensor | None

    @cached_property
    def interleaved(self) -> Tensor:
        """w13 for the GEMM that ends in SiLU."""
        return moe_fp8.interleave_gate_up(self.w13)

    @classmethod
    def of(cls, shape: MoeLayerShape) -> Weights:
        w13 = inputs.weights(2 * shape.intermediate, shape.hidden, shape.local_experts)
        w2 = inputs.weights(shape.hidden, shape.intermediate, shape.local_experts)
        expert_map = None
        if shape.local_experts < shape.num_experts:
            expert_map = torch.full((shape.num_experts,), -1, device=inputs.DEVICE, dtype=torch.int32)
            expert_map[: shape.local_experts] = torch.arange(shape.local_experts, dtype=torch.int32)
        return cls(*w13, *w2, expert_map)

    def expected(self, x: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        """The layer in float64 on tokens that are not quantized."""
        total = torch.zeros(x.shape, device=x.device, dtype=torch.float64)
        for expert in range(self.w13.shape[0]):
            token, place = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                w13 = inputs.dequantize_blocks(self.w13[expert], self.w13_scale[expert])
                w2 = inputs.dequantize_blocks(self.w2[expert], self.w2_scale[expert])
                gate, up = (x[token].double() @ w13.t()).chunk(2, 1)
                y = torch.nn.functional.silu(gate) * up @ w2.t()
                total.index_add_(0, token, y * topk_weights[token, place, None].double())
        return total


def routed_ids(shape: MoeLayerShape, device: torch.device | str) -> Tensor:
    """Distinct experts for each token, int32: all equally likely, or the n-th with weight 1 / n (Zipf)."""
    scores = -torch.log(-torch.log(torch.rand(shape.tokens, shape.num_experts, device=device)))
    if shape.routing == "zipf":
        order = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(shape.num_experts))
        scores -= torch.log(order.to(device) + 1.0)
    return scores.topk(shape.topk, 1).indices.int()


def run_moe_layer(session: Session, peer: DeepGemm | None, step: int) -> None:
    """Time `fused_moe` beside the layer's five ops in vLLM; `peer` has no such layer."""
    made: tuple[MoeLayerShape, Weights] | None = None
    for terms, shape in session.shapes(step, MOE_LAYER, (), lambda commit: ()):
        model = replace(shape, tokens=0, routing="uniform")
        if made is None or made[0] != model:
            made = None
            torch.cuda.empty_cache()
            made = model, Weights.of(shape)
        _layer(session, shape, made[1], terms)


def _layer(session: Session, shape: MoeLayerShape, weights: Weights, terms: dict[str, object]) -> None:
    sets = []
    active = 0
    for _ in range(_SETS if shape.tokens <= 1024 else 2):
        x = torch.randn(shape.tokens, shape.hidden, device=inputs.DEVICE).bfloat16()
        ids = routed_ids(shape, inputs.DEVICE)
        sets.append((x, torch.rand(ids.shape, device=inputs.DEVICE), ids))
        active += int((ids.unique() < shape.local_experts).sum())
    expert_bytes = 3 * shape.hidden * shape.intermediate
    row = Row("moe_layer", terms, 0.0, nbytes=expert_bytes * active / len(sets))
    local = sum(int((ids < shape.local_experts).sum()) for _, _, ids in sets) / len(sets)
    row.flops = 2.0 * local * expert_bytes
    num_bytes = max(
        moe_fp8.moe_workspace_bytes(
            num_tokens=shape.tokens, topk=shape.topk, num_experts=shape.local_experts,
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, interleaved=interleaves,
        )
        for interleaves in (False, True)
    )  # fmt: skip
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=inputs.DEVICE)

    def ours(x: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        return moe_fp8.fused_moe(
            x, ids, topk_weights, weights.w13, weights.w13_scale, weights.w2, weights.w2_scale,
            expert_map=weights.expert_map, workspace=workspace,
        )  # fmt: skip

    interleaved = weights.interleaved

    def in_four(x: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        return moe_fp8.fused_moe(
            x, ids, topk_weights, interleaved, weights.w13_scale, weights.w2, weights.w2_scale,
            expert_map=weights.expert_map, workspace=workspace, interleaved=True,
        )  # fmt: skip

    layers: dict[str, vllm_layer.Layer] = {"moe_fp8": ours, "interleaved": in_four}
    layers |= vllm_layer.load(
        (weights.w13, weights.w13_scale, weights.w2, weights.w2_scale),
        shape.topk,
        shape.num_experts,
        weights.expert_map,
    )
    # The first set with an expert here, and its first tokens with an expert here: all other sums are zero.
    sets.sort(key=lambda one: not (one[2] < shape.local_experts).any())
    x, topk_weights, ids = sets[0]
    token = (ids < shape.local_experts).any(1).nonzero()[:_CHECKED, 0]
    expected = weights.expected(x[token], topk_weights[token], ids[token])
    contestants = []
    for name, layer in layers.items():

        def check(layer: vllm_layer.Layer = layer) -> float:
            # This memory is free at once and probably becomes the output, which is NaN if nobody writes it.
            torch.full_like(x, math.nan)
            out = layer(*sets[0])
            return inputs.relative_error(out[token], expected) if len(token) else float(out.abs().max())

        calls: list[Call] = [partial(layer, *given) for given in sets]
        contestants.append(Contestant(name, calls, check, aside=name == "interleaved"))
    if (ceiling := CEILINGS.get(str(session.results.environment["device"]))) is not None:
        row.notes["floor us"] = four_digits(row.nbytes / ceiling.read_gbs / 1e3)
    session.compare(row, contestants, -(-8 // len(sets)) * len(sets), TOLERANCE)
