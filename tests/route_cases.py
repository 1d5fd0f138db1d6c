"""Random cases of route_topk and checks of its results in float64, for the CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fp8 import route_topk
from tests import cases

#: Computes weights and ids, as `route_topk` does, from a case's logits and bias.
Route = Callable[["Case", Tensor, Tensor | None], tuple[Tensor, Tensor]]

#: Scores with bias that differ by less may come in either order, because their last bits may differ.
NEAR = 1e-6


@dataclass(frozen=True)
class Case:
    """A router of `experts` experts, of which each of `tokens` tokens gets `topk`."""

    tokens: int
    experts: int
    topk: int
    scoring: str = "softmax"
    bias: bool = False
    groups: int = 1
    kept: int = 1
    renormalize: bool = True
    scaling: float = 1.0
    dtype: torch.dtype = torch.float32
    ids_dtype: torch.dtype = torch.int32

    def logits(self, seed: int = 0) -> Tensor:
        gen = cases.generator(seed, "cpu")
        return (2 * torch.randn(self.tokens, self.experts, generator=gen)).to(self.dtype)

    def correction_bias(self, seed: int = 0) -> Tensor | None:
        if not self.bias:
            return None
        scale = 0.3 if self.scoring == "sigmoid" else 0.3 / self.experts
        return scale * torch.randn(self.experts, generator=cases.generator(seed + 1, "cpu"))

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `route_topk`, except its tensors."""
        return {
            "scoring": self.scoring,
            "num_expert_group": self.groups,
            "topk_group": self.kept,
            "renormalize": self.renormalize,
            "scaling_factor": self.scaling,
            "ids_dtype": self.ids_dtype,
        }

    @property
    def by_logits(self) -> bool:
        """Whether logits decide, so that no rounding matters."""
        return not self.bias and self.kept == self.groups


#: The routers of models.
MODELS = {
    "Qwen3-30B": Case(300, 128, 8),
    "Qwen3-Next": Case(200, 512, 10),
    "DeepSeek-V3": Case(300, 256, 8, "sigmoid", True, 8, 4, True, 2.5),
    "GLM-4.5": Case(300, 160, 8, "sigmoid", True, 1, 1, True, 2.5),
    "MiniMax-M2": Case(300, 256, 8, "sigmoid", True),
    "Kimi-K2": Case(200, 384, 8, "sigmoid", True, 1, 1, True, 2.827),
    "LongCat-Flash": Case(100, 768, 12, "softmax", True, renormalize=False, scaling=6.0),
    "ERNIE-4.5": Case(200, 64, 6, "softmax", True),
}

CASES = MODELS | {
    "bf16": Case(300, 128, 8, dtype=torch.bfloat16),
    "bf16, sigmoid": Case(300, 256, 8, "sigmoid", True, 8, 4, dtype=torch.bfloat16, ids_dtype=torch.int64),
    "fp16": Case(100, 256, 8, "sigmoid", dtype=torch.float16, ids_dtype=torch.int64),
    "one expert": Case(3, 1, 1),
    "all experts": Case(9, 7, 7, "sigmoid"),
    "one of two": Case(33, 2, 1, renormalize=False),
    "most experts": Case(40, 1024, 32, "sigmoid", True),
    "an odd number of experts": Case(50, 999, 5, renormalize=False),
    "groups of odd sizes": Case(80, 231, 6, "sigmoid", True, 11, 3),
    "groups without bias": Case(60, 160, 6, "softmax", False, 8, 3, False, 16.0),
    "many groups": Case(60, 64, 8, "sigmoid", True, 32, 4),
    "two large groups": Case(40, 1024, 8, "sigmoid", True, 2, 1),
    "sigmoid as it is": Case(100, 64, 6, "sigmoid", renormalize=False),
    "one token": Case(1, 256, 8, "sigmoid", True, 8, 4, True, 2.5),
}


def run_op(device: str) -> Route:
    """`route_topk` on `device`, with outputs that begin as NaN and -7 in rows of larger tensors."""

    def run(case: Case, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = torch.full((len(logits), case.topk + 3), float("nan"), device=device)
        ids = torch.full((len(logits), case.topk + 1), -7, dtype=case.ids_dtype, device=device)
        out = weights[:, 1 : case.topk + 1], ids[:, : case.topk]
        moved = None if bias is None else bias.to(device)
        returned = route_topk(logits.to(device), case.topk, correction_bias=moved, **case.options(), out=out)
        assert returned is out
        assert weights[:, [0, -2, -1]].isnan().all() and (ids[:, -1] == -7).all()
        return out[0].cpu(), out[1].cpu()

    return run


def check(case: Case, route: Route, seed: int = 0) -> None:
    """Route random logits, and compare what comes back with float64."""
    logits, bias = case.logits(seed), case.correction_bias(seed)
    weights, ids = route(case, logits, bias)
    assert weights.shape == ids.shape == (case.tokens, case.topk) and ids.dtype is case.ids_dtype
    ids = ids.long()
    check_ids(case, ids)
    expected, decided = chosen(case, logits, bias)
    assert decided.double().mean() > 0.9
    assert torch.equal(ids[decided], expected[decided])
    torch.testing.assert_close(weights.double(), weights_of(case, logits, ids), rtol=3e-6, atol=0)


def check_ids(case: Case, ids: Tensor) -> None:
    """The ids of each token are distinct, and in range."""
    assert ((ids >= 0) & (ids < case.experts)).all()
    assert all(len(set(row)) == case.topk for row in ids.tolist())


def scores(case: Case, logits: Tensor) -> Tensor:
    x = logits.double()
    return x.exp() / x.exp().sum(1, keepdim=True) if case.scoring == "softmax" else 1 / (1 + (-x).exp())


def weights_of(case: Case, logits: Tensor, ids: Tensor) -> Tensor:
    """The weights of given ids, in float64."""
    weights = scores(case, logits).gather(1, ids)
    if case.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * case.scaling


def chosen(case: Case, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ids in order, and the tokens whose order does not depend on rounding."""
    by = logits.double() if case.by_logits else scores(case, logits)
    if bias is not None:
        by = by + bias.double()
    decided = torch.ones(case.tokens, dtype=torch.bool)
    if case.kept < case.groups:
        groups = by.view(case.tokens, case.groups, -1)
        sums, order = groups.sort(-1).values[:, :, -2:].sum(-1).sort(1, descending=True)
        decided &= sums[:, case.kept - 1] - sums[:, case.kept] > NEAR
        for token, kept in enumerate(order[:, : case.kept].tolist()):
            for group in set(range(case.groups)) - set(kept):
                groups[token, group] = -torch.inf
    found = by.sort(dim=1, descending=True, stable=True)
    if not case.by_logits:
        best = found.values[:, : case.topk + 1]
        decided &= ((best[:, :-1] - best[:, 1:]) > NEAR).all(1)
    return found.indices[:, : case.topk], decided


#: (logits, choice of 4 with softmax): equal, infinite and undefined logits.
ODD = [
    ([1.0] * 8, [0, 1, 2, 3]),
    ([0.0, -0.0, 0.0, -0.0, 1.0, 0.0, -0.0, 0.0], [4, 0, 1, 2]),
    ([3.0, 1.0, 2.0, 3.0, 2.0, 1.0, 3.0, 2.0], [0, 3, 6, 2]),
    ([float("nan")] * 8, [0, 1, 2, 3]),
    ([float("inf")] * 8, [0, 1, 2, 3]),
    ([-float("inf")] * 8, [0, 1, 2, 3]),
    ([float("nan"), 1.0, -float("inf"), 5.0, float("nan"), -9.0, -float("inf"), float("nan")], [3, 1, 5, 0]),
    ([0.0, float("inf"), -1.0, float("nan"), -float("inf"), 1e30, float("inf"), -1e30], [1, 6, 5, 0]),
    ([-1e-30, 1e-30, -2e-30, 2e-30, 0.0, -0.0, 3e-30, -3e-30], [6, 3, 1, 4]),
]


def check_odd(route: Route) -> None:
    """Equal choices come in the order of ids; ids and weights are valid whatever logits and bias hold."""
    logits = torch.tensor([row for row, _ in ODD])
    expected = torch.tensor([ids for _, ids in ODD])
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            case = Case(len(ODD), 8, 4, scoring, renormalize=renormalize)
            weights, ids = route(case, logits, None)
            assert torch.equal(ids.long(), expected)
            assert weights.isfinite().all() and (weights >= 0).all()
    limits = torch.tensor([0.0, 0.0, float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0])
    for bias in (torch.zeros(8), limits):
        for groups, kept in ((1, 1), (4, 2)):
            case = Case(len(ODD), 8, 4, "sigmoid", True, groups, kept)
            weights, ids = route(case, logits, bias)
            check_ids(case, ids)
            assert weights.isfinite().all()


def check_equal_groups(route: Route) -> None:
    """Among equal groups the smaller number stays."""
    logits = torch.zeros(1, 12)
    logits[0, 8] = logits[0, 11] = 1.0  # the third and the fourth group
    _, ids = route(Case(1, 12, 4, "sigmoid", False, 4, 3), logits, None)
    assert ids.tolist() == [[8, 11, 0, 1]]
    logits[0, 8] = 0.0
    _, ids = route(Case(1, 12, 4, "sigmoid", False, 4, 2), logits, None)
    assert ids.tolist() == [[11, 0, 1, 2]]
