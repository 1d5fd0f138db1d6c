"""Random cases of moe_permute and moe_combine and checks of their results, for the CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fp8 import Permuted, moe_combine, moe_permute, quantize_fp8
from tests import cases


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
