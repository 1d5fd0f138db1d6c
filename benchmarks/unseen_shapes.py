"""The sets `unseen` and `few_rounds`: shapes drawn from the hash of the measured commit.

A commit's hash depends on everything in the commit, so nobody can have tuned a commit on its own unseen
shapes. At least half of the GEMMs have the widths of models that no table was fitted to (fitted models have
four of their 13 dense widths, too). Some GEMMs have one, two or four experts, whose tiles seldom fill whole
rounds of the SMs. The GEMMs of `few_rounds` have few tiles, too. This module needs only the standard library.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import random_indexer, shapes
from . import random_shapes as drawn
from .random_shapes import MODELS, UNFITTED, Layout
from .results import FEW_ROUNDS, UNSEEN
from .shapes import DenseShape, GroupedShape, MqaShape, PagedShape, TopkShape

_SHAPES_A_CLASS = 24
#: Numbers of experts of the additional shapes of a class, and the range of their rows.
_FEW_EXPERTS = (1, 2, 4, 1, 2, 4)
_FEW_EXPERTS_ROWS = (200, 2000)

#: The set few_rounds: shapes of a class; the range of dense rows; the ranges of experts and of their rows.
_FEW_ROUNDS = 20
_FEW_ROUNDS_DENSE_ROWS = (129, 2048)
_FEW_ROUNDS_EXPERTS, _FEW_ROUNDS_EXPERT_ROWS = (1, 8), (128, 1024)

_Shape = TypeVar("_Shape")


def seed(commit: str) -> int:
    """The seed of a commit: the SHA-256 of its hash. Raises ValueError unless the hash has 40 hex digits."""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"shapes are drawn from a commit's full hash of 40 hex digits, got {commit!r}")
    return int(hashlib.sha256(commit.encode()).hexdigest(), 16)


def dense(commit: str) -> list[DenseShape]:
    rng = random.Random(seed(commit))
    pools = (drawn.dense_widths(UNFITTED.values()), drawn.dense_widths((MODELS | UNFITTED).values()))
    known = {*shapes.DENSE, *drawn.DENSE}
    found: list[DenseShape] = []
    for i, m in enumerate(drawn.log_uniform(rng, drawn.MOST_ROWS, _SHAPES_A_CLASS + len(_FEW_EXPERTS))):
        shapes_of_m = [DenseShape(m, n, k) for n, k in pools[i % 2]]
        found.append(_new(rng, shapes_of_m, {*known, *found}))
    return found


def contiguous(commit: str) -> list[GroupedShape]:
    rng = random.Random(seed(commit) + 1)
    pools = (
        drawn.expert_widths(models=UNFITTED.values()),
        drawn.expert_widths(models=(MODELS | UNFITTED).values()),
    )
    known = {*shapes.CONTIGUOUS, *drawn.CONTIGUOUS}
    return _grouped(rng, pools, drawn.CONTIGUOUS_LAYOUTS, drawn.MOST_ROWS, known)


def masked(commit: str) -> list[GroupedShape]:
    rng = random.Random(seed(commit) + 2)
    pools = (
        drawn.expert_widths(drawn.EXPERT_PARALLEL, UNFITTED.values()),
        drawn.expert_widths(drawn.EXPERT_PARALLEL, (MODELS | UNFITTED).values()),
    )
    known = {*shapes.MASKED, *drawn.MASKED}
    return _grouped(rng, pools, ("masked",), drawn.MOST_MASKED_ROWS, known)


def few_rounds_dense(commit: str) -> list[DenseShape]:
    rng = random.Random(seed(commit) + 6)
    widths = drawn.dense_widths((MODELS | UNFITTED).values())
    found: list[DenseShape] = []
    for _ in range(_FEW_ROUNDS):
        m = _log_uniform(rng, *_FEW_ROUNDS_DENSE_ROWS)
        found.append(_new(rng, [DenseShape(m, n, k) for n, k in widths], {*found}))
    return found


def few_rounds_contiguous(commit: str) -> list[GroupedShape]:
    return _few_experts(random.Random(seed(commit) + 7), drawn.CONTIGUOUS_LAYOUTS)


def few_rounds_masked(commit: str) -> list[GroupedShape]:
    return _few_experts(random.Random(seed(commit) + 8), ("masked",))


def topk(commit: str) -> list[TopkShape]:
    return drawn.topk_shapes(random.Random(seed(commit) + 3))


def mqa_logits(commit: str) -> list[MqaShape]:
    return random_indexer.mqa_shapes(random.Random(seed(commit) + 4))


def paged_mqa_logits(commit: str) -> list[PagedShape]:
    return random_indexer.paged_shapes(random.Random(seed(commit) + 5))


def _grouped(
    rng: random.Random,
    pools: Sequence[list[tuple[int, int, int]]],
    layouts: Sequence[Layout],
    most_rows: int,
    known: set[GroupedShape],
) -> list[GroupedShape]:
    """Draw shapes with the models' numbers of experts first, then shapes with few experts and many rows."""
    calls: list[tuple[int | None, int]] = [
        (None, rows) for rows in drawn.log_uniform(rng, most_rows, _SHAPES_A_CLASS)
    ]
    calls += [(experts, _log_uniform(rng, *_FEW_EXPERTS_ROWS)) for experts in _FEW_EXPERTS]
    found: list[GroupedShape] = []
    for i, (experts, rows) in enumerate(calls):
        layout, skew = layouts[i % len(layouts)], drawn.SKEWS[i % len(drawn.SKEWS)]
        # Each pool serves whole turns of the skews, so it gets every skew.
        pool = pools[i // len(drawn.SKEWS) % len(pools)]
        candidates = [GroupedShape(layout, experts or e, rows, n, k, skew) for e, n, k in pool]
        found.append(_new(rng, [shape for shape in candidates if drawn.fits(shape)], {*known, *found}))
    return found


def _few_experts(rng: random.Random, layouts: Sequence[Layout]) -> list[GroupedShape]:
    widths = drawn.expert_widths(drawn.EXPERT_PARALLEL, (MODELS | UNFITTED).values())
    found: list[GroupedShape] = []
    for i in range(_FEW_ROUNDS):
        experts, rows = rng.randint(*_FEW_ROUNDS_EXPERTS), _log_uniform(rng, *_FEW_ROUNDS_EXPERT_ROWS)
        layout, skew = layouts[i % len(layouts)], drawn.SKEWS[i % len(drawn.SKEWS)]
        candidates = [GroupedShape(layout, experts, rows, n, k, skew) for _, n, k in widths]
        found.append(_new(rng, [shape for shape in candidates if drawn.fits(shape)], {*found}))
    return found


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _new(rng: random.Random, candidates: Sequence[_Shape], known: set[_Shape]) -> _Shape:
    """A draw from the candidates that are not in `known`."""
    return rng.choice([shape for shape in candidates if shape not in known])


#: Set of shapes -> class -> the draw of a commit.
DRAWS: dict[str, dict[str, Callable[[str], Sequence[Any]]]] = {
    UNSEEN: {
        "dense": dense,
        "contiguous": contiguous,
        "masked": masked,
        "mqa_logits": mqa_logits,
        "paged_mqa_logits": paged_mqa_logits,
        "topk": topk,
    },
    FEW_ROUNDS: {
        "dense": few_rounds_dense,
        "contiguous": few_rounds_contiguous,
        "masked": few_rounds_masked,
    },
}
