"""Options and fixtures of all tests."""

from __future__ import annotations

import dataclasses

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, rather than skip, the tests in tests/gpu where there is no Hopper GPU",
    )


@pytest.fixture
def checked_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops also look at the contents of index tensors, as with MOE_FP8_CHECKED=1."""
    from moe_fp8.ops import contracts
    from moe_fp8.settings import settings

    on = dataclasses.replace(settings(), checked=True)
    monkeypatch.setattr(contracts, "settings", lambda: on)
