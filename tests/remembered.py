"""Forgets the launches that `moe_fp8.ops.launch` remembers, for the CPU and GPU tests."""

from __future__ import annotations

from types import ModuleType

import pytest


def forget_launches(launch: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """From now on nothing of earlier calls is remembered, until `patch` is undone."""
    for name in ("_launches", "_templates"):
        memory = getattr(launch, name)
        patch.setattr(launch, name, type(memory)(memory._kernels))
    patch.setattr(launch, "_seen", type(launch._seen)())
