"""Class repetition: every op runs over and over, and each output is compared bit for bit with the first.

The class times nothing and has no peer. A row counts calls. Rows of one case with several seeds are all kept.
"""

from __future__ import annotations

import torch

from . import inputs, repeated_gemm, repeated_indexer, repeated_moe
from .compare import Session
from .peer import DeepGemm
from .repetition import SECONDS, Case, Traffic, repeat
from .results import RepetitionRow

CASES = [*repeated_gemm.CASES, *repeated_indexer.CASES, *repeated_moe.CASES]


class OutputsDiffer(Exception):
    """Calls with the same inputs gave different bits."""


def chosen(only: str) -> list[Case]:
    """Cases whose name holds one of the comma-separated parts of `only`; all cases if `only` is empty."""
    parts = [part.strip() for part in only.split(",") if part.strip()]
    return [case for case in CASES if not parts or any(part in case.name for part in parts)]


def run_repetition(
    session: Session,
    peer: DeepGemm | None,
    step: int,
    *,
    seconds: float = SECONDS,
    seed: int = 0,
    only: str = "",
) -> None:
    """Run the chosen cases. A case whose outputs differ gets its row and counts as failed.

    A case that raises gets no row.
    """
    cases = chosen(only)
    if not cases:
        raise ValueError(f"no case of repetition has {only!r} in its name")
    traffic = Traffic(inputs.DEVICE) if inputs.DEVICE.type == "cuda" else None
    for case in cases[::step]:
        try:
            found = repeat(case, seconds, seed, traffic)
        except Exception as error:
            session.fail(case.name, error)
            continue
        notes = {"by_traffic": found.by_traffic, "example": found.example} if found.differing else {}
        session.results.add(
            RepetitionRow(
                case.terms, found.calls, found.compared, found.differing, found.seconds, found.seed, notes
            )
        )
        print(f"{case.name}: {found}", flush=True)
        if found.differing:
            session.fail(case.name, OutputsDiffer(str(found)))
        torch.cuda.empty_cache()
