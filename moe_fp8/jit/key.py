"""The key of a compiled kernel: a digest of its sources, options and compiler, but of no path.

The key has only "major.minor" of the compiler, because NVRTC does not tell its patch release. So the patch
releases of a version share keys. The kernels of those that were compared differ in notes and attributes of
the cubin, but not in machine code.
"""

from __future__ import annotations

import hashlib

from moe_fp8.jit.sources import SourceClosure, SourceTree, package_sources
from moe_fp8.jit.toolchain import nvrtc_version
from moe_fp8.specs import KernelSpec

#: The only architecture that the kernels are written for; wgmma and setmaxnreg need the "a".
ARCH = "sm_90a"

# Change it if the same inputs give another artifact, for example with other fields parsed from the log.
_FORMAT = b"moe_fp8 kernel 1"


def compile_options(spec: KernelSpec) -> tuple[str, ...]:
    """NVRTC's options for `spec`; kernels of the same entry file differ only in these options."""
    defines = dict(spec.defines)
    defines["NUM_THREADS"] = spec.num_threads
    defines["SMEM_BYTES"] = spec.smem_bytes
    defines["CLUSTER_SIZE"] = spec.cluster_size
    return (
        f"--gpu-architecture={ARCH}",
        "--std=c++17",
        # Otherwise NVRTC looks in the working directory for a header that it was not given.
        "--no-source-include",
        "--ptxas-options=-v",
        # With its cache, NVRTC reports no registers and no spills for PTX that it has assembled before.
        "--no-cache",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    )


def digest(closure: SourceClosure, options: tuple[str, ...], nvrtc: tuple[int, int]) -> str:
    """The key of the artifact with these inputs: 32 hex digits. `nvrtc`: (major, minor)."""
    hasher = hashlib.sha256(_FORMAT)
    for part in (closure.entry, closure.digest, ARCH, f"{nvrtc[0]}.{nvrtc[1]}", *options):
        data = part.encode()
        hasher.update(b"\n%d:" % len(data))
        hasher.update(data)
    return hasher.hexdigest()[:32]


def kernel_key(
    spec: KernelSpec, sources: SourceTree | None = None, nvrtc: tuple[int, int] | None = None
) -> str:
    """The key of the kernel that NVRTC of the version `nvrtc` compiles from `spec`: 32 hex digits.

    `nvrtc`: (major, minor); the default is the loaded version. Patch releases of a version share keys.
    Raises ToolchainError, or CompileError for a missing source.
    """
    closure = (sources or package_sources()).closure(spec.name)
    return digest(closure, compile_options(spec), nvrtc or nvrtc_version())
