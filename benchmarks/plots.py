"""Plots of the GEMM classes and of class full_size, drawn from a results file into docs/plots/.

Against the number of rows, a GEMM's plot shows which share of the device's read ceiling and of its arithmetic
ceiling we and the peers reach. The plot of class full_size shows where the time of a step goes. Only `draw`
needs matplotlib (the `bench` extra). A plot carries a digest of its figures, so a check that the plot is
current does not need matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .results import CEILINGS, ROOT, Ceiling
from .shares import IDLE

FOLDER = ROOT / "docs" / "plots"

#: A part of the digest: raise it if the drawing changes.
_VERSION = 1

_CLASSES = {
    "dense": ("gemm_fp8", "m"),
    "contiguous": ("grouped_gemm_fp8_contiguous", "rows_per_expert"),
    "masked": ("grouped_gemm_fp8_masked", "rows_per_expert"),
}
_OURS = "moe_fp8"
_COLOURS = ["#0b62a4", "#e07b00", "#8a8a8a"]
_MARKERS = ["o", "x", "+"]

#: The colours of kinds of kernels; there are at least as many as kinds.
_OURS_COLOURS = [
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7",
    "#86bcb6", "#d4a6c8", "#8cd17d", "#a0cbe8", "#ffbe7d",
]  # fmt: skip
_GREYS = ["#8a8a8a", "#a3a3a3", "#b5b5b5", "#c6c6c6", "#d3d3d3", "#dedede", "#e8e8e8"]
#: The smallest share with its figure in the bar.
_LEGIBLE = 0.05


@dataclass(frozen=True)
class Series:
    """One contestant's points: rows, share of the read ceiling, share of the arithmetic ceiling."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Plot(ABC):
    """A file, its title, and what `caption` says that it shows."""

    path: Path
    title: str

    caption: ClassVar[str]
    inches: ClassVar[tuple[float, float]] = (8, 2.9)

    @abstractmethod
    def figures(self) -> list[Any]:
        """What the drawing depends on, apart from the title."""

    @abstractmethod
    def draw_on(self, figure: Any) -> None:
        """Draw the figures on matplotlib's `figure`."""

    def digest(self) -> str:
        data = json.dumps([_VERSION, self.title, *self.figures()])
        return f"figures {hashlib.sha256(data.encode()).hexdigest()[:16]}"

    def is_current(self) -> bool:
        return self.path.exists() and self.digest() in self.path.read_text()


@dataclass(frozen=True)
class CeilingPlot(Plot):
    x_label: str
    series: tuple[Series, ...]

    caption = "share of the ceilings"

    def figures(self) -> list[Any]:
        return [self.x_label, [(s.name, s.points) for s in self.series]]

    def draw_on(self, figure: Any) -> None:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for column, (axes, ceiling) in enumerate(zip(panels, ("read", "arithmetic"), strict=True), 1):
            # Our series is drawn last, over the other series.
            for index, series in reversed(list(enumerate(self.series))):
                style = min(index, len(_COLOURS) - 1)
                axes.plot(
                    [point[0] for point in series.points],
                    [point[column] for point in series.points],
                    linestyle="none",
                    marker=_MARKERS[style],
                    markersize=4.5,
                    alpha=0.8,
                    color=_COLOURS[style],
                    label=series.name,
                )
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 1)
            axes.set_xlabel(self.x_label)
            axes.set_ylabel(f"share of the {ceiling} ceiling")
            axes.grid(alpha=0.25)
        panels[0].legend(fontsize=8, frameon=False)


@dataclass(frozen=True)
class SharePlot(Plot):
    """A bar for each label, with the shares of `kinds` in their order."""

    kinds: tuple[str, ...]
    bars: tuple[tuple[str, tuple[float, ...]], ...]

    caption = "share of each kind of kernel in a step"
    inches = (8, 3.6)

    def figures(self) -> list[Any]:
        return [self.kinds, self.bars]

    def draw_on(self, figure: Any) -> None:
        axes = figure.subplots()
        labels = [label for label, _ in self.bars]
        reached = [0.0] * len(labels)
        for index, (kind, colour) in enumerate(zip(self.kinds, _kind_colours(self.kinds), strict=True)):
            widths = [shares[index] for _, shares in self.bars]
            drawn = axes.barh(
                labels, widths, left=reached, color=colour, edgecolor="white", linewidth=0.4, label=kind
            )
            texts = [f"{width:.0%}" if width >= _LEGIBLE else "" for width in widths]
            axes.bar_label(drawn, texts, label_type="center", fontsize=7)
            reached = [left + width for left, width in zip(reached, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the time of a step")
        figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)


def _kind_colours(kinds: Sequence[str]) -> Iterator[str]:
    """Colours for our kernels, greys for torch's, and almost white for no kernel at all."""
    ours, greys = iter(_OURS_COLOURS), iter(_GREYS)
    for kind in kinds:
        yield "#f4f4f4" if kind == IDLE else next(greys if kind.startswith("torch") else ours)


def plots(device: dict[str, Any], folder: Path = FOLDER) -> Iterator[Plot]:
    """One plot for each GEMM class that has rows, if the device's ceilings were measured, and of class
    full_size if it has rows with shares."""
    ceiling = CEILINGS.get(device["device"])
    name = device.get("device_name", device["device"])
    for cls, (op, dimension) in _CLASSES.items():
        rows = [row for row in device["rows"] if row["class"] == cls and row["gbs"] and row["tflops"]]
        if rows and ceiling is not None:
            label = "rows (m)" if dimension == "m" else "mean rows an expert"
            series = tuple(_series(rows, dimension, ceiling))
            yield CeilingPlot(folder / f"{device['device']}_{cls}.svg", f"{op}, {name}", label, series)
    rows = [row for row in device["rows"] if row["class"] == "full_size"]
    if kinds := share_kinds(rows):
        bars = tuple(
            (
                f"batch {row['shape']['batch']}",
                tuple(row["notes"]["shares"].get(kind, 0.0) for kind in kinds),
            )
            for row in rows
        )
        title = f"decode step of {rows[0]['shape']['layers']} layers of full size, {name}"
        yield SharePlot(folder / f"{device['device']}_full_size.svg", title, kinds, bars)


def share_kinds(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The kinds of kernels that have a share in any row: ours, torch's, none; each the largest first."""
    sums: dict[str, float] = {}
    for row in rows:
        for kind, share in row.get("notes", {}).get("shares", {}).items():
            sums[kind] = sums.get(kind, 0.0) + share
    found = [kind for kind, share in sums.items() if share > 0]
    return tuple(sorted(found, key=lambda kind: (kind == IDLE, kind.startswith("torch"), -sums[kind])))


def _series(rows: list[dict[str, Any]], dimension: str, ceiling: Ceiling) -> Iterator[Series]:
    peers = dict.fromkeys(peer for row in rows for peer in row["peers"])
    for name in (_OURS, *peers):
        points = []
        for row in rows:
            us = row["us"] if name == _OURS else row["peers"].get(name)
            if us is not None:
                slower = row["us"] / us
                read = row["gbs"] * slower / ceiling.read_gbs
                arithmetic = row["tflops"] * slower / ceiling.fp8_tflops
                points.append((row["shape"][dimension], round(read, 4), round(arithmetic, 4)))
        yield Series(name, tuple(sorted(points)))


def draw(plot: Plot) -> None:
    """Write `plot.path`. The same figures give the same bytes under one version of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe_fp8", "font.size": 9}):
        figure = Figure(figsize=plot.inches, layout="constrained")
        figure.suptitle(plot.title, fontsize=10)
        plot.draw_on(figure)
        plot.path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": plot.digest()}
        figure.savefig(plot.path, format="svg", metadata=metadata)
