"""NVRTC: load the library and query its version, without a driver or a GPU."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from moe_fp8.errors import ToolchainError

#: The oldest NVRTC that the kernels are written for.
MINIMUM_NVRTC = (13, 0)

_REMEDY = "install the compiler with `pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'`"


@cache
def nvrtc() -> Any:
    """The `cuda.bindings.nvrtc` module with libnvrtc loaded; raises ToolchainError."""
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise ToolchainError(f"cuda.bindings.nvrtc cannot be imported ({error}); {_REMEDY}") from error
    version = _query_version(module)
    if version < MINIMUM_NVRTC:
        raise ToolchainError(
            f"NVRTC {version[0]}.{version[1]} is too old, expected {MINIMUM_NVRTC[0]}.{MINIMUM_NVRTC[1]} "
            f"or newer; {_REMEDY}"
        )
    return module


def _query_version(module: Any) -> tuple[int, int]:
    # cuda.bindings opens libnvrtc at the first call; if it cannot, it raises exceptions of its own types.
    try:
        status, major, minor = module.nvrtcVersion()
    except Exception as error:
        # The error's text may have several lines.
        problem = " ".join(str(error).split())
        raise ToolchainError(f"libnvrtc cannot be loaded ({problem}); {_REMEDY}") from error
    if status != module.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"nvrtcVersion failed: {status!r}; {_REMEDY}")
    return int(major), int(minor)


@cache
def installed_nvrtc() -> tuple[int, int] | None:
    """(major, minor) of the installed NVRTC, even if it is too old; None if no NVRTC can be loaded."""
    try:
        return _query_version(importlib.import_module("cuda.bindings.nvrtc"))
    except (ImportError, ToolchainError):
        return None


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the loaded NVRTC; raises ToolchainError."""
    return _query_version(nvrtc())
