"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

import pytest

from tests.reachable_kernels import ReachableKernels, compile_reachable


@pytest.fixture(scope="session")
def reachable_kernels() -> ReachableKernels:
    """Every kernel that a call can reach, compiled once for all tests that look at the kernels."""
    return compile_reachable()
