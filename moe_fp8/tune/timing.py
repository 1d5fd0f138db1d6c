"""Times configs of one GEMM against each other, after checking that they compute the same.

A config is timed by replaying a CUDA graph of calls. The calls take turns over weights of more than four
times the L2 together, as in a model whose other layers run in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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

#: ||out - first config's|| / ||first config's|| of two configs' bf16 outputs.
_TOLERANCE = 5e-3

_PAUSE_S = 0.001

#: If weights are so few that 4 x the L2 would take more sets, launching takes longer than reading them.
_MOST_SETS = 256

#: fp8 values and their scales.
Quantized = tuple[Tensor, Tensor]


def time_configs(
    target: Target, rows: int, counts: Sequence[int], configs: Sequence[str], replays: int
) -> dict[str, float]:
    """Microseconds a call of each of `configs`, as medians of `replays` replays that take turns.

    `rows`: the expected rows of an expert; `counts`: the rows that each expert has. Raises MoeFp8Error if
    an output is not finite or differs from the output of `configs[0]`.
    """
    sets = _weights(target.n, target.k, target.num_experts)
    num_calls = -(-8 // len(sets)) * len(sets)  # whole turns, eight calls or more
    calls = _Calls.of(target, rows, counts)
    _check(calls, sets[0], configs, f"{target}, {rows} rows")
    graphs = [
        Replay([partial(calls.run, config, weights) for weights in sets], num_calls) for config in configs
    ]
    return dict(zip(configs, alternate(graphs, replays, _PAUSE_S), strict=True))


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
    def of(cls, target: Target, rows: int, counts: Sequence[int]) -> _Calls:
        """A call of `target` whose experts have `counts` rows and that expects `rows` of each."""
        return cls._dense(target, rows) if target.layout == "dense" else cls._grouped(target, rows, counts)

    @classmethod
    def _dense(cls, target: Target, rows: int) -> _Calls:
        a = _activations(rows, target.k)
        out = torch.empty(rows, target.n, device=_DEVICE, dtype=torch.bfloat16)

        def run(config: str, weights: Quantized) -> object:
            return gemm_fp8(*a, weights[0][0], weights[1][0], out=out, config=config, constant_weights=True)

        return cls(run, out, torch.arange(rows, device=_DEVICE))

    @classmethod
    def _grouped(cls, target: Target, rows: int, counts: Sequence[int]) -> _Calls:
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
