"""Every op gives the same bits in every call, whatever else the GPU does (benchmarks/repetition.py).

Races between a kernel's warps pass all other tests: they show in one of many calls, and only under memory
traffic. `--repetition-seconds 60` searches longer, and other values of `--repetition-seed` search elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.repeated import CASES
from benchmarks.repetition import SECONDS, Case, Traffic, repeat


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return Traffic(torch.device("cuda"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_same_bits_in_every_call(case: Case, traffic: Traffic, pytestconfig: pytest.Config) -> None:
    given = pytestconfig.getoption("--repetition-seconds")
    seconds = SECONDS if given is None else given
    found = repeat(case, seconds, pytestconfig.getoption("--repetition-seed"), traffic)
    assert found.differing == 0, f"{case.name}: {found}"
