"""The ops' CUDA side, imported without a GPU."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch


def import_cuda_side(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module that imports `moe_fp8.ops.launch`, which takes two functions from torch.

    Torch for CPUs lacks both, so `patch` puts None in their place. If torch has them, they stay unchanged:
    the module keeps the functions that it finds, and GPU tests in the same process launch through them.
    """
    for function in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        if not hasattr(torch._C, function):
            patch.setattr(torch._C, function, None, raising=False)
    return importlib.import_module(name)
