"""Plan -> artifacts in a store -> kernels loaded in this process."""

from __future__ import annotations

from moe_fp8.jit import driver, runtime
from moe_fp8.jit.build import BuildReport, Progress, build
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.problems import DEFAULT_NUM_SMS
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.planner import Plan


def build_plan(
    plan: Plan, store: KernelStore | None = None, jobs: int | None = None, progress: Progress = None
) -> BuildReport:
    """Make sure that `store` (default: the process's) holds every kernel of `plan`; needs no GPU.

    `jobs` and `progress` as in `moe_fp8.jit.build.build`. Raises CompileError after all kernels were
    tried, and ToolchainError.
    """
    return build(plan.specs, store, jobs, progress)


def load_plan(plan: Plan, jobs: int | None = None, progress: Progress = False) -> int:
    """Load every kernel of `plan` into this process, building those that are missing; how many were new.

    After it, `moe_fp8.jit.freeze()` makes sure that no call compiles. Launches nothing and allocates no
    tensor; not for use during stream capture. Raises ToolchainError where there is no GPU, DriverError.
    """
    return runtime.preload(plan.specs, jobs, progress)


def missing_kernels(plan: Plan, store: KernelStore | None = None) -> dict[KernelSpec, str]:
    """The kernels of `plan`, with their keys, that `store` does not hold whole; compiles nothing.

    Raises ToolchainError where there is neither NVRTC nor a bundle to tell the version that is a part of
    every key, and BundleError where a file of the bundle is damaged.
    """
    store = store or default_store()
    keys = {spec: store.key(spec) for spec in plan.specs}
    return {spec: key for spec, key in keys.items() if store.get(key) is None}


def hopper_device() -> driver.DeviceInfo | None:
    """The GPU that the kernels would run on, or None where there is none or it is no Hopper."""
    if driver.device_count() == 0:
        return None
    info = driver.device_info()
    return info if info.cc == driver.HOPPER else None


def default_num_sms() -> int:
    """Multiprocessors of this machine's Hopper GPU; those of an H100 SXM or H200 where there is none."""
    device = hopper_device()
    return DEFAULT_NUM_SMS if device is None else device.num_sms
