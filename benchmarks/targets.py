"""The target of each class against its peer, and how far the results are from it.

This module needs only the standard library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import unseen_shapes
from .results import BATCH_INVARIANT, IN_A_ROW, LISTED, SETS, UNSEEN, measured, set_of, shape_dict

Json = dict[str, Any]

#: Kinds of eager calls that class host times.
AGAIN, NEW_ADDRESS, NEW_M = "again", "new address", "new m"

#: By default targets are against this peer; a row that was timed without it says nothing about them.
_PEER = "deep_gemm"

#: The mark of lines with rows that were timed before the peer had programmatic dependent launch.
_NO_PDL = "no PDL"
_NO_PDL_NOTE = (
    f'"{_NO_PDL}": DeepGEMM ran without programmatic dependent launch, which engines turn on. On the listed '
    "shapes it makes DeepGEMM's dense GEMMs 1.5% faster and its grouped GEMMs 0.0 to 0.1%."
)


def _with_peer(row: Json) -> bool:
    return any(name.startswith(_PEER) for name in row.get("peers", ()))


def without_pdl(row: Json) -> bool:
    """Whether DeepGEMM was timed in this row, but without programmatic dependent launch."""
    return _with_peer(row) and not row.get("pdl", False)


def _ratio(row: Json) -> float | None:
    return row["ratio"] if _with_peer(row) else None


def _ratio_to_any(row: Json) -> float | None:
    return row["ratio"]


def _ceiling_share(row: Json) -> float | None:
    return row["ceiling_share"]


def _time_over_limit(row: Json) -> float | None:
    """The time of a layer over the limit for it, which allows 8 us for all that is not reading weights."""
    floor = row.get("notes", {}).get("floor us")
    return row["us"] / (1.12 * floor + 8) if floor else None


def _step_over_replay(row: Json) -> float | None:
    """A decode step under load over the replayed graph alone; older rows timed that graph in another way."""
    notes = row.get("notes", {})
    return row["us"] / notes["replay, us"] if notes.get("replays") == IN_A_ROW else None


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


def _decode_steps(experts: str) -> Target:
    """Steps of a real vLLM with the plug-in against steps without it, with these experts of vLLM."""

    def covers(shape: Json) -> bool:
        return "batch" in shape and shape["time"] == "gpu" and shape["experts"] == experts

    name = f"decode step of vLLM 0.24, GPU time, against its {experts} experts"
    return Target(name, "engine", covers, 1.10, 1.00, _ratio_to_any)


TARGETS = [
    Target("dense, m <= 128", "dense", lambda s: s["m"] <= 128, 1.50, 1.00),
    Target("dense, m 129 to 1023", "dense", lambda s: s["m"] < 1024, 1.15, 0.98),
    Target("dense, m >= 1024", "dense", lambda s: s["m"] >= 1024, 1.05, 0.98),
    Target("contiguous (psum, offsets), 1 to 64 rows an expert", "contiguous", _few_contiguous, 1.25, 1.05),
    Target("contiguous (m_indices), below 64 rows", "contiguous", lambda s: s["rows_per_expert"] < 64),
    Target("contiguous, 64 to 256 rows", "contiguous", lambda s: s["rows_per_expert"] <= 256, 1.10, 0.98),
    Target("contiguous, above 256 rows", "contiguous", _any, 1.05, 0.98),
    Target("masked, up to 64 rows an expert", "masked", lambda s: s["rows_per_expert"] <= 64, 1.17, 1.00),
    Target("masked, above 64 rows", "masked", _any, 1.10, 0.98),
    Target("weight gradients (k_grouped)", "k_grouped", _any, 1.05, 0.97),
    Target("silu_mul_quantize: share of the read ceiling", "silu_mul_quantize", _any, figure=_ceiling_share),
    Target("mqa logits, prefill", "mqa_logits", _any, 1.25, 1.05),
    Target("paged mqa logits", "paged_mqa_logits", _any, 1.20, 1.03),
    Target("paged metadata", "paged_metadata", _any),
    Target("top-k, against torch.topk, a generic top-k", "topk", _any, each=1.00, figure=_ratio_to_any),
    Target("MoE layer, 1 to 64 tokens", "moe_layer", lambda s: s["tokens"] <= 64, 1.25, 1.00, _ratio_to_any),
    Target("MoE layer, up to 1024 tokens", "moe_layer", lambda s: s["tokens"] <= 1024, figure=_ratio_to_any),
    Target("MoE layer, more tokens", "moe_layer", _any, 1.15, figure=_ratio_to_any),
    Target("selection, against DeepGEMM, masks and torch.topk", "indexer_select", _any, each=1.50),
    _decode_steps("deep_gemm"),
    _decode_steps("triton"),
]


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


def _names(cls: str) -> tuple[str, ...]:
    return tuple(target.name for target in [*TARGETS, *ABSOLUTE] if target.cls == cls)


def _lines(cls: str, shape: Json) -> list[Target]:
    """The targets that a shape counts for."""
    first = next((t for t in TARGETS if t.cls == cls and t.covers(shape)), None)
    return [*filter(None, [first]), *(t for t in ABSOLUTE if t.cls == cls and t.covers(shape))]


def _mean(figures: Sequence[float]) -> float | None:
    """The geometric mean; None without figures."""
    return math.exp(sum(map(math.log, figures)) / len(figures)) if figures else None


@dataclass(frozen=True)
class Standing:
    """The figures of one target over one set of shapes, and their rows.

    `drawn`: the number of shapes that their commit drew; None if the set is not drawn from a commit. There is
    no figure if all of them failed.
    """

    target: Target
    set_name: str
    figures: tuple[float, ...]
    rows: tuple[Json, ...]
    drawn: int | None

    @property
    def mean(self) -> float | None:
        return _mean(self.figures)

    @property
    def worst(self) -> float | None:
        return max(self.figures, default=None) if self.target.at_most else min(self.figures, default=None)

    @property
    def shortfall(self) -> float | None:
        """The share by which the figures miss the promise; 1 without figures, None without a promise."""
        promised = [(self.target.mean, self.mean), (self.target.each, self.worst)]
        missed = [
            1.0 if got is None else (got - wanted if self.target.at_most else wanted - got) / wanted
            for wanted, got in promised
            if wanted is not None
        ]
        return max(0.0, *missed) if missed else None

    @property
    def reached(self) -> bool | None:
        """Whether the promise is kept; None if nothing was promised."""
        return None if self.shortfall is None else self.shortfall == 0


def standings(device: Json) -> Iterator[Standing]:
    """Every target that `device`'s rows say something about, with one entry for each set of shapes.

    Rows of a class with its peer also say something about targets whose drawn shapes have all failed.
    """
    groups: dict[tuple[str, str], list[Json]] = {}
    for row in device["rows"]:
        groups.setdefault((row["class"], set_of(row["shape"])), []).append(row)
    found = []
    for (cls, set_name), rows in groups.items():
        figures: dict[Target, list[tuple[float, Json]]] = {}
        for row in rows:
            for target in _lines(cls, row["shape"]):
                figure = target.figure(row)
                if figure is not None:
                    figures.setdefault(target, []).append((figure, row))
        drawn = _drawn(cls, set_name, rows)
        if any(target in TARGETS for target in figures):
            figures = {target: [] for target in drawn if target in TARGETS} | figures
        for target, pairs in figures.items():
            values, own = tuple(value for value, _ in pairs), tuple(row for _, row in pairs)
            found.append(Standing(target, set_name, values, own, drawn.get(target)))
    lines = [*TARGETS, *ABSOLUTE]
    yield from sorted(found, key=lambda at: (lines.index(at.target), SETS.index(at.set_name)))


def _drawn(cls: str, set_name: str, rows: Sequence[Json]) -> Counter[Target]:
    """How many of the shapes that the rows' commits drew count for each target; empty if none are drawn."""
    draw = unseen_shapes.DRAWS.get(set_name, {}).get(cls)
    if draw is None:
        return Counter()
    shapes = [shape_dict(shape) for commit in {row["commit"] for row in rows} for shape in draw(commit)]
    return Counter(target for shape in shapes for target in _lines(cls, shape))


def _shapes(found: Sequence[Standing]) -> str:
    """The number of shapes of one set; of a drawn set also the number of shapes that were drawn."""
    count = str(sum(len(at.figures) for at in found))
    drawn = [at.drawn for at in found if at.drawn is not None]
    return f"{count} of {sum(drawn)} {found[0].set_name}" if drawn else f"{count} {found[0].set_name}"


def _runs(found: Sequence[Standing]) -> str:
    """The dates and commits of the rows, marked if their ratio is against DeepGEMM without PDL."""
    marked = any(at.target.figure is _ratio and without_pdl(row) for at in found for row in at.rows)
    return measured(row for at in found for row in at.rows) + (f", {_NO_PDL}" if marked else "")


def _table(header: str, lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with a note on the marks of its lines."""
    rule = "|" + "---|" * header.count(" | ") + "---|"
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    note = ["", _NO_PDL_NOTE] if any(_NO_PDL in row for row in rows) else []
    return "\n".join([f"| {header} |", rule, *rows, *note])


def table(device: Json) -> str:
    """A Markdown table: geometric mean and worst figure of every target, and the promise."""
    lines = []
    for at in standings(device):
        target = at.target
        cells = [
            target.name,
            _shapes([at]),
            f"{_number(at.mean)} {target.unit}".rstrip(),
            _number(target.mean),
            f"{_number(at.worst)} {target.unit}".rstrip(),
            ("at most " if target.at_most and target.each is not None else "") + _number(target.each),
            {True: "yes", False: "no", None: "-"}[at.reached],
            _runs([at]),
        ]
        lines.append(cells)
    header = "class | shapes | geometric mean | target | worst | bound for each | reached | measured"
    return _table(header, lines)


@dataclass(frozen=True)
class Headline:
    """A line of the README: an op, and the names of its targets. The line takes their shapes together.

    Its figures are those of targets against a peer; absolute figures only count as reached or missed.
    """

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
    Headline(
        "`fused_moe`, against the faster of vLLM 0.24's DeepGEMM and Triton experts", _names("moe_layer")
    ),
    Headline("decode step of vLLM 0.24, against its Triton experts", (_decode_steps("triton").name,)),
    Headline("`indexer_topk`, against `torch.topk`, a generic top-k", _names("topk")),
]


def headlines(device: Json) -> str:
    """A Markdown table of a line for each headline; "" without lines.

    A line is about its unseen shapes, or about its listed shapes if it has no unseen shapes.
    """
    found = list(standings(device))
    lines = []
    for line in HEADLINES:
        own = [at for at in found if at.target.name in line.targets]
        set_name = UNSEEN if any(at.set_name == UNSEEN for at in own) else LISTED
        own = [at for at in own if at.set_name == set_name]
        compared = [at for at in own if at.target in TARGETS]
        if not compared:
            continue
        figures = [figure for at in compared for figure in at.figures]
        cells = [
            line.name,
            _shapes(compared),
            _number(_mean(figures)),
            _number(min(figures, default=None)),
            _held([at.shortfall for at in own if at.shortfall is not None]),
            _runs(compared),
        ]
        lines.append(cells)
    return _table("op | shapes | geometric mean | worst | targets | measured", lines) if lines else ""


def others(device: Json) -> str:
    """A sentence on the targets that have no headline; "" without any."""
    with_headline = {name for line in HEADLINES for name in line.targets}
    own = [at for at in standings(device) if at.target.name not in with_headline and at.reached is not None]
    if not own:
        return ""
    missed = list(dict.fromkeys(at.target.name for at in own if not at.reached))
    count = len({at.target.name for at in own})
    if not missed:
        return f"All {count} targets without a line here are held."
    verb = "is" if len(missed) == 1 else "are"
    return (
        f"{count} more targets have no line here. {len(missed)} of them {verb} missed: {'; '.join(missed)}."
    )


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
