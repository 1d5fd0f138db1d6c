"""What each class is to reach beside its peer, and how far the results are. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .results import BATCH_INVARIANT, set_of

Json = dict[str, Any]

#: Unless they say otherwise, targets are against this peer; a row timed without it says nothing about them.
_PEER = "deep_gemm"


def _ratio(row: Json) -> float | None:
    with_peer = any(name.startswith(_PEER) for name in row["peers"])
    return row["ratio"] if with_peer else None


def _ratio_to_any(row: Json) -> float | None:
    return row["ratio"]


def _ceiling_share(row: Json) -> float | None:
    return row["ceiling_share"]


def _batch_invariant(row: Json) -> float | None:
    invariant = row.get("notes", {}).get(f"{BATCH_INVARIANT} us")
    return row["us"] / invariant if invariant else None


@dataclass(frozen=True)
class Target:
    """One line of the table. `covers` sees a row's shape; of a class's lines the first that covers it counts.

    `mean` is to be reached by the geometric mean, `each` by every shape; None: nothing was promised.
    Where `unit` is empty, figures are peer time / our time. `at_most`: less is better.
    """

    name: str
    cls: str
    covers: Callable[[Json], bool]
    mean: float | None = None
    each: float | None = None
    figure: Callable[[Json], float | None] = _ratio
    unit: str = ""
    at_most: bool = False


def _any(shape: Json) -> bool:
    return True


def _few_contiguous(shape: Json) -> bool:
    return shape["rows_per_expert"] <= 64 and shape["layout"] in ("psum", "offsets")


TARGETS = [
    Target("dense, m <= 128", "dense", lambda s: s["m"] <= 128, 1.40, 1.05),
    Target("dense, m 129 to 1023", "dense", lambda s: s["m"] < 1024),
    Target("dense, m >= 1024", "dense", lambda s: s["m"] >= 1024, 1.02, 0.97),
    Target("contiguous (psum, offsets), 1 to 64 rows an expert", "contiguous", _few_contiguous, 1.25, 1.10),
    Target("contiguous (m_indices), below 64 rows", "contiguous", lambda s: s["rows_per_expert"] < 64),
    Target("contiguous, 64 to 256 rows", "contiguous", lambda s: s["rows_per_expert"] <= 256, 1.15, 1.00),
    Target("contiguous, above 256 rows", "contiguous", _any, 1.02, 0.97),
    Target("masked, up to 64 rows an expert", "masked", lambda s: s["rows_per_expert"] <= 64, 1.12, 1.05),
    Target("masked, above 64 rows", "masked", _any, 1.10, 1.00),
    Target("silu_mul_quantize: share of the read ceiling", "silu_mul_quantize", _any, figure=_ceiling_share),
    Target("mqa logits, prefill", "mqa_logits", _any, 1.25, 1.05),
    Target("paged mqa logits", "paged_mqa_logits", _any, 1.20, 1.05),
    Target("paged metadata", "paged_metadata", _any),
    Target("top-k, beside torch.topk", "topk", _any, each=1.00, figure=_ratio_to_any),
    Target("selection, from queries to indices", "indexer_select", _any, each=1.50),
]

#: Absolute figures; they do not take a shape away from the lines above.
ABSOLUTE = [
    Target(
        "masked, up to 64 rows, 32 experts",
        "masked",
        lambda s: s["rows_per_expert"] <= 64 and s["num_experts"] == 32,
        mean=4300,
        figure=lambda row: row["gbs"],
        unit="GB/s",
    ),
    Target(
        "dense, m <= 128: usual time / that of the batch-invariant mode",
        "dense",
        lambda s: s["m"] <= 128,
        figure=_batch_invariant,
    ),
    Target(
        "host time of an eager call",
        "host",
        _any,
        each=8,
        figure=lambda row: row["us"],
        unit="us",
        at_most=True,
    ),
    Target(
        "compile of one kernel",
        "compile",
        _any,
        each=1,
        figure=lambda row: (row.get("notes", {}).get("max_us") or row["us"]) / 1e6,
        unit="s",
        at_most=True,
    ),
]


@dataclass(frozen=True)
class Standing:
    """Where one target stands over one set of shapes."""

    target: Target
    set_name: str
    figures: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.exp(sum(map(math.log, self.figures)) / len(self.figures))

    @property
    def worst(self) -> float:
        return max(self.figures) if self.target.at_most else min(self.figures)

    @property
    def reached(self) -> bool | None:
        """None where nothing was promised."""
        promised = [(self.target.mean, self.mean), (self.target.each, self.worst)]
        kept = [
            got <= wanted if self.target.at_most else got >= wanted
            for wanted, got in promised
            if wanted is not None
        ]
        return all(kept) if kept else None


def standings(device: Json) -> Iterator[Standing]:
    """Every target that `device`'s rows say something about; a set of shapes is a line of its own."""
    figures: dict[tuple[int, str], list[float]] = {}
    lines = [*TARGETS, *ABSOLUTE]
    for row in device["rows"]:
        shape = row["shape"]
        first = next((t for t in TARGETS if t.cls == row["class"] and t.covers(shape)), None)
        absolute = [t for t in ABSOLUTE if t.cls == row["class"] and t.covers(shape)]
        for target in [*filter(None, [first]), *absolute]:
            figure = target.figure(row)
            if figure is not None:
                figures.setdefault((lines.index(target), set_of(shape)), []).append(figure)
    for index, set_name in sorted(figures):
        yield Standing(lines[index], set_name, tuple(figures[index, set_name]))


def table(device: Json) -> str:
    """Markdown: geometric mean and worst of every target, beside what was promised."""
    lines = [
        "| class | shapes | geometric mean | target | worst | bound for each | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for at in standings(device):
        target = at.target
        cells = [
            target.name,
            f"{len(at.figures)} {at.set_name}",
            f"{_number(at.mean)} {target.unit}".rstrip(),
            _number(target.mean),
            f"{_number(at.worst)} {target.unit}".rstrip(),
            ("at most " if target.at_most and target.each is not None else "") + _number(target.each),
            {True: "yes", False: "no", None: "-"}[at.reached],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
