"""The results files that the tests of the benchmarks write and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "device": "h200",
    "driver": "1",
    "cuda": "13.0",
    "torch": "2",
    "commit": "abc",
    "date": "2026-01-01",
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]
