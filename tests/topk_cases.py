"""Cases of `indexer_topk`: logits that are NaN outside the ranges, and the expected choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import generator

#: The ways to draw logits.
KINDS = ("normal", "few", "equal", "one_exponent", "special", "ascending", "descending", "sparse", "negative")

_SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0)


@dataclass(frozen=True)
class TopkCase:
    logits: Tensor
    starts: Tensor | None
    ends: Tensor | None

    def to(self, device: str) -> TopkCase:
        """A copy on `device`; rows have the same stride and offset as here, with NaN between them."""
        logits = _spread(self.logits, self.logits.stride(0), self.logits.storage_offset(), device)
        ranges = (None if each is None else each.to(device, copy=True) for each in (self.starts, self.ends))
        return TopkCase(logits, *ranges)


def _spread(values: Tensor, stride: int, offset: int, device: str) -> Tensor:
    """`values` in rows `stride` elements apart, from element `offset` of a new storage; the rest is NaN."""
    rows, columns = values.shape
    storage = torch.full((offset + rows * stride + columns,), math.nan, dtype=values.dtype, device=device)
    return storage.as_strided((rows, columns), (stride, 1), offset).copy_(values)


def draw(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """fp32 [rows, columns] of one kind."""
    gen = generator(seed, "cpu")
    if kind == "few":
        return torch.randint(0, 3, (rows, columns), generator=gen).float()
    if kind == "equal":
        return torch.full((rows, columns), 0.5)
    if kind == "special":
        return torch.tensor(_SPECIAL)[torch.randint(0, len(_SPECIAL), (rows, columns), generator=gen)]
    if kind in ("ascending", "descending"):
        ramp = torch.arange(columns).float().expand(rows, -1)
        return ramp.clone() if kind == "ascending" else -ramp
    values = torch.randn(rows, columns, generator=gen)
    if kind == "one_exponent":
        return 1 + values.frac().abs() / 64
    if kind == "sparse":
        return torch.where(values > 2.5, values, -math.inf)
    return -values.abs() if kind == "negative" else values


def ranges(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """(starts, ends). full: neither is given. causal: ends grow. random: any ranges, some of them empty."""
    if kind == "full":
        return None, None
    if kind == "causal":
        return None, (columns - torch.arange(rows - 1, -1, -1).clamp_max(columns)).int()
    gen = generator(seed, "cpu")
    pairs = torch.randint(0, columns + 1, (rows, 2), generator=gen).sort(1).values.int()
    pairs[::5, 1] = pairs[::5, 0]
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def topk_case(
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    of_ranges: str = "random",
    *,
    stride: int | None = None,
    offset: int = 0,
    seed: int = 0,
) -> TopkCase:
    """Rows `stride` elements apart, from element `offset` of their storage; NaN outside the ranges."""
    stride = columns if stride is None else stride
    starts, ends = ranges(of_ranges, rows, columns, seed)
    at = torch.arange(columns)
    inside = torch.ones(rows, columns, dtype=torch.bool)
    if starts is not None:
        inside &= at >= starts[:, None]
    if ends is not None:
        inside &= at < ends[:, None]
    values = torch.where(inside, draw(kind, rows, columns, seed), math.nan).to(dtype)
    return TopkCase(_spread(values, stride, offset, "cpu"), starts, ends)


def _rank(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


def expected(case: TopkCase, k: int, by_value: bool) -> tuple[list[list[int]], list[list[float]]]:
    """(columns, values) by the definition, in plain Python."""
    rows, columns = case.logits.shape
    chosen_columns, chosen_values = [], []
    for row in range(rows):
        start = 0 if case.starts is None else int(case.starts[row])
        end = columns if case.ends is None else int(case.ends[row])
        start, end = max(start, 0), min(end, columns)
        values = case.logits[row].tolist()
        # sorted() is stable, even in reverse order.
        chosen = sorted(range(start, end), key=lambda at: _rank(values[at]), reverse=True)[:k]
        if not by_value:
            chosen.sort()
        padding = k - len(chosen)
        chosen_values.append([values[at] for at in chosen] + [-math.inf] * padding)
        chosen_columns.append(chosen + [-1] * padding)
    return chosen_columns, chosen_values
