"""Seeded draws of the indexer's shapes, 20 for each class, and its `development` set.

This module needs only the standard library.
"""

from __future__ import annotations

import math
import random

from .shapes import MqaShape, PagedShape

_SHAPES_A_CLASS = 20
_SEED = 20_264

#: Heads of DeepSeek-V3.2 and of GLM-5.
_HEADS = (64, 32)

#: Upper bound for the logits of one call: 2 GiB of fp32.
_MOST_LOGITS = 1 << 29
#: Upper bound for the cached tokens of a batch: 0.5 GiB of keys and scales.
_MOST_TOKENS = 1 << 22


def _between(rng: random.Random, least: int, most: int) -> int:
    """A draw that is uniform in the logarithm."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def mqa_shapes(rng: random.Random) -> list[MqaShape]:
    shapes = []
    for i in range(_SHAPES_A_CLASS):
        queries = _between(rng, 64, 4096)
        context = queries + _between(rng, 512, min(131_072, _MOST_LOGITS // queries - queries))
        shapes.append(MqaShape(queries, context, _HEADS[i % 2]))
    return shapes


def paged_shapes(rng: random.Random) -> list[PagedShape]:
    shapes = []
    for i in range(_SHAPES_A_CLASS):
        batch = _between(rng, 1, 256)
        context = _between(rng, 512, min(131_072, _MOST_TOKENS // batch))
        shapes.append(PagedShape(batch, context, next_n=1 + i // 2 % 2, heads=_HEADS[i % 2]))
    return shapes


MQA_LOGITS = mqa_shapes(random.Random(_SEED))
PAGED_MQA_LOGITS = paged_shapes(random.Random(_SEED + 1))
