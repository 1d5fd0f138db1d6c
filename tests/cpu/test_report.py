"""The tables of README.md and docs/ are what the results files give, and the generator says what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.results import ROOT, Row

DEVICE: dict[str, Any] = {
    "device": "h200",
    "device_name": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.11",
    "commit": "abc",
    "date": "2026-01-01",
}


def _device(*rows: Row) -> dict[str, Any]:
    stamped = [{**row.to_json("h200"), "date": "2026-01-01", "commit": "abc"} for row in rows]
    return {**DEVICE, "rows": stamped}


def test_the_tables_in_the_repository_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_summary_is_the_geometric_mean_of_rows_with_a_peer() -> None:
    rows = [
        Row("dense", {"m": 1}, 10.0, peers={"peer": 40.0}),
        Row("dense", {"m": 2}, 10.0, peers={"peer": 10.0}),
        Row("dense", {"m": 3}, 10.0),
        Row("masked", {"m": 3}, 10.0),
    ]
    text = report.summary([_device(*rows)])
    assert "| `gemm_fp8` | 2 | 2.00 | 1.00 | 4.00 |" in text
    assert "masked" not in text


def test_every_row_and_figure_is_in_the_full_table() -> None:
    rows = [
        Row(
            "dense",
            {"m": 1, "n": 64},
            12.345,
            flops=5e9,
            nbytes=20e6,
            peers={"peer": 24.69},
            rel_error=1.7e-3,
        ),
        Row("dense", {"m": 4096, "n": 64}, 1234.5, flops=5e9, nbytes=20e6, rel_error=1.7e-3),
    ]
    text = report.full([_device(*rows)])
    assert "| m | n | us | peer us | ratio | TFLOP/s | GB/s | share of ceiling | rel. error |" in text
    assert "| 1 | 64 | 12.3 | 24.7 | 2.00 | 405 | 1,620 | 0.36 | 1.7e-03 |" in text
    assert "| 4096 | 64 | 1,234 |  |  | 4 | 16 | 0.00 | 1.7e-03 |" in text


def test_a_changed_result_makes_a_file_stale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = report.BEGIN.format(name="t"), report.END.format(name="t")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    targets = [(page, "t", report.summary)]
    fresh = report.stale(targets, [])
    assert fresh[page].startswith("before\n") and fresh[page].endswith("after\n") and "old" not in fresh[page]
    page.write_text(fresh[page])
    assert report.stale(targets, []) == {}
    assert page in report.stale(targets, [_device(Row("dense", {"m": 1}, 1.0, peers={"peer": 1.0}))])
    with pytest.raises(ValueError, match="expected one"):
        report.rewritten("no markers", "t", "body")
