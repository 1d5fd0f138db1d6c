"""Random GEMMs to fit the cost model to, and random numbers of rows for their experts.

Neither follows a model or a benchmark: widths, rows and numbers of experts are log-uniform, and experts' rows
are log-normal. The selector and the benchmarks each assume other distributions, so that what is fitted here
is tested there. Standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from moe_fp8.tune.targets import Target

#: Two GEMMs of five are dense.
_DENSE_SHARE = 0.4
_MOST_N, _MOST_K, _MOST_EXPERTS = 24_576, 16_384, 128
_MOST_DENSE_ROWS, _MOST_EXPERT_ROWS = 4096, 1024
#: Weights are made on the GPU for every target, and a call is timed some hundred times.
_MOST_WEIGHT_BYTES, _MOST_FLOP = 1 << 30, 4e11
_ROWS_A_TARGET = 3

#: Sigma of the logarithm of experts' rows: a balanced router and a skewed router.
SIGMAS = (0.3, 1.0)


def sample(seed: int) -> Iterator[tuple[Target, int]]:
    """(target, rows) without an end; those of one target follow each other, since they share weights."""
    rng = random.Random(seed)
    while True:
        n = 64 * round(_log_uniform(rng, 4, _MOST_N / 64))
        k = 128 * round(_log_uniform(rng, 4, _MOST_K / 128))
        dense = rng.random() < _DENSE_SHARE
        experts = 1 if dense else round(_log_uniform(rng, 1, _MOST_EXPERTS))
        most = min(_MOST_DENSE_ROWS if dense else _MOST_EXPERT_ROWS, _MOST_FLOP / (2 * experts * n * k))
        if experts * n * k > _MOST_WEIGHT_BYTES or most < 1:
            continue
        target = Target("dense" if dense else "psum", n, k, experts)
        for rows in sorted({round(_log_uniform(rng, 1, most)) for _ in range(_ROWS_A_TARGET)}):
            yield target, rows


def expert_counts(target: Target, rows: int) -> list[tuple[int, ...]]:
    """Rows of each expert, for each spread that is timed: `rows` on average, log-normal, always the same."""
    if target.num_experts == 1:
        return [(rows,)]
    rng = random.Random(repr((*target, rows)))
    return [_counts(rng, target.num_experts, rows, sigma) for sigma in SIGMAS]


def _counts(rng: random.Random, experts: int, rows: int, sigma: float) -> tuple[int, ...]:
    """Each row goes to a random expert; experts' probabilities are log-normal."""
    weights = [rng.lognormvariate(0, sigma) for _ in range(experts)]
    counts = [0] * experts
    for expert in rng.choices(range(experts), weights, k=experts * rows):
        counts[expert] += 1
    return tuple(counts)


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))
