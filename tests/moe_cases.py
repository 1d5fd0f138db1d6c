"""Random cases of moe_permute and moe_combine and checks of their results, for the CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fp8 import (
    Permuted,
    fused_moe,
    grouped_gemm_fp8_contiguous,
    interleave_gate_up,
    moe_combine,
    moe_permute,
    moe_workspace_bytes,
    quantize_fp8,
    quantize_fp8_blocks,
    silu_mul_quantize,
)
from moe_fp8.ops.gemm.reference import dequantize_blocks
from tests import cases

#: ||out - ref|| / ||ref|| of the layer against float64 on the same weights: three quantizations of
#: activations to FP8.
LAYER_TOLERANCE = 7e-2


@dataclass(frozen=True)
class Case:
    """`tokens` of `k` values, each for `topk` of `experts` on this rank, out of `experts * ranks` in all."""

    tokens: int
    topk: int
    experts: int
    k: int
    ranks: int = 1
    fp8: bool = False
    wide: bool = False
    power_of_two: bool = False
    missing: float = 0.0
    one_expert: bool = False

    def ids(self, seed: int = 0) -> Tensor:
        """Distinct experts for each token; some are -1."""
        gen = cases.generator(seed, "cpu")
        everything = self.experts * self.ranks
        if self.one_expert:
            ids = torch.zeros(self.tokens, self.topk, dtype=torch.int64)
        else:
            ids = torch.rand(self.tokens, everything, generator=gen).argsort(1)[:, : self.topk].contiguous()
        ids[torch.rand(ids.shape, generator=gen) < self.missing] = -1
        return ids if self.wide else ids.int()

    def expert_map(self) -> Tensor | None:
        """Every `ranks`-th expert is on this rank."""
        if self.ranks == 1:
            return None
        numbers = torch.full((self.experts * self.ranks,), -1, dtype=torch.int32)
        numbers[:: self.ranks] = torch.arange(self.experts, dtype=torch.int32)
        return numbers

    def hidden(self, seed: int = 0) -> Tensor:
        gen = cases.generator(seed, "cpu")
        return torch.randn(self.tokens, self.k, generator=gen).to(torch.bfloat16)


CASES = {
    "one token": Case(1, 8, 128, 256),
    "one expert each": Case(5, 1, 4, 128),
    "all to one expert": Case(70, 8, 16, 384, one_expert=True),
    "decode": Case(64, 8, 128, 2048, power_of_two=True),
    "decode, FP8": Case(64, 8, 128, 2048, fp8=True),
    "one rank of eight": Case(100, 8, 32, 512, ranks=8, wide=True),
    "one rank of eight, FP8": Case(100, 8, 32, 512, ranks=8, fp8=True),
    "missing ids": Case(33, 6, 60, 1536, missing=0.5, wide=True),
    "no local expert": Case(9, 2, 3, 256, missing=1.0),
    "many experts": Case(300, 8, 1024, 128),
    "more tokens than blocks": Case(1300, 8, 60, 256, fp8=True, wide=True),
    "prefill": Case(9000, 8, 128, 256),
}


def check(case: Case, device: str, seed: int = 0) -> None:
    """Permute, and sum what comes back, against plain indexing; the outputs begin as NaN."""
    x, ids, numbers = case.hidden(seed), case.ids(seed), case.expert_map()
    values, scales = quantize_fp8(x, power_of_two=case.power_of_two)
    source, source_scale = (values, scales.contiguous()) if case.fp8 else (x, None)
    rows = case.tokens * case.topk + 3
    out = Permuted(
        torch.full((rows, case.k), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.full((case.k // 128, -(-rows // 4) * 4), float("nan"), device=device).T[:rows],
        torch.full((case.experts + 1,), -7, dtype=torch.int32, device=device),
        torch.full(ids.shape, -7, dtype=torch.int32, device=device),
    )
    moved = [None if each is None else each.to(device) for each in (source, ids, source_scale, numbers)]
    given, given_ids, given_scale, given_map = moved
    assert given is not None and given_ids is not None
    moe_permute(
        given, given_ids, num_experts=case.experts, x_scale=given_scale, expert_map=given_map,
        power_of_two=case.power_of_two, out=out,
    )  # fmt: skip
    a, a_scale, offsets, places = (each.cpu() for each in out)
    check_places(case, ids, numbers, offsets, places)
    token = torch.arange(case.tokens)[:, None].expand(ids.shape)
    used = places >= 0
    expected = values.view(torch.uint8)[token[used]]
    assert torch.equal(a.view(torch.uint8)[places[used].long()], expected)
    assert torch.equal(a_scale[places[used].long()], scales[token[used]])
    count = int(offsets[-1])
    assert (a.view(torch.uint8)[count:] == 0x7F).all() and a_scale[count:].isnan().all()

    gen = cases.generator(seed + 1, "cpu")
    y = torch.randn(rows, case.k, generator=gen).to(torch.bfloat16)
    y[count:] = float("nan")
    weights = torch.rand(ids.shape, generator=gen)
    for given_weights in (weights, None):
        total = torch.full((case.tokens, case.k), float("nan"), dtype=torch.bfloat16, device=device)
        moved_weights = None if given_weights is None else given_weights.to(device)
        moe_combine(y.to(device), out.rows, moved_weights, out=total)
        expected = combined(y, places, given_weights)
        # The sum is fp32 and rounded once to bf16.
        torch.testing.assert_close(total.cpu().double(), expected, rtol=2**-8, atol=1e-5)


def check_places(case: Case, ids: Tensor, numbers: Tensor | None, offsets: Tensor, places: Tensor) -> None:
    """The rows are sorted by expert, then by token and place, without gaps."""
    flat = ids.long().reshape(-1)
    if numbers is not None:
        flat = torch.where(flat >= 0, numbers.long()[flat.clamp(min=0)], -1)
    order = [i for expert in range(case.experts) for i in (flat == expert).nonzero().reshape(-1).tolist()]
    expected = torch.full_like(flat, -1)
    expected[order] = torch.arange(len(order))
    assert torch.equal(places.reshape(-1).long(), expected)
    counts = torch.bincount(flat[flat >= 0], minlength=case.experts)
    assert torch.equal(offsets.long(), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def combined(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """The sum in float64."""
    total = torch.zeros(places.shape[0], y.shape[1], dtype=torch.float64)
    for j in range(places.shape[1]):
        used = places[:, j] >= 0
        weight = torch.ones(len(used)) if weights is None else weights[:, j]
        total[used] += y[places[used, j].long()].double() * weight[used, None].double()
    return total


@dataclass
class Layer:
    """Random weights of a case's experts, `width` wide, and its tokens' router weights."""

    case: Case
    width: int
    device: str
    limit: float | None = None
    rounded: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        gen, k, experts = cases.generator(7, self.device), self.case.k, self.case.experts
        w13 = torch.randn(experts, 2 * self.width, k, generator=gen, device=self.device) / k**0.5
        w2 = torch.randn(experts, k, self.width, generator=gen, device=self.device) / self.width**0.5
        self.w13, self.w13_scale = quantize_fp8_blocks(w13)
        self.given_w13 = interleave_gate_up(self.w13) if self.interleaved else self.w13
        self.w2, self.w2_scale = quantize_fp8_blocks(w2)
        map_ = self.case.expert_map()
        self.expert_map = None if map_ is None else map_.to(self.device)
        self.options = {"power_of_two": self.case.power_of_two, "limit": self.limit, "rounded": self.rounded}

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ids and weights."""
        gen = cases.generator(seed + 2, "cpu")
        weights = torch.rand(self.case.tokens, self.case.topk, generator=gen)
        x, ids = self.case.hidden(seed), self.case.ids(seed)
        return x.to(self.device), ids.to(self.device), weights.to(self.device)

    def workspace(self) -> Tensor:
        """A workspace full of NaN."""
        size = moe_workspace_bytes(
            num_tokens=self.case.tokens, topk=self.case.topk, num_experts=self.case.experts,
            hidden_size=self.case.k, intermediate_size=self.width, interleaved=self.interleaved,
        )  # fmt: skip
        return torch.full((size,), 0x7F, dtype=torch.uint8, device=self.device)

    def fused(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.full_like(x, float("nan")) if out is None else out
        x, x_scale = self._given(x)
        return fused_moe(
            x, ids, weights, self.given_w13, self.w13_scale, self.w2, self.w2_scale, x_scale=x_scale,
            expert_map=self.expert_map, workspace=workspace, out=out,
            interleaved=self.interleaved, **self.options,
        )  # fmt: skip

    def by_ops(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The five ops, each with memory of its own."""
        x, x_scale = self._given(x)
        permuted = moe_permute(
            x, ids, num_experts=self.case.experts, x_scale=x_scale, expert_map=self.expert_map,
            power_of_two=self.case.power_of_two,
        )  # fmt: skip
        offsets = permuted.offsets
        share = None if self.expert_map is None else -(-ids.numel() // self.expert_map.numel())
        hint = {"offsets": offsets, "expected_m": share}
        first = grouped_gemm_fp8_contiguous(permuted.a, permuted.a_scale, self.w13, self.w13_scale, **hint)
        values, scales = silu_mul_quantize(first[None], masked_m=offsets[-1:], **self.options)
        second = grouped_gemm_fp8_contiguous(values[0], scales[0], self.w2, self.w2_scale, **hint)
        return moe_combine(second, permuted.rows, weights)

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quantize_fp8(x, power_of_two=self.case.power_of_two) if self.case.fp8 else (x, None)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer in float64 on unquantized tokens."""
        number = torch.arange(self.case.experts, device=self.device)
        if self.expert_map is not None:
            number = torch.stack([(self.expert_map == e).nonzero()[0, 0] for e in range(self.case.experts)])
        total = torch.zeros(x.shape, dtype=torch.float64, device=self.device)
        for expert in range(self.case.experts):
            token, place = (ids == number[expert]).nonzero(as_tuple=True)
            if not len(token):
                continue
            w13 = dequantize_blocks(self.w13[expert], self.w13_scale[expert], cases.F64)
            w2 = dequantize_blocks(self.w2[expert], self.w2_scale[expert], cases.F64)
            gate, up = (x[token].double() @ w13.t()).chunk(2, dim=1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            y = (torch.nn.functional.silu(gate) * up) @ w2.t()
            total.index_add_(0, token, y * weights[token, place, None].double())
        return total


LAYERS: dict[str, tuple[Case, dict[str, object]]] = {
    "one token": (Case(1, 8, 32, 256), {}),
    "decode": (Case(64, 8, 32, 512, power_of_two=True), {"rounded": True}),
    "decode, FP8": (Case(33, 6, 20, 384, fp8=True, wide=True), {"limit": 0.5}),
    "one rank of four": (Case(50, 8, 16, 256, ranks=4), {}),
    "all to one expert": (Case(70, 4, 6, 256, one_expert=True), {}),
    "missing ids": (Case(20, 4, 9, 256, missing=0.5), {}),
    "prefill": (Case(700, 4, 8, 512), {}),
}


def check_layer(name: str, device: str, width: int = 256, interleaved: bool = False) -> None:
    """`fused_moe` in a poisoned workspace: the bits of the five ops, near the float64 layer."""
    case, options = LAYERS[name]
    layer = Layer(case, width, device, interleaved=interleaved, **options)  # type: ignore[arg-type]
    for seed in range(2):
        given = layer.inputs(seed)
        out = layer.fused(*given, workspace=layer.workspace())
        assert torch.equal(out, layer.by_ops(*given))
        assert torch.equal(out, layer.fused(*given))
        assert cases.relative_error(out, layer.expected(*given)) < LAYER_TOLERANCE
