"""The tests in this folder need a Hopper GPU; without one they are skipped, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest


def _missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"needs a Hopper GPU (compute capability 9.0): this one has {major}.{minor}"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    reason = _missing()
    if not reason:
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError(f"--require-gpu: {reason}")
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _free_memory() -> object:
    """Later cases, and the server's own process, get back what a large case held."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 8 << 30:
        torch.cuda.empty_cache()
