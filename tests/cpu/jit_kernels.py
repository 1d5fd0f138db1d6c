"""Tiny kernels for the tests of the compiler and of the modules that use it."""

from __future__ import annotations

from pathlib import Path

from moe_fp8.specs import KernelSpec

_HEADER = """#pragma once
__device__ __forceinline__ float scaled(float x) { return x * FACTOR; }
"""

_KERNEL = """#include "common/scaled.cuh"
static_assert(NUM_THREADS % 32 == 0);
extern "C" __global__ void __launch_bounds__(NUM_THREADS) NAME(float* x) {
  __shared__ float staged[32];
  staged[threadIdx.x % 32] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = scaled(staged[(threadIdx.x + 1) % 32]);
}
"""


def write_kernels(folder: Path, *names: str) -> Path:
    """Write a kernels folder with one entry file for each of `names`; all of them include one header."""
    (folder / "common").mkdir(parents=True)
    (folder / "common" / "scaled.cuh").write_text(_HEADER)
    for name in names:
        (folder / f"{name}.cuh").write_text(_KERNEL.replace("NAME", name))
    return folder


def spec(name: str = "tiny", factor: int = 2, num_threads: int = 128, smem_bytes: int = 0) -> KernelSpec:
    return KernelSpec(name, (("FACTOR", factor),), num_threads, smem_bytes)
