"""libcuda: load a cubin, launch a kernel, describe a device. No other module calls the driver.

Importing this module loads no library. The first call loads libcuda, and raises ToolchainError if there
is no driver.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from moe_fp8.errors import DriverError, ToolchainError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.toolchain import import_bindings

#: Dynamic shared memory that a kernel may use without an attribute, in bytes per block.
_DEFAULT_SMEM_LIMIT = 48 * 1024

_ALIGNMENT = 64

#: The most launch configurations (pairs of grid and stream) that a kernel keeps.
_MAX_CONFIGS = 1024

#: The compute capability that the kernels run on.
HOPPER = (9, 0)


class DeviceInfo(NamedTuple):
    """A GPU. `cc`: compute capability. `driver_version`: CUDA version of the driver, (major, minor)."""

    name: str
    cc: tuple[int, int]
    num_sms: int
    driver_version: tuple[int, int]


class ParamBlock:
    """Host memory for a kernel's single by-value struct parameter, reusable from call to call.

    `words` is a writable view of its words of 8 bytes: those of the struct, to be filled with
    `struct.pack_into` or one by one, and then one that the block needs itself. Tensor maps need the struct's
    64-byte alignment. A launch copies the struct before it returns, so one block serves any number of
    launches. Several threads may launch with the same block while no thread writes to it.
    """

    __slots__ = ("_storage", "address", "kernel_params", "size", "words")

    def __init__(self, size: int) -> None:
        padded = -(-size // 8) * 8
        self._storage = storage = _chars(padded + 8 + _ALIGNMENT)()
        base = ctypes.addressof(storage)
        offset = -base % _ALIGNMENT
        self.size = size
        self.address = address = base + offset
        #: Address of the `void*[1]` that a launch takes; the array holds `address`.
        self.kernel_params = address + padded
        self.words = memoryview(storage).cast("B")[offset : offset + padded + 8].cast("Q")
        self.words[-1] = address

    def copy(self) -> ParamBlock:
        """A new block with the same struct."""
        block = ParamBlock(self.size)
        block.assign(self)
        return block

    def assign(self, other: ParamBlock) -> None:
        """Take the struct of another block of this size."""
        self.words[:] = other.words
        self.words[-1] = self.address


@cache
def _chars(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size


class LoadedKernel:
    """A kernel ready to launch in every context of the process; it stays loaded until exit.

    `num_threads`: threads per block. `smem_bytes`: dynamic shared memory per block. Cluster dimensions are
    compiled into the kernel.

    Launches use programmatic dependent launch: a kernel may start before its predecessor on the stream has
    ended. So in every kernel `griddepcontrol.wait` comes before each access to memory that the predecessor
    may write, in the same thread or in a thread that the accessing thread waits for.
    """

    __slots__ = (
        "_configs",
        "_function",
        "_kernel",
        "_launch",
        "_lock",
        "_ready",
        "name",
        "num_threads",
        "smem_bytes",
    )

    def __init__(self, api: Any, kernel: Any, name: str, num_threads: int, smem_bytes: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self.smem_bytes = smem_bytes
        self._kernel = kernel
        # A launch accepts a CUkernel cast to CUfunction. Unlike a real CUfunction, a CUkernel belongs to no
        # context, so one handle serves every device.
        self._function = api.CUfunction(int(kernel))
        self._launch = api.cuLaunchKernelEx
        self._configs: dict[tuple[int, int], Any] = {}
        self._ready: set[int] = set()
        self._lock = threading.RLock()

    def launch(self, grid: int, stream: int, params: ParamBlock, device: int = 0) -> None:
        """Launch `grid` (> 0) blocks on `stream`, a raw CUstream of the current context.

        If the thread has no context, the primary context of `device` is made current. `params` is copied
        before the call returns. Asynchronous, thread-safe and capture-safe; raises DriverError.
        """
        config = self._configs.get((grid, stream))
        if config is None:
            config = self._configure(grid, stream)
        status = self._launch(config, self._function, params.kernel_params, 0)[0]
        if status:
            self._retry(status, config, grid, params.kernel_params, device)

    def _configure(self, grid: int, stream: int) -> Any:
        """Make and keep the launch configuration for this grid and stream; making it takes microseconds."""
        api = _driver()
        dependent = api.CUlaunchAttribute()
        dependent.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.num_threads, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.hStream = stream
        config.attrs = [dependent]
        config.numAttrs = 1
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid, stream] = config
        return config

    def prepare(self, current: int | None = None) -> None:
        """Load the code onto the current device and set its shared-memory limit there; idempotent.

        `current`: the index of the current device, if known. Allowed during stream capture.
        """
        if current in self._ready:
            return
        api = _driver()
        device = _check("cuCtxGetDevice", api.cuCtxGetDevice())
        with self._lock:
            if int(device) in self._ready:
                return
            with _relaxed_capture(api):
                if self.smem_bytes > _DEFAULT_SMEM_LIMIT:
                    attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    _check(
                        f"cuKernelSetAttribute({self.name}, smem={self.smem_bytes})",
                        api.cuKernelSetAttribute(attribute, self.smem_bytes, self._kernel, device),
                    )
                # By default a module loads lazily, in the first launch. This call loads it now.
                _check(f"cuKernelGetFunction({self.name})", api.cuKernelGetFunction(self._kernel))
            self._ready.add(int(device))

    def _retry(self, status: Any, config: Any, grid: int, kernel_params: int, wanted: int) -> None:
        api = _driver()
        # A thread has no context before its first call of the CUDA runtime.
        bound = ensure_context(wanted)
        device = int(_check("cuCtxGetDevice", api.cuCtxGetDevice()))
        if bound or device not in self._ready:
            # The kernel was loaded on another device; here its shared-memory limit is still the default.
            self.prepare()
            status = self._launch(config, self._function, kernel_params, 0)[0]
        _check(
            f"cuLaunchKernelEx({self.name}, grid={grid}, block={self.num_threads}, smem={self.smem_bytes})",
            (status,),
        )


def load(artifact: Artifact, smem_bytes: int, num_threads: int) -> LoadedKernel:
    """Load `artifact` onto the current device; retains device 0's primary context if none is current.

    Synchronous (milliseconds); allowed during stream capture. Raises DriverError, ToolchainError.
    """
    api = _driver()
    ensure_context()
    with _relaxed_capture(api):
        library = _check(
            f"cuLibraryLoadData({artifact.name})",
            api.cuLibraryLoadData(artifact.cubin, None, None, 0, None, None, 0),
        )
        kernel = _check(
            f"cuLibraryGetKernel({artifact.name})", api.cuLibraryGetKernel(library, artifact.name.encode())
        )
    loaded = LoadedKernel(api, kernel, artifact.name, num_threads, smem_bytes)
    loaded.prepare()
    return loaded


def ensure_context(device: int = 0) -> bool:
    """If this thread has no current context, make the primary context of `device` current.

    The CUDA runtime does the same. Returns whether there was no context.
    """
    api = _driver()
    if int(_check("cuCtxGetCurrent", api.cuCtxGetCurrent())) != 0:
        return False
    handle = _check(f"cuDeviceGet({device})", api.cuDeviceGet(device))
    context = _check("cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(handle))
    _check("cuCtxSetCurrent", api.cuCtxSetCurrent(context))
    return True


def device_count() -> int:
    """The number of visible GPUs; 0 if there is no driver or the driver sees no GPU."""
    try:
        api = _driver()
    except ToolchainError:
        return 0
    return int(_check("cuDeviceGetCount", api.cuDeviceGetCount()))


def device_info(device: int | None = None) -> DeviceInfo:
    """Describe `device`, or the current context's device, or device 0; creates no context.

    Raises ToolchainError if there is no driver or no GPU.
    """
    api = _driver()
    if device is None:
        device = 0
        if int(_check("cuCtxGetCurrent", api.cuCtxGetCurrent())) != 0:
            device = int(_check("cuCtxGetDevice", api.cuCtxGetDevice()))
    return _device_info(device)


@cache
def _device_info(device: int) -> DeviceInfo:
    api = _driver()
    handle = _check(f"cuDeviceGet({device})", api.cuDeviceGet(device))
    name = bytes(_check("cuDeviceGetName", api.cuDeviceGetName(256, handle))).split(b"\0")[0].decode()
    kinds = api.CUdevice_attribute
    major, minor, num_sms = (
        int(_check("cuDeviceGetAttribute", api.cuDeviceGetAttribute(kind, handle)))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    version = int(_check("cuDriverGetVersion", api.cuDriverGetVersion()))
    return DeviceInfo(name, (major, minor), num_sms, (version // 1000, version % 1000 // 10))


@cache
def tensor_map_encoder() -> Any:
    """cuTensorMapEncodeTiled as a C function of (map, dtype, rank, address, dims, strides, box,
    element strides, interleave, swizzle, l2 promotion, fill) that returns a CUresult int. Pass only
    ctypes objects: a bare int would be passed as 32 bits.

    The wrapper of cuda.bindings creates an object for every dimension, and encodes into memory of 16-byte
    alignment although 64 bytes are required.
    """
    api = _driver()
    flags = api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address = _check(
        "cuGetProcAddress(cuTensorMapEncodeTiled)",
        api.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, int(flags)),
    )
    # PYFUNCTYPE keeps the GIL, since the call is pure arithmetic of about 100 ns.
    return ctypes.PYFUNCTYPE(ctypes.c_int)(int(address))


def result_name(code: int) -> str:
    """The name of a CUresult code."""
    try:
        return str(_driver().CUresult(code).name)
    except ValueError:
        return "unknown CUresult"


@cache
def _driver() -> Any:
    """The `cuda.bindings.driver` module with libcuda loaded and initialized."""
    remedy = "this step needs an NVIDIA GPU and its driver (580 or newer); planning and compiling do not"
    api = import_bindings("driver", "install it with `pip install 'cuda-bindings>=13,<14'`")
    # cuda.bindings opens libcuda at the first call and raises RuntimeError if it cannot.
    try:
        (status,) = api.cuInit(0)
    except Exception as error:
        raise ToolchainError(f"libcuda cannot be loaded ({error}); {remedy}") from error
    if status != api.CUresult.CUDA_SUCCESS:
        raise ToolchainError(f"cuInit failed: {status.name}; {remedy}")
    return api


def _check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda.bindings result tuple (None, a value or a tuple of values)."""
    status = result[0]
    if int(status) != 0:
        raise DriverError(call, int(status), getattr(status, "name", "unknown CUresult"))
    return result[1] if len(result) > 1 else None


@contextmanager
def _relaxed_capture(api: Any) -> Iterator[None]:
    """Let this thread load code while the process captures a stream."""
    relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = api.cuThreadExchangeStreamCaptureMode
    before = _check("cuThreadExchangeStreamCaptureMode", exchange(relaxed))
    try:
        yield
    finally:
        _check("cuThreadExchangeStreamCaptureMode", exchange(before))
