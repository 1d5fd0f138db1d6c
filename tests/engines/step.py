"""One step of an engine's layer: inputs in fixed places, a call that can be captured, its results."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import cases
from tests.engines import ops


class Step(ABC):
    """Inputs keep their addresses between calls, so that a captured graph sees new contents."""

    @abstractmethod
    def draw(self, seed: int) -> None:
        """New contents of the inputs; the same for the same seed."""

    def prepare(self) -> None:  # noqa: B027
        """What an engine does before each step, outside of its graph."""

    @abstractmethod
    def run(self) -> None:
        """The engine's own code, from the inputs to the outputs."""

    @abstractmethod
    def results(self) -> dict[str, Tensor]:
        """What a user of the layer reads: floats may differ by rounding, integers may not."""

    @abstractmethod
    def expected(self) -> dict[str, Tensor]:
        """Results in plain maths; not every one of `results`."""

    @abstractmethod
    def poison(self) -> None:
        """Fill outputs and buffers with values that a step must overwrite."""


@dataclass(frozen=True)
class Moe:
    """A layer of `experts` on this rank, out of `experts * ranks` in all, for `tokens` with `topk` each."""

    tokens: int
    topk: int = 4
    experts: int = 8
    hidden: int = 2048
    intermediate: int = 768
    ranks: int = 1

    def routing(self, seed: int, device: str) -> tuple[Tensor, Tensor]:
        """int32 experts [M, top-k], distinct in a row, and fp32 weights that sum to one in a row."""
        gen = cases.generator(seed, "cpu")
        scores = torch.rand(self.tokens, self.experts * self.ranks, generator=gen)
        # Experts differ in how often they are chosen; the last one is hardly ever.
        scores *= torch.linspace(1, 0.5, scores.shape[1])
        best = scores.topk(self.topk, dim=-1)
        weights = best.values / best.values.sum(-1, keepdim=True)
        return best.indices.int().to(device), weights.to(device)

    def expert_map(self, device: str) -> Tensor | None:
        """Every `ranks`-th expert is on this rank; the others are -1. None for one rank."""
        if self.ranks == 1:
            return None
        numbers = torch.full((self.experts * self.ranks,), -1, dtype=torch.int32)
        numbers[:: self.ranks] = torch.arange(self.experts, dtype=torch.int32)
        return numbers.to(device)

    def tokens_drawn(self, seed: int, device: str) -> Tensor:
        """bf16 [M, hidden]."""
        gen = cases.generator(seed, "cpu")
        return torch.randn(self.tokens, self.hidden, generator=gen).to(torch.bfloat16).to(device)

    def weights(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w13 fp8 [E, 2 I, H] and its scales, w2 fp8 [E, H, I] and its scales."""
        return _weights(self.experts, self.hidden, self.intermediate, device)

    def expected(self, tokens: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        """fp32 [M, hidden] without any quantization of activations; `ids` are of this rank, or -1."""
        w13, s13, w2, s2 = self.weights(str(tokens.device))
        out = torch.zeros(tokens.shape, device=tokens.device)
        for expert in range(self.experts):
            row, place = (ids == expert).nonzero(as_tuple=True)
            inner = ops.silu_mul(tokens[row].float() @ _dequantized(w13[expert], s13[expert]).T)
            own = inner @ _dequantized(w2[expert], s2[expert]).T
            out.index_add_(0, row, own * topk_weights[row, place][:, None])
        return out


def _dequantized(w: Tensor, scale: Tensor) -> Tensor:
    blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return w.float() * blocks[: w.shape[0], : w.shape[1]]


@functools.lru_cache(maxsize=1)
def _weights(experts: int, hidden: int, intermediate: int, device: str) -> tuple[Tensor, ...]:
    gen = cases.generator(0, device)
    w13, s13 = cases.weights(experts, 2 * intermediate, hidden, gen)
    w2, s2 = cases.weights(experts, hidden, intermediate, gen)
    # Outputs are then of the size of the inputs, as in a model.
    return w13, s13 * hidden**-0.5, w2, s2 * intermediate**-0.5


def eager(step: Step, seed: int) -> dict[str, Tensor]:
    """The results of a step with this seed's inputs."""
    step.draw(seed)
    step.prepare()
    step.poison()
    step.run()
    return {name: value.clone() for name, value in step.results().items()}


def replayed(step: Step, seeds: tuple[int, int]) -> dict[str, Tensor]:
    """The results of a graph captured with the first seed's inputs and replayed with the second seed's."""
    step.draw(seeds[0])
    step.prepare()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()
        step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    step.draw(seeds[1])
    step.prepare()
    step.poison()
    graph.replay()
    return {name: value.clone() for name, value in step.results().items()}


def compare(out: Mapping[str, Tensor], expected: Mapping[str, Tensor], overall: float, row: float) -> None:
    """Integers are equal; floats differ by at most `overall` of the norm, and by `row` in each row."""
    assert out.keys() == expected.keys()
    for name, value in expected.items():
        got = out[name]
        assert got.shape == value.shape and got.dtype == value.dtype, name
        if not value.is_floating_point():
            assert torch.equal(got, value), name
            continue
        assert torch.isfinite(got).all() and torch.isfinite(value).all(), name
        difference = torch.linalg.vector_norm((got.double() - value.double()), dim=-1)
        size = torch.linalg.vector_norm(value.double(), dim=-1)
        whole = (difference.square().sum() / size.square().sum()).sqrt().item()
        assert whole <= overall, f"{name}: relative error {whole:.2e}, allowed {overall:.0e}"
        worst = (difference / size.clamp_min(1e-30))[size > 0].max().item()
        assert worst <= row, f"{name}: relative error {worst:.2e} in a row, allowed {row:.0e}"
        assert not difference[size == 0].any(), f"{name}: a row that must be zero is not"
