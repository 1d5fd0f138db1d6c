"""A compiled kernel and the compiler's report about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Artifact:
    """One cubin with one entry point.

    `key`: content key. `name`: the extern "C" symbol. `registers`: per thread. `spill_bytes`: stores
    plus loads. `local_bytes`: stack frame per thread. `static_smem_bytes`: static shared memory per block.
    `nvrtc`: "major.minor". `compile_seconds`: wall time inside NVRTC. `log`: NVRTC's log. `warnings`: the
    diagnostics of NVRTC and ptxas, without the resource report; empty for every kernel in this package.
    """

    key: str
    name: str
    cubin: bytes
    registers: int
    spill_bytes: int
    local_bytes: int
    static_smem_bytes: int
    nvrtc: str
    compile_seconds: float
    log: str = ""
    warnings: tuple[str, ...] = ()
