"""Plan -> artifacts in a store -> kernels loaded in this process."""

from __future__ import annotations

from moe_fp8.errors import MoeFp8Error
from moe_fp8.jit import driver, runtime
from moe_fp8.jit.build import BuildReport, Progress, build
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.problems import DEFAULT_NUM_SMS
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.planner import Plan


def build_plan(
    plan: Plan, store: KernelStore | None = None, *, jobs: int | None = None, progress: Progress = None
) -> BuildReport:
    """Make sure that `store` (default: the process's store) holds every kernel of `plan`; needs no GPU.

    `jobs`: compiler processes, by default MOE_FP8_JOBS, else the available cores. `progress`: None or True
    shows a bar on a terminal, else a line for each compiled kernel, on stderr; False shows nothing; a
    function gets the kernels that are done, those in all and the row of the last. Raises CompileError after
    it has tried all kernels, and ToolchainError. A KeyboardInterrupt says where the finished kernels are.
    """
    store = store or default_store()
    try:
        return build(plan.specs, store, jobs, progress)
    except KeyboardInterrupt:
        folder = store.location()["root"]
        kept = "kernels are not kept" if folder is None else f"finished kernels are kept in {folder}"
        raise KeyboardInterrupt(kept) from None


def load_plan(plan: Plan, *, jobs: int | None = None, progress: Progress = False) -> int:
    """Load every kernel of `plan` into this process, and build missing kernels first.

    `jobs` and `progress` are as in `build_plan`, but by default nothing is shown. Returns the
    number of newly loaded kernels. A later `moe_fp8.jit.freeze()` ensures that no call compiles. Launches
    nothing and allocates no tensor; do not call it during stream capture. Raises CompileError,
    ToolchainError, also if there is no GPU, and DriverError.
    """
    return runtime.preload(plan.specs, jobs, progress)


def missing_kernels(plan: Plan, store: KernelStore | None = None) -> dict[KernelSpec, str]:
    """The kernels of `plan` that `store` does not hold intact, with their keys; compiles nothing.

    Every key includes the NVRTC version. Raises ToolchainError if neither NVRTC nor a bundle gives this
    version, and BundleError if a file of the bundle is damaged.
    """
    store = store or default_store()
    keys = {spec: store.key(spec) for spec in plan.specs}
    return {spec: key for spec, key in keys.items() if store.get(key) is None}


def demand_kept(report: BuildReport, store: KernelStore) -> None:
    """Raise MoeFp8Error if `store`, which goes on in memory if it cannot write, kept no file of a kernel.

    A process that only builds has then worked for nothing.
    """
    lost = [row for row in report.rows if not row.cached and store.get_kept(row.key) is None]
    if lost:
        place = "there is no folder for them; set MOE_FP8_CACHE_DIR"
        if store.root is not None:
            place = f"they cannot be written to {store.root}"
        raise MoeFp8Error(f"{len(lost)} of {len(report.rows)} kernels are compiled but not kept: {place}")


def hopper_device() -> driver.DeviceInfo | None:
    """The GPU that the kernels would run on, or None if there is no GPU or it is not a Hopper."""
    if driver.device_count() == 0:
        return None
    info = driver.device_info()
    return info if info.cc == driver.HOPPER else None


def default_num_sms() -> int:
    """Multiprocessors of this machine's Hopper GPU; without a Hopper GPU, `DEFAULT_NUM_SMS`."""
    device = hopper_device()
    return DEFAULT_NUM_SMS if device is None else device.num_sms
