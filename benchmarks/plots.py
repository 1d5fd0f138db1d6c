"""Roofline-style plots of the GEMM classes, drawn from a results file into docs/plots/.

Against the number of rows, a plot shows which share of the device's read ceiling and of its arithmetic
ceiling we and the peers reach. Only `draw` needs matplotlib (the `bench` extra). A plot carries a digest of
its figures, so a check that the plot is current does not need matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import CEILINGS, ROOT, Ceiling

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


@dataclass(frozen=True)
class Series:
    """One contestant's points: rows, share of the read ceiling, share of the arithmetic ceiling."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Plot:
    path: Path
    title: str
    x_label: str
    series: tuple[Series, ...]

    def digest(self) -> str:
        data = json.dumps([_VERSION, self.title, self.x_label, [(s.name, s.points) for s in self.series]])
        return f"figures {hashlib.sha256(data.encode()).hexdigest()[:16]}"

    def is_current(self) -> bool:
        return self.path.exists() and self.digest() in self.path.read_text()


def plots(device: dict[str, Any], folder: Path = FOLDER) -> Iterator[Plot]:
    """One plot for each GEMM class that has rows; none for a device whose ceilings were not measured."""
    ceiling = CEILINGS.get(device["device"])
    if ceiling is None:
        return
    name = device.get("device_name", device["device"])
    for cls, (op, dimension) in _CLASSES.items():
        rows = [row for row in device["rows"] if row["class"] == cls and row["gbs"] and row["tflops"]]
        if rows:
            label = "rows (m)" if dimension == "m" else "mean rows an expert"
            series = tuple(_series(rows, dimension, ceiling))
            yield Plot(folder / f"{device['device']}_{cls}.svg", f"{op}, {name}", label, series)


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
        figure = Figure(figsize=(8, 2.9), layout="constrained")
        figure.suptitle(plot.title, fontsize=10)
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for column, (axes, ceiling) in enumerate(zip(panels, ("read", "arithmetic"), strict=True), 1):
            # Our series is drawn last, over the other series.
            for index, series in reversed(list(enumerate(plot.series))):
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
            axes.set_xlabel(plot.x_label)
            axes.set_ylabel(f"share of the {ceiling} ceiling")
            axes.grid(alpha=0.25)
        panels[0].legend(fontsize=8, frameon=False)
        plot.path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": plot.digest()}
        figure.savefig(plot.path, format="svg", metadata=metadata)
