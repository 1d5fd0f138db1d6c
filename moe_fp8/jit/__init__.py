"""The process's kernels, for users: freeze the set of kernels after warmup, and read the counters.

Importing this module loads neither torch nor NVRTC nor libcuda.
"""

from moe_fp8.jit.runtime import JitCounters, counters, freeze, is_frozen, unfreeze
from moe_fp8.settings import MissPolicy

__all__ = ["JitCounters", "MissPolicy", "counters", "freeze", "is_frozen", "unfreeze"]
