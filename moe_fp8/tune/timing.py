"""Times configs of one GEMM against each other, after checking that they compute the same.

A config is timed by replaying a CUDA graph of calls that take turns over weights of more than four times
the L2 together, as in a model whose other layers run in between. A grouped one is timed with experts' rows
spread evenly and with skewed ones: the selector knows their mean alone, and what suits one may not the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean

import torch
from torch import Tensor

from moe_fp8.errors import MoeFp8Error
from moe_fp8.ops import (
    gemm_fp8,
    grouped_gemm_fp8_contiguous,
    quantize_fp8,
    quantize_fp8_blocks,
)
from moe_fp8.problems import SEGMENT_ALIGNMENT
from moe_fp8.tune.replay import Replay, alternate, l2_bytes
from moe_fp8.tune.targets import Target

_DEVICE = torch.device("cuda")

#: ||out - model's choice|| / ||model's choice|| of two configs' bf16 outputs.
_TOLERANCE = 5e-3

#: Experts' rows as multiples of their mean, over and over.
_SPREAD = (1.0, 0.7, 1.3, 0.9, 1.1, 0.8, 1.2)

_REPLAYS, _FINAL_REPLAYS, _PAUSE_S = 11, 31, 0.002

#: Where weights are so few that 4 x the L2 would take more, launching takes longer than reading them.
_MOST_SETS = 256

#: fp8 values and their scales.
Quantized = tuple[Tensor, Tensor]


def fastest(target: Target, rows: int, configs: Sequence[str]) -> tuple[str, float, float]:
    """The fastest of `configs`, its time, and that of `configs[0]`, in microseconds a call.

    Where experts' rows are timed as an even spread and skewed, the geometric mean of both counts. Raises
    MoeFp8Error where outputs are not finite or differ from those of `configs[0]`.
    """
    sets = _weights(target.n, target.k, target.num_experts)
    num_calls = -(-8 // len(sets)) * len(sets)  # whole turns, eight calls or more
    graphs = []
    for calls in _Calls.each(target, rows):
        _check(calls, sets[0], configs, f"{target}, {rows} rows")
        graphs.append(
            [
                Replay([partial(calls.run, config, weights) for weights in sets], num_calls)
                for config in configs
            ]
        )

    def times(replays: int, chosen: Sequence[int]) -> list[float]:
        each = [alternate([of_one[i] for i in chosen], replays, _PAUSE_S) for of_one in graphs]
        return [geometric_mean(timed) for timed in zip(*each, strict=True)]

    first = times(_REPLAYS, range(len(configs)))
    best = min(range(len(configs)), key=first.__getitem__)
    if best == 0:
        return configs[0], first[0], first[0]
    # The least of many medians is a little too good: the two that matter are timed again.
    us, model_us = times(_FINAL_REPLAYS, (best, 0))
    return configs[best], us, model_us


def _check(calls: _Calls, weights: Quantized, configs: Sequence[str], what: str) -> None:
    reference = calls.output(configs[0], weights)
    scale = torch.linalg.vector_norm(reference)
    for config in configs:
        error = torch.linalg.vector_norm(calls.output(config, weights) - reference) / scale
        if not error.item() < _TOLERANCE:  # NaN is not
            raise MoeFp8Error(
                f"{what}: expected {config} to give what {configs[0]} gives, finite and within {_TOLERANCE}, "
                f"got a relative difference of {error.item():.2e}"
            )


class _Sets:
    """The weights made last: targets that share them follow each other."""

    key: tuple[int, int, int] | None = None
    sets: tuple[Quantized, ...] = ()


def _weights(n: int, k: int, num_experts: int) -> tuple[Quantized, ...]:
    """Sets of weights `[n, k]` or `[E, n, k]`, of more than four times the L2 together."""
    if _Sets.key != (n, k, num_experts):
        _Sets.key, _Sets.sets = None, ()  # room for the new ones
        count = min(4 * l2_bytes() // (num_experts * n * k) + 1, _MOST_SETS)
        _Sets.sets = tuple(_random_weights(n, k, num_experts) for _ in range(count))
        _Sets.key = n, k, num_experts
    return _Sets.sets


def _random_weights(n: int, k: int, num_experts: int) -> Quantized:
    values = torch.empty(num_experts, n, k, device=_DEVICE, dtype=torch.float8_e4m3fn)
    scales = torch.empty(num_experts, -(-n // 128), k // 128, device=_DEVICE)
    for expert in range(num_experts):  # all at once in bf16 might not fit
        values[expert], scales[expert] = quantize_fp8_blocks(
            torch.randn(n, k, device=_DEVICE, dtype=torch.bfloat16)
        )
    return values, scales


@dataclass(frozen=True)
class _Calls:
    """One GEMM with random activations: `run(config, weights)` writes `out`, whose rows `valid` count."""

    run: Callable[[str, Quantized], object]
    out: Tensor
    valid: Tensor

    @classmethod
    def each(cls, target: Target, rows: int) -> list[_Calls]:
        """What is timed with so many rows, of each expert as a mean where it is grouped."""
        if target.layout == "dense":
            return [cls._dense(target, rows)]
        experts = range(target.num_experts)
        spread = [_SPREAD[expert % len(_SPREAD)] for expert in experts]
        skewed = [1 / (1 + expert) for expert in experts]
        return [
            cls._grouped(target, rows, [round(rows * share / fmean(shares)) for share in shares])
            for shares in (spread, skewed)
        ]

    @classmethod
    def _dense(cls, target: Target, rows: int) -> _Calls:
        a = _activations(rows, target.k)
        out = torch.empty(rows, target.n, device=_DEVICE, dtype=torch.bfloat16)

        def run(config: str, weights: Quantized) -> object:
            return gemm_fp8(*a, weights[0][0], weights[1][0], out=out, config=config, constant_weights=True)

        return cls(run, out, torch.arange(rows, device=_DEVICE))

    @classmethod
    def _grouped(cls, target: Target, rows: int, counts: list[int]) -> _Calls:
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT)
        a = _activations(starts[-1], target.k)
        out = torch.empty(starts[-1], target.n, device=_DEVICE, dtype=torch.bfloat16)
        ends = [start + count for start, count in zip(starts[:-1], counts, strict=True)]
        psum = torch.tensor(ends, device=_DEVICE, dtype=torch.int32)
        valid = torch.cat([torch.arange(*range_) for range_ in zip(starts[:-1], ends, strict=True)])

        def run(config: str, weights: Quantized) -> object:
            return grouped_gemm_fp8_contiguous(
                *a, *weights, psum=psum, expected_m=rows, out=out, config=config
            )

        return cls(run, out, valid.to(_DEVICE))

    def output(self, config: str, weights: Quantized) -> Tensor:
        """The valid rows in fp32, NaN where the config wrote none."""
        self.out.fill_(float("nan"))
        self.run(config, weights)
        return self.out[self.valid].float()


def _activations(rows: int, k: int) -> Quantized:
    return quantize_fp8(torch.randn(rows, k, device=_DEVICE, dtype=torch.bfloat16))
