"""The tests in this folder need a Hopper GPU; without it they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.remembered import forget_launches


def _missing() -> str:
    """The reason why these tests cannot run here; empty if they can."""
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
    """Free the cached memory of a large test for later tests and for the server's own process."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 8 << 30:
        torch.cuda.empty_cache()


@contextmanager
def _fresh_runtime() -> Iterator[None]:
    from moe_fp8.jit import runtime, tensor_map
    from moe_fp8.ops import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime._RUNTIME, "__dict__", vars(runtime.KernelRuntime()))
        forget_launches(launch, patch)
        tensor_map.encode_tiled.cache_clear()
        yield


@pytest.fixture
def fresh_runtime() -> Iterator[None]:
    """The test sees the package as a new process does: no kernel, launch or tensor map of earlier tests.

    The kernel runtime is also not frozen. Everything is as before when the test has ended.
    """
    with _fresh_runtime():
        yield


@pytest.fixture(scope="module")
def fresh_module_runtime() -> Iterator[None]:
    """`fresh_runtime` once for all tests of a module."""
    with _fresh_runtime():
        yield
