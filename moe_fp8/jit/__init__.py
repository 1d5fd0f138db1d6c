"""KernelSpec -> cubin -> loaded kernel. Importing this package loads neither NVRTC nor libcuda."""

from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import BuildReport, BuildRow, build
from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.jit.key import kernel_key
from moe_fp8.jit.runtime import (
    JitCounters,
    counters,
    freeze,
    get_kernel,
    is_frozen,
    is_loaded,
    preload,
    unfreeze,
)
from moe_fp8.jit.store import KernelStore, default_store

__all__ = [
    "Artifact",
    "BuildReport",
    "BuildRow",
    "JitCounters",
    "KernelStore",
    "build",
    "compile_kernel",
    "counters",
    "default_store",
    "freeze",
    "get_kernel",
    "is_frozen",
    "is_loaded",
    "kernel_key",
    "preload",
    "unfreeze",
]
