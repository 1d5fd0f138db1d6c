"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

import pytest

from moe_fp8.ops import keys
from tests.reachable_kernels import ReachableKernels, compile_reachable


@pytest.fixture(scope="session")
def reachable_kernels() -> ReachableKernels:
    """Every kernel that a call can reach, compiled once for all tests that look at the kernels."""
    return compile_reachable()


@pytest.fixture(params=[True, False], ids=["guards", "python"])
def either_comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with torch's guards, and without them, because some versions of torch have none."""
    if not request.param:
        monkeypatch.setattr(keys, "_TensorGuards", None)
