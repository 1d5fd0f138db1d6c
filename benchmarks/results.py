"""The results file of one device: rows of many classes, each class from one run.

This module needs only the standard library.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

LISTED, DEVELOPMENT, UNSEEN, FEW_ROUNDS = SETS = ("listed", "development", "unseen", "few_rounds")

#: The sets that are drawn from the hash of the measured commit.
OF_A_COMMIT = (UNSEEN, FEW_ROUNDS)

#: The contestant that is our own op with the config of the batch-invariant mode.
BATCH_INVARIANT = "batch-invariant"

#: The note "replays" of a row of class http whose graph was replayed in a row. Without this note, each replay
#: was launched and waited for alone.
IN_A_ROW = "in a row"

#: Facts that the rows of a file share; all other facts belong to a run.
_OF_THE_DEVICE = ("device", "device_name")

CLASSES = (
    "dense",
    "contiguous",
    "masked",
    "k_grouped",
    "silu_mul_quantize",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_metadata",
    "topk",
    "indexer_select",
    "moe_layer",
    "host",
    "compile",
    "plan",
    "warmup",
    "engine",
    "serve",
    "full_size",
    "http",
    "repetition",
)


@dataclass(frozen=True)
class Ceiling:
    """Upper bounds of a device: read bandwidth in GB/s and dense FP8 in TFLOP/s.

    Streaming loads measure the bandwidth; the datasheet gives the arithmetic.
    """

    read_gbs: float
    fp8_tflops: float


#: A device without a measured read bandwidth has no entry, and its rows have no ceiling share.
CEILINGS = {"h200": Ceiling(read_gbs=4550, fp8_tflops=1979)}


@dataclass
class Row:
    """One timed shape. `us` is our time, `peers` maps a peer to its time, `rel_error` is against float64.

    `shape["set"]` exists if the shape belongs to another set than `listed`. `own_bytes` are those of `nbytes`
    that no other call of the rotation moves, or 0 if all are. If `warm`, calls found inputs in the L2, so the
    row has no bandwidth and no share of a ceiling.
    """

    cls: str
    shape: dict[str, Any]
    us: float
    flops: float = 0.0
    nbytes: float = 0.0
    peers: dict[str, float] = field(default_factory=dict)
    rel_error: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    own_bytes: float = 0.0
    warm: bool = False

    def to_json(self, device: str) -> dict[str, Any]:
        row: dict[str, Any] = {"class": self.cls, "shape": self.shape, "us": four_digits(self.us)}
        row["tflops"] = four_digits(self.flops / self.us / 1e6) if self.flops else None
        row["gbs"] = four_digits(self.nbytes / self.us / 1e3) if self.nbytes and not self.warm else None
        row["ceiling_share"] = self._ceiling_share(CEILINGS.get(device))
        row["peers"] = {name: four_digits(us) for name, us in self.peers.items()}
        row["ratio"] = four_digits(min(self.peers.values()) / self.us) if self.peers else None
        row["rel_error"] = four_digits(self.rel_error) if self.rel_error is not None else None
        if self.notes:
            row["notes"] = self.notes
        return row

    def _ceiling_share(self, ceiling: Ceiling | None) -> float | None:
        """The least time for the bytes and the arithmetic, divided by the measured time."""
        if ceiling is None or self.warm or not (self.flops or self.nbytes):
            return None
        floor = max(self.nbytes / ceiling.read_gbs / 1e3, self.flops / ceiling.fp8_tflops / 1e6)
        return four_digits(floor / self.us)


@dataclass
class RepetitionRow:
    """One case that was called over and over: how many outputs were compared, and how many were wrong."""

    shape: dict[str, Any]
    calls: int
    compared: int
    differing: int
    seconds: float
    seed: int
    notes: dict[str, Any] = field(default_factory=dict)

    cls = "repetition"

    def to_json(self, device: str) -> dict[str, Any]:
        row: dict[str, Any] = {"class": self.cls, **asdict(self)}
        if not self.notes:
            del row["notes"]
        return row


def set_of(shape: dict[str, Any]) -> str:
    """The name of the set of shapes that a row's shape belongs to."""
    return str(shape.get("set", LISTED))


def shape_dict(shape: Any) -> dict[str, Any]:
    """A shape's dimensions by name."""
    if not is_dataclass(shape) or isinstance(shape, type):
        raise TypeError(f"expected a shape dataclass, got {shape!r}")
    return asdict(shape)


class ResultsFile:
    """The results file `path`; every `add` writes the file again.

    The first new row of a class and set removes the rows that an earlier run left there, so the rows of a
    class and set always come from one run. In class moe_layer it removes those of the same model, and in
    class engine those of the same model, experts and kind, which is decode, prefill or start. In class
    repetition it removes only the row of the same case and seed. All other rows stay.
    A row also gets the facts of its run; the head of the file has those of the last run.
    Raises ValueError if the file belongs to another device.
    """

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path = path
        self.environment = environment
        self._begun: set[tuple[str, ...]] = set()
        self._rows: list[dict[str, Any]] = []
        if path.exists():
            data = json.loads(path.read_text())
            if data["device"] != environment["device"]:
                raise ValueError(f"{path} holds results of {data['device']}, this is {environment['device']}")
            names = [facts.get("device_name") for facts in (data, environment)]
            if None not in names and names[0] != names[1]:  # such as an H100 PCIe beside an H100 SXM
                raise ValueError(f"{path} holds results of {names[0]}, this is {names[1]}: give --out")
            self._rows = data["rows"]

    def add(self, row: Row | RepetitionRow) -> dict[str, Any]:
        """Add one row and write the file; returns the row as written."""
        if row.cls not in CLASSES:
            raise ValueError(f"unknown class {row.cls!r}: one of {', '.join(CLASSES)}")
        written = row.to_json(self.environment["device"])
        group = _group(written)
        if group not in self._begun:
            self._begun.add(group)
            self._rows = [old for old in self._rows if _group(old) != group]
        written |= {name: fact for name, fact in self.environment.items() if name not in _OF_THE_DEVICE}
        self._rows.append(written)
        self._rows.sort(key=lambda old: (CLASSES.index(old["class"]), SETS.index(set_of(old["shape"]))))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        lines = ",\n".join("  " + json.dumps(old) for old in self._rows)
        head = json.dumps(self.environment, indent=1)[:-2]
        temporary.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
        os.replace(temporary, self.path)
        return written


def _group(row: dict[str, Any]) -> tuple[str, ...]:
    """The group of a row; the rows of one group are replaced together."""
    group = (row["class"], set_of(row["shape"]))
    if row["class"] == RepetitionRow.cls:
        return *group, json.dumps(row["shape"], sort_keys=True), str(row["seed"])
    if row["class"] == "moe_layer":
        return *group, row["shape"]["model"]
    if row["class"] == "engine":
        shape = row["shape"]
        kind = next(kind for kind in ("batch", "prompt", "start") if kind in shape)
        return *group, shape["model"], shape["experts"], kind
    return group


def device_slug(name: str) -> str:
    """The name of a device's results file: 'NVIDIA H100 80GB HBM3' -> 'h100'."""
    for word in name.lower().replace("-", " ").split():
        if re.fullmatch(r"[a-z]+\d+", word):
            return word
    return "_".join(name.lower().split())


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def git_commit() -> str:
    """The measured commit, with '-dirty' if the tree differs from it; 'unknown' outside a clone."""
    return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown"


def full_commit(commit: str | None) -> str:
    """The full hash of the measured commit: `commit`, or the commit that is checked out.

    Raises ValueError if `commit` is neither a full hash nor known to git. Without `commit` it raises
    ValueError if the measured files differ from the commit that is checked out.
    """
    if commit is not None and re.fullmatch(r"[0-9a-f]{40}", commit):
        return commit
    if commit is None and _git(
        "status", "--porcelain", "--", "moe_fp8", "benchmarks", ":!benchmarks/results"
    ):
        raise ValueError("these shapes are drawn from a commit's hash: commit the changes, or give --commit")
    found = _git("rev-parse", "--verify", "--quiet", f"{commit or 'HEAD'}^{{commit}}")
    if not found:
        raise ValueError(
            f"git finds no commit {commit or 'HEAD'}: give --commit the full hash of the measured commit"
        )
    return found


def _git(*arguments: str) -> str:
    """The output of git in this checkout; "" if git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def measured(rows: Iterable[dict[str, Any]]) -> str:
    """The dates of the rows, each with its commits: "2026-01-01 `0123456`, `89abcde`; 2026-01-02 ..."."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        short = re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", row["commit"])
        if short not in commits.setdefault(row["date"], []):
            commits[row["date"]].append(short)
    return "; ".join(f"{date} `{'`, `'.join(sorted(found))}`" for date, found in sorted(commits.items()))


def four_digits(value: float) -> float:
    """The value rounded to four significant digits, because further digits are not reproducible."""
    return float(f"{value:.4g}")
