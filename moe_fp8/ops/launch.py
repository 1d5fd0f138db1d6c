"""Launches of loaded kernels on the current stream.

A launch is remembered for its call, so that `repeat` makes it again without checks or preparation. Nothing
here waits for the device, reads device data or allocates device memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from moe_fp8.errors import UnsupportedError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.driver import LoadedKernel, ParamBlock, device_info, ensure_context
from moe_fp8.jit.runtime import get_kernel
from moe_fp8.jit.store import default_store
from moe_fp8.ops.keys import Call, Key, attributes_like
from moe_fp8.ops.modes import Modes
from moe_fp8.params import ParamStruct
from moe_fp8.problems import InDtype
from moe_fp8.specs import KernelSpec

#: The names that problems have for the dtypes a kernel may read.
IN_DTYPES: dict[torch.dtype, InDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

#: A family's CUDA side prepares these three: the kernel, its grid and its parameters.
Prepared: TypeAlias = tuple[KernelSpec, int, ParamBlock]

_raw_stream = torch._C._cuda_getCurrentRawStream
_current_device = torch._C._cuda_getDevice


class _Launch(NamedTuple):
    """A whole launch, except its stream. It is read-only, so that threads may share it.

    `same` tells whether tensors have the attributes of the tensors that the launch was made for.
    """

    same: Callable[..., bool]
    kernel: LoadedKernel
    grid: int
    device: int
    block: ParamBlock


_launches: dict[Key, _Launch] = {}
# Allocators usually hand out the same addresses again. If they do not, launches are remembered in vain. They
# must not grow without end, so the oldest is dropped. A launch takes about 3.5 KiB.
_MAX_LAUNCHES = 8192
_remembering = threading.Lock()


def num_sms(device: int) -> int:
    """Return the number of SMs that a kernel may use. Raises UnsupportedError if the GPU is no Hopper."""
    return _all_sms(device) if Modes.num_sms is None else min(Modes.num_sms, _all_sms(device))


@cache
def _all_sms(device: int) -> int:
    info = device_info(device)
    if info.cc != (9, 0):
        raise UnsupportedError(
            f"{info.name} (compute capability {info.cc[0]}.{info.cc[1]}): the kernels need Hopper (9.0); "
            "move the tensors to a Hopper GPU, or to the CPU for the reference implementation"
        )
    return info.num_sms


@cache
def table(device: int) -> str:
    """Return the name of the measured table for the device, "" if there is none."""
    return gemm_table.device_of(device_info(device).name)


def repeat(call: Call) -> bool:
    """Repeat the launch that is remembered for an equal call; return False if there is none.

    The equal call has passed the checks, so callers ask here before they check.
    """
    key, tensors = call
    if not Modes.usual:
        if not Modes.launching:
            return False
        key = Modes.num_sms, key
    launch = _launches.get(key)
    if launch is None:
        return False
    same, kernel, grid, device, block = launch
    if not same(*tensors):
        return False
    if device == _current_device():
        kernel.launch(grid, _raw_stream(device), block, device)
    else:
        with torch.cuda.device(device):
            kernel.launch(grid, _raw_stream(device), block, device)
    return True


def first(
    prepare: Callable[..., Prepared | None], arguments: tuple[Any, ...], device: int, call: Call | None
) -> None:
    """Prepare a launch from an op's arguments, whose tensors are on `device`, and make it."""
    if device != _current_device():
        with torch.cuda.device(device):
            return first(prepare, arguments, device, call)
    # A thread that has not called the CUDA runtime yet has no context, and tensor maps need one.
    ensure_context(device)
    prepared = prepare(*arguments)
    if prepared is not None:
        launch(*prepared, device, call)


def launch(spec: KernelSpec, grid: int, block: ParamBlock, device: int, call: Call | None) -> None:
    """Launch the kernel of `spec` on the current `device`, loading it if need be; remember it for `call`."""
    kernel = get_kernel(spec)
    # A launch that fails because the kernel is not prepared would end a capture.
    kernel.prepare(device)
    if not Modes.launching:
        return
    kernel.launch(grid, _raw_stream(device), block, device)
    if call is not None:
        key, tensors = call
        if not Modes.usual:
            key = Modes.num_sms, key
        made = _Launch(attributes_like(tensors), kernel, grid, device, block)
        with _remembering:
            while len(_launches) >= _MAX_LAUNCHES:
                del _launches[next(iter(_launches))]
            _launches[key] = made


def describe(
    prepare: Callable[..., Prepared | None], arguments: tuple[Any, ...], device: int
) -> dict[str, Any]:
    """The kernel that `first` would launch: its spec, its grid and its key in the store."""
    with torch.cuda.device(device):
        ensure_context(device)
        prepared = prepare(*arguments)
    if prepared is None:
        return {}
    spec, grid, _ = prepared
    return {"spec": str(spec), "grid": grid, "key": default_store().key(spec)}


def new_block(params: ParamStruct) -> ParamBlock:
    """Return a block with room for the parameters of one launch."""
    return ParamBlock(-(-params.size // 64) * 64)
