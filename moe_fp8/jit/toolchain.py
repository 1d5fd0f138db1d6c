"""NVRTC: load the library and query its version, without a driver or a GPU; the import of CUDA's bindings."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from moe_fp8.errors import ToolchainError

#: The oldest NVRTC that the kernels are written for.
MINIMUM_NVRTC = (13, 0)

_REMEDY = "install the compiler with `pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<13.3'`"


def import_bindings(name: str, remedy: str) -> Any:
    """The module `cuda.bindings.<name>`; raises ToolchainError with `remedy`."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except Exception as error:
        # The libraries of a broken installation may raise other errors than ImportError.
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ToolchainError(f"cuda.bindings.{name} cannot be imported ({problem}); {remedy}") from error


@cache
def nvrtc() -> Any:
    """The `cuda.bindings.nvrtc` module with libnvrtc loaded; raises ToolchainError."""
    module = import_bindings("nvrtc", _REMEDY)
    version = _query_version(module)
    if version < MINIMUM_NVRTC:
        raise ToolchainError(
            f"NVRTC {version[0]}.{version[1]} is too old, expected {MINIMUM_NVRTC[0]}.{MINIMUM_NVRTC[1]} "
            f"or newer; {_REMEDY}"
        )
    return module


def try_nvrtc() -> None:
    """Compile an empty kernel. Raises ToolchainError if NVRTC cannot, as without its `libnvrtc-builtins`."""
    api = nvrtc()
    status, program = api.nvrtcCreateProgram(b'extern "C" __global__ void empty() {}', b"empty.cu", 0, [], [])
    if status == api.nvrtcResult.NVRTC_SUCCESS:
        (status,) = api.nvrtcCompileProgram(program, 0, [])
        api.nvrtcDestroyProgram(program)
    if status != api.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC compiles nothing ({status.name}): a part of it is missing; {_REMEDY}")


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
    """(major, minor) of the installed NVRTC; None if no NVRTC can be loaded that compiles the kernels."""
    try:
        return nvrtc_version()
    except ToolchainError:
        return None


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the loaded NVRTC; raises ToolchainError."""
    return _query_version(nvrtc())
