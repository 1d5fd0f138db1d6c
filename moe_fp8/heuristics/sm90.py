"""Limits of Hopper that every kernel's tile must respect. Standard library only."""

from __future__ import annotations

#: Dynamic shared memory that one block may use on sm_90.
SMEM_CAPACITY = 232_448

#: Threads that issue one wgmma together.
WARPGROUP = 128

#: Bytes for the barriers and other small data that a kernel keeps in addition to its stages.
BARRIER_BYTES = 1024
