"""What every kernel's tile has to fit into on Hopper. Standard library only."""

from __future__ import annotations

#: Dynamic shared memory that one block may use on sm_90.
SMEM_CAPACITY = 232_448

#: Threads that issue one wgmma together.
WARPGROUP = 128

#: Room for the barriers and for the other small things that a kernel keeps in addition to its stages.
BARRIER_BYTES = 1024
