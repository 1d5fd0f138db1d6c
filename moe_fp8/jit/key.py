"""What identifies a compiled kernel: its sources, its options and its compiler, never a path."""

from __future__ import annotations

import hashlib

from moe_fp8.jit.sources import SourceClosure, SourceTree, package_sources
from moe_fp8.jit.toolchain import nvrtc_version
from moe_fp8.specs import KernelSpec

#: The one architecture that the kernels are written for (wgmma, setmaxnreg and TMA need the "a").
ARCH = "sm_90a"

# Raise it when the same inputs come to mean another artifact: fields parsed from the log, say.
_FORMAT = b"moe_fp8 kernel 1"


def compile_options(spec: KernelSpec, arch: str = ARCH) -> tuple[str, ...]:
    """NVRTC's options for `spec`; all that distinguishes two kernels of one entry file."""
    defines = dict(spec.defines)
    defines["NUM_THREADS"] = spec.num_threads
    defines["SMEM_BYTES"] = spec.smem_bytes
    defines["CLUSTER_SIZE"] = spec.cluster_size
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        # Otherwise NVRTC looks in the working directory for what is not among the given headers.
        "--no-source-include",
        "--ptxas-options=-v",
        # NVRTC caches PTX that it has assembled before, and then reports no registers and no spills.
        "--no-cache",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    )


def digest(closure: SourceClosure, options: tuple[str, ...], arch: str, nvrtc: tuple[int, int]) -> str:
    """32 hex digits that name the artifact of these inputs."""
    hasher = hashlib.sha256(_FORMAT)
    for part in (closure.entry, closure.digest, arch, f"{nvrtc[0]}.{nvrtc[1]}", *options):
        data = part.encode()
        hasher.update(b"\n%d:" % len(data))
        hasher.update(data)
    return hasher.hexdigest()[:32]


def kernel_key(
    spec: KernelSpec,
    arch: str = ARCH,
    sources: SourceTree | None = None,
    nvrtc: tuple[int, int] | None = None,
) -> str:
    """The key of `spec` here and now, or of what the NVRTC of another version makes of it.

    Raises ToolchainError, or CompileError for a missing source.
    """
    closure = (sources or package_sources()).closure(spec.name)
    return digest(closure, compile_options(spec, arch), arch, nvrtc or nvrtc_version())
