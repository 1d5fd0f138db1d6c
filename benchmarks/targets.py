"""The target of each class against its peer, and how far the results are from it.

This module needs only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .results import BATCH_INVARIANT, LISTED, SETS, UNSEEN, set_of

Json = dict[str, Any]

#: Kinds of eager calls that class host times.
AGAIN, NEW_ADDRESS, NEW_M = "again", "new address", "new m"

#: By default targets are against this peer; a row that was timed without it says nothing about them.
_PEER = "deep_gemm"


def _ratio(row: Json) -> float | None:
    with_peer = any(name.startswith(_PEER) for name in row["peers"])
    return row["ratio"] if with_peer else None


def _ratio_to_any(row: Json) -> float | None:
    return row["ratio"]


def _ceiling_share(row: Json) -> float | None:
    return row["ceiling_share"]


def _time_over_limit(row: Json) -> float | None:
    """The time of a layer over the limit for it, which allows 8 us for all that is not reading weights."""
    floor = row.get("notes", {}).get("floor us")
    return row["us"] / (1.12 * floor + 8) if floor else None


def _step_over_replay(row: Json) -> float | None:
    """A decode step under load over the replayed graph alone."""
    replay = row.get("notes", {}).get("replay, us")
    return row["us"] / replay if replay else None


def _batch_invariant(row: Json) -> float | None:
    invariant = row.get("notes", {}).get(f"{BATCH_INVARIANT} us")
    return row["us"] / invariant if invariant else None


@dataclass(frozen=True)
class Target:
    """One line of the table. A shape counts for the first line of its class whose `covers` is true of it.

    The geometric mean should reach `mean`, and every shape should reach `each`; None means that nothing was
    promised. If `unit` is empty, figures are peer time / our time. With `at_most`, less is better.
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


def _host(name: str, kind: str, each: float) -> Target:
    def covers(shape: Json) -> bool:
        # Older rows have no kind: they timed the same call again.
        return bool(shape.get("call", AGAIN) == kind)

    return Target(name, "host", covers, each=each, figure=lambda row: row["us"], unit="us", at_most=True)


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
    Target("weight gradients (k_grouped)", "k_grouped", _any, 1.05, 0.97),
    Target("silu_mul_quantize: share of the read ceiling", "silu_mul_quantize", _any, figure=_ceiling_share),
    Target("mqa logits, prefill", "mqa_logits", _any, 1.25, 1.05),
    Target("paged mqa logits", "paged_mqa_logits", _any, 1.20, 1.05),
    Target("paged metadata", "paged_metadata", _any),
    Target("top-k, against torch.topk", "topk", _any, each=1.00, figure=_ratio_to_any),
    Target("MoE layer, 1 to 64 tokens", "moe_layer", lambda s: s["tokens"] <= 64, 1.25, 1.00, _ratio_to_any),
    Target("MoE layer, up to 1024 tokens", "moe_layer", lambda s: s["tokens"] <= 1024, figure=_ratio_to_any),
    Target("MoE layer, more tokens", "moe_layer", _any, 1.15, figure=_ratio_to_any),
    Target("selection, from queries to indices", "indexer_select", _any, each=1.50),
]


def _names(cls: str) -> tuple[str, ...]:
    return tuple(target.name for target in TARGETS if target.cls == cls)


#: Absolute figures. A shape that counts for one of these lines still counts for the lines above.
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
        "MoE layer, up to 256 tokens: time / (1.12 x reading the weights + 8 us)",
        "moe_layer",
        lambda s: s["tokens"] <= 256,
        each=1.0,
        figure=_time_over_limit,
        at_most=True,
    ),
    Target(
        "serving over HTTP, 64 streams: decode step under load / its graph alone",
        "http",
        lambda s: s["streams"] == 64,
        each=1.1,
        figure=_step_over_replay,
        at_most=True,
    ),
    Target(
        "dense, m <= 128: usual time / time in batch-invariant mode",
        "dense",
        lambda s: s["m"] <= 128,
        figure=_batch_invariant,
    ),
    _host("host time of the same eager call again", AGAIN, 8),
    _host("host time of an eager call at a new address", NEW_ADDRESS, 12),
    _host("host time of an eager call with a new M", NEW_M, 20),
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
    """The figures of one target over one set of shapes."""

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
    def shortfall(self) -> float | None:
        """The share by which the figures miss the promise; None if nothing was promised."""
        promised = [(self.target.mean, self.mean), (self.target.each, self.worst)]
        missed = [
            (got - wanted if self.target.at_most else wanted - got) / wanted
            for wanted, got in promised
            if wanted is not None
        ]
        return max(0.0, *missed) if missed else None

    @property
    def reached(self) -> bool | None:
        """Whether the promise is kept; None if nothing was promised."""
        return None if self.shortfall is None else self.shortfall == 0


def standings(device: Json) -> Iterator[Standing]:
    """Every target that `device`'s rows say something about, with one entry for each set of shapes."""
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
    for index, set_name in sorted(figures, key=lambda key: (key[0], SETS.index(key[1]))):
        yield Standing(lines[index], set_name, tuple(figures[index, set_name]))


def table(device: Json) -> str:
    """A Markdown table: geometric mean and worst figure of every target, and the promise."""
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


@dataclass(frozen=True)
class Headline:
    """A line of the README: an op, and the names of the targets whose shapes it takes together."""

    name: str
    targets: tuple[str, ...]


HEADLINES = [
    Headline("`gemm_fp8`, up to 128 rows", ("dense, m <= 128",)),
    Headline("`gemm_fp8`, more rows", ("dense, m 129 to 1023", "dense, m >= 1024")),
    Headline("`grouped_gemm_fp8_contiguous`", _names("contiguous")),
    Headline("`grouped_gemm_fp8_masked`", _names("masked")),
    Headline(
        "`mqa_logits_fp8`, `paged_mqa_logits_fp8`", (*_names("mqa_logits"), *_names("paged_mqa_logits"))
    ),
    Headline("`fused_moe`, against the faster of vLLM's two layers", _names("moe_layer")),
    Headline("`indexer_topk`, against `torch.topk`", _names("topk")),
]


def headlines(device: Json) -> str:
    """A Markdown table of a line for each headline.

    A line is about its unseen shapes, or about its listed shapes if it has no unseen shapes.
    """
    found = list(standings(device))
    lines = [
        "| op | shapes | geometric mean | worst | targets |",
        "|---|---|---|---|---|",
    ]
    for line in HEADLINES:
        own = [at for at in found if at.target.name in line.targets]
        set_name = UNSEEN if any(at.set_name == UNSEEN for at in own) else LISTED
        own = [at for at in own if at.set_name == set_name]
        if not own:
            continue
        figures = [figure for at in own for figure in at.figures]
        mean = math.exp(sum(map(math.log, figures)) / len(figures))
        cells = [
            line.name,
            f"{len(figures)} {set_name}",
            _number(mean),
            _number(min(figures)),
            _held([at.shortfall for at in own if at.shortfall is not None]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _held(shortfalls: list[float]) -> str:
    missed = [short for short in shortfalls if short]
    if not shortfalls:
        return "-"
    if not missed:
        return "held"
    if len(shortfalls) == 1:
        return f"missed by {missed[0]:.1%}"
    return f"{len(missed)} of {len(shortfalls)} missed, by at most {max(missed):.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
