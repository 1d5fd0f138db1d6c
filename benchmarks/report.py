"""Tables and plots for the README and docs, made from benchmarks/results/*.json and never by hand.

`python -m benchmarks.report` rewrites the text between the markers of every file in `TARGETS` and draws the
plots that are not current. With `--check` it changes nothing and exits with 1 if something would change.
`--show FILE` compares the results in FILE with the targets. Only drawing needs more than the standard
library: it needs matplotlib, from the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import plots, targets
from .results import CLASSES, IN_A_ROW, LISTED, RESULTS, ROOT, UNSEEN, measured, set_of

BEGIN = "<!-- {name}: written by `make tables` -->"
END = "<!-- end of {name} -->"

Results = list[dict[str, Any]]

_TITLES = {
    "dense": "`gemm_fp8`",
    "contiguous": "`grouped_gemm_fp8_contiguous`",
    "masked": "`grouped_gemm_fp8_masked`",
    "k_grouped": "`k_grouped_gemm_fp8`",
    "silu_mul_quantize": "`silu_mul_quantize`",
    "mqa_logits": "`mqa_logits_fp8`",
    "paged_mqa_logits": "`paged_mqa_logits_fp8`",
    "paged_metadata": "`paged_mqa_logits_metadata`",
    "topk": "`indexer_topk`",
    "indexer_select": "selection from end to end",
    "moe_layer": "MoE layer",
    "host": "host time of an eager call",
    "compile": "compile of one kernel",
    "plan": "planning",
    "warmup": "warmup",
    "engine": "steps of vLLM",
    "serve": "serving",
    "full_size": "decode step with layers of full size",
    "http": "serving over HTTP",
    "repetition": "repetition",
}


def load_results(folder: Path = RESULTS) -> Results:
    """The results of every device; the device with the most rows comes first."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda device: -len(device["rows"]))


def _judged(device: dict[str, Any]) -> bool:
    """Whether the device has rows for a target."""
    return any(targets.standings(device))


def summary(results: Results) -> str:
    """The headlines of each device."""
    if not results:
        return "No device has been measured yet."
    parts = []
    for device in results:
        if not (headlines := targets.headlines(device)):
            continue
        parts.append(
            f"These are measurements on one {_name(device)}. A figure is the time of DeepGEMM, or of the "
            "peer that the line names, over ours: above 1 we are faster. (For `gemm_fp8` it is the time of "
            "the faster of DeepGEMM and torch's `scaled_mm`, whose rows are padded to a multiple of 4.) A "
            "class has targets for its mean and for its worst shape, so that a mean above 1 may still miss a "
            "target."
        )
        parts += [headlines, _sets(device)]
        if others := targets.others(device):
            parts.append(f"{others} [docs/benchmarks.md](docs/benchmarks.md#targets) has all targets.")
    return "\n\n".join(parts)


def repetition(results: Results) -> str:
    """The number of calls of all rows of class repetition, and how many outputs differed."""
    rows = [row for device in results for row in device["rows"] if row["class"] == "repetition"]
    if not rows:
        return "No device has been measured yet."
    calls, compared, differing = (
        sum(row[name] for row in rows) for name in ("calls", "compared", "differing")
    )
    dates = sorted(row["date"] for row in rows)
    return (
        f"From {dates[0]} to {dates[-1]} the ops have been called {calls:,} times, mostly during other "
        f"memory traffic. {compared:,} outputs were compared bit for bit, and "
        f"{f'{differing:,}' if differing else 'none'} "
        'differed ([docs/benchmarks.md](docs/benchmarks.md), "repetition").'
    )


def _sets(device: dict[str, Any]) -> str:
    """A sentence that explains the sets of shapes in the headlines."""
    listed = "Listed shapes were chosen by hand, and the kernels were tuned on them."
    if not any(set_of(row["shape"]) == UNSEEN for row in device["rows"]):
        return f"{listed} No unseen shapes have been measured yet."
    unseen = (
        "Unseen shapes are drawn from the hash of the measured commit. A shape on which our kernel or its "
        "peer fails or is wrong has no figure, and then a line has fewer shapes than were drawn."
    )
    return f"{unseen} {listed}" if f" {LISTED} |" in targets.headlines(device) else unseen


def accounting(results: Results) -> str:
    """Every device's results against the targets, and its plots."""
    if not results:
        return "No device has been measured yet."
    parts = []
    for device in results:
        drawn = list(plots.plots(device))
        if not drawn and not _judged(device):
            continue
        parts.append(f"This is one {_name(device)}:")
        parts.append(targets.table(device))
        for plot in drawn:
            path = plot.path.relative_to(ROOT / "docs").as_posix()
            parts.append(f"![{plot.title}: {plot.caption}]({path})")
    return "\n\n".join(parts)


def full(results: Results) -> str:
    """Every row of every class of every device."""
    if not results:
        return "No device has been measured yet."
    parts = []
    for device in results:
        parts.append(f"## {_name(device)}\n\nThe last run was {_runs([device])}.")
        for cls, rows in _by_class(device):
            parts.append(_repetition(rows) if cls == "repetition" else _table(cls, rows))
    return "\n\n".join(parts)


def engine(results: Results) -> str:
    """Each model's steps in vLLM over all batches and prompts, against each of vLLM's kinds of experts."""
    parts = []
    for device in results:
        rows = [row for row in device["rows"] if row["class"] == "engine"]
        tables = [_steps(rows, "batch", "Decode steps, batches"), _steps(rows, "prompt", "Prefill, tokens")]
        if any(tables):
            parts += [f"On one {_name(device)}:", *filter(None, tables), _measured(rows)]
    return "\n\n".join(parts) or "No device has been measured yet."


#: Columns of the table of decode steps, and the notes that they are means of.
_TOKENS = {
    "tokens equal to vLLM's": "equal tokens",
    "of two runs of vLLM": "theirs again: equal tokens",
    "difference of log p": "mean |d log p|",
}


def _steps(rows: Results, kind: str, title: str) -> str:
    """A line for each model and kind of experts, over the rows whose shape has `kind`; "" without any.

    The table of decode steps has the starts and the tokens, too.
    """
    times = ["GPU time: geometric mean", "least", "wall time: geometric mean", "least"]
    starts = ["cold", "warm"] if kind == "batch" else []
    tokens = _TOKENS if kind == "batch" else {}
    header = ["model", "vLLM's experts", title, *times, *(f"{start} start" for start in starts), *tokens]
    lines = [_line(header), _line(["---"] * len(header))]
    for model, experts in dict.fromkeys((row["shape"]["model"], row["shape"]["experts"]) for row in rows):
        own = [row for row in rows if (row["shape"]["model"], row["shape"]["experts"]) == (model, experts)]
        steps = [row for row in own if kind in row["shape"]]
        if not steps:
            continue
        ratios_of_starts = {row["shape"]["start"]: row["ratio"] for row in own if "start" in row["shape"]}
        cells = [model, experts, ", ".join(dict.fromkeys(str(row["shape"][kind]) for row in steps))]
        for time in ("gpu", "wall"):
            ratios = [row["ratio"] for row in steps if row["shape"]["time"] == time]
            cells += [_number(statistics.geometric_mean(ratios), 2), _number(min(ratios), 2)]
        cells += [_number(ratios_of_starts.get(start), 2) for start in starts]
        noted = [row.get("notes", {}) for row in steps]
        for name in tokens.values():
            figures = [notes[name] for notes in noted if name in notes]
            cells.append(_number(statistics.fmean(figures), 2) if figures else "")
        lines.append(_line(cells))
    return "\n".join(lines) if len(lines) > 2 else ""


#: (file, name of the markers, generator): one entry for each marked section.
TARGETS: list[tuple[Path, str, Callable[[Results], str]]] = [
    (ROOT / "README.md", "benchmarks", summary),
    (ROOT / "README.md", "repetition", repetition),
    (ROOT / "docs" / "vllm.md", "engine", engine),
    (ROOT / "docs" / "benchmarks.md", "targets", accounting),
    (ROOT / "docs" / "benchmarks.md", "results", full),
]


def _by_class(device: dict[str, Any]) -> Iterable[tuple[str, Results]]:
    """The rows of each class, sorted by their set of shapes."""
    for cls in CLASSES:
        rows = [row for row in device["rows"] if row["class"] == cls]
        for name in dict.fromkeys(set_of(row["shape"]) for row in rows):
            yield cls, [row for row in rows if set_of(row["shape"]) == name]


def _name(device: dict[str, Any]) -> str:
    return str(device.get("device_name", device["device"].upper()))


def _versions(run: dict[str, Any]) -> str:
    """The versions that a run had; "" of an older row, which does not have them."""
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch"}
    return ", ".join(f"{text} {run[name]}" for name, text in names.items() if name in run)


def _runs(runs: Results) -> str:
    """The dates and commits of rows, or of a file's last run, with the versions that are known."""
    by_versions: dict[str, Results] = {}
    for run in runs:
        by_versions.setdefault(_versions(run), []).append(run)
    return "; ".join(
        measured(some) + (f" ({versions})" if versions else "") for versions, some in by_versions.items()
    )


def _table(cls: str, rows: Results) -> str:
    dimensions = list(dict.fromkeys(name for row in rows for name in row["shape"] if name != "set"))
    set_name = set_of(rows[0]["shape"])
    title = _TITLES[cls] + ("" if set_name == LISTED else f", {set_name} shapes")
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    figures = [name for name in ("tflops", "gbs", "ceiling_share") if any(row[name] for row in rows)]
    checked = any(row["rel_error"] is not None for row in rows)
    header = [*dimensions, "us", *(f"{peer} us" for peer in peers)]
    header += ["ratio"] if peers else []
    header += [_FIGURES[name] for name in figures] + (["rel. error"] if checked else [])
    lines = [f"### {title}", "", _line(header), _line(["---"] * len(header))]
    for row in rows:
        cells = [str(row["shape"].get(name, "")) for name in dimensions]
        cells += [_number(row["us"]), *(_number(row["peers"].get(peer)) for peer in peers)]
        cells += [_number(row["ratio"], 2)] if peers else []
        cells += [_number(row[name], 2 if name == "ceiling_share" else 0) for name in figures]
        cells += [f"{row['rel_error']:.1e}" if row["rel_error"] is not None else ""] if checked else []
        lines.append(_line(cells))
    return "\n".join([*lines, "", *_shares(rows), *_clients(rows), _measured(rows)])


#: Notes of a row of class http -> columns.
_SEEN = (
    "tokens/s",
    "first token, p50 ms",
    "first token, p99 ms",
    "between tokens, p50 ms",
    "between tokens, p99 ms",
)


def _clients(rows: Results) -> list[str]:
    """A second table for rows that tell what clients of a server see; the last line is empty."""
    if "tokens/s" not in rows[0].get("notes", {}):
        return []
    header = ["streams", "answer", "steps", *_SEEN, "decode step, us", "replay, us"]
    intro = "What clients see, with graphs and without."
    if any(row["notes"].get("replays") != IN_A_ROW for row in rows):
        intro += " `replay` has a launch and a synchronization, for which the server's step does not wait."
    lines = [intro, "", _line(header), _line(["---"] * len(header))]
    for row in rows:
        for steps, notes in (("graph", row["notes"]), ("eager", row["notes"]["eager"])):
            cells = [str(row["shape"]["streams"]), str(row["shape"]["answer"]), steps]
            lines.append(_line([*cells, *(_number(notes.get(name)) for name in header[3:])]))
    return [*lines, ""]


def _shares(rows: Results) -> list[str]:
    """A second table for rows that have the shares of kinds of kernels; the last line is empty."""
    kinds = plots.share_kinds(rows)
    if not kinds:
        return []
    header = ["batch", *kinds]
    lines = ["Shares of a step's time:", "", _line(header), _line(["---"] * len(header))]
    for row in rows:
        found = row["notes"]["shares"]
        cells = (f"{found[kind]:.1%}" if kind in found else "" for kind in kinds)
        lines.append(_line([str(row["shape"]["batch"]), *cells]))
    return [*lines, ""]


def _repetition(rows: Results) -> str:
    """The rows' sums for each op."""
    header = ["op", "cases", "seeds", "calls", "compared", "differing"]
    lines = [f"### {_TITLES['repetition']}", ""]
    lines += [
        "Calls are repeated beside memory traffic; each compared output should equal the first bit for bit.",
        "",
    ]
    lines += [_line(header), _line(["---"] * len(header))]
    ops = list(dict.fromkeys(row["shape"]["op"] for row in rows))
    for title, members in [*((op, [op]) for op in ops), ("all", ops)]:
        some = [row for row in rows if row["shape"]["op"] in members]
        counts = [len({json.dumps(row["shape"]) for row in some}), len({row["seed"] for row in some})]
        counts += [sum(row[name] for row in some) for name in ("calls", "compared", "differing")]
        lines.append(_line([title, *(f"{count:,}" for count in counts)]))
    return "\n".join([*lines, "", _measured(rows)])


def _measured(rows: Results) -> str:
    pdl = (
        " DeepGEMM ran without programmatic dependent launch." if any(map(targets.without_pdl, rows)) else ""
    )
    return f"Measured {_runs(rows)}.{pdl}"


_FIGURES = {"tflops": "TFLOP/s", "gbs": "GB/s", "ceiling_share": "share of ceiling"}


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int | None = None) -> str:
    """A number with thousands separators; without `digits`, with three significant figures."""
    if value is None:
        return ""
    if digits is None:
        digits = max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0
    return f"{value:,.{digits}f}"


def rewritten(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers of `name`; raises ValueError if a marker is missing."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one {begin!r} and after it one {end!r}")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"


def stale(targets: Iterable[tuple[Path, str, Callable[[Results], str]]], results: Results) -> dict[Path, str]:
    """Files whose marked section differs from what `results` give, with their new text."""
    texts: dict[Path, str] = {}
    for path, name, generate in targets:
        text = texts.get(path) or path.read_text()
        texts[path] = rewritten(text, name, generate(results))
    return {path: text for path, text in texts.items() if text != path.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if anything is stale")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print how one results file stands against the targets"
    )
    options = parser.parse_args()
    if options.show is not None:
        try:
            shown = targets.table(json.loads(options.show.read_text()))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{options.show} is no results file: {type(error).__name__}: {error}")
        print(shown)
        return 0
    results = load_results()
    texts = stale(TARGETS, results)
    drawings = [plot for device in results for plot in plots.plots(device) if not plot.is_current()]
    changed = [*texts, *(plot.path for plot in drawings)]
    if not options.check:
        for path, text in texts.items():
            path.write_text(text)
        for plot in drawings:
            plots.draw(plot)
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {'stale: run `make tables`' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
