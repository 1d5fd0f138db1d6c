"""Launches: a loaded kernel on the current stream, remembered for the call.

Nothing here waits for the device, reads device data or allocates. Given the call a launch is remembered, and
`repeat` makes it again without checks or preparation.
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
from moe_fp8.ops.keys import Call, Key, attributes_like
from moe_fp8.params import ParamStruct
from moe_fp8.problems import InDtype
from moe_fp8.specs import KernelSpec

#: What a kernel may read, as problems name it.
IN_DTYPES: dict[torch.dtype, InDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

#: What a family's CUDA side prepares: the kernel, its grid and its parameters.
Prepared: TypeAlias = tuple[KernelSpec, int, ParamBlock]

_raw_stream = torch._C._cuda_getCurrentRawStream
_current_device = torch._C._cuda_getDevice


class _Launch(NamedTuple):
    """A launch in full but for the stream; read-only, so that threads may share it.

    `same` tells whether tensors have the attributes of those that it was made for.
    """

    same: Callable[..., bool]
    kernel: LoadedKernel
    grid: int
    device: int
    block: ParamBlock


_launches: dict[Key, _Launch] = {}
# Allocators hand out the same addresses again and again; where they do not, launches remembered in vain
# must not grow without end: the oldest goes. One takes about 3.5 KiB.
_MAX_LAUNCHES = 8192
_remembering = threading.Lock()


@cache
def num_sms(device: int) -> int:
    """Streaming multiprocessors; raises UnsupportedError for a GPU that is no Hopper."""
    info = device_info(device)
    if info.cc != (9, 0):
        raise UnsupportedError(
            f"{info.name} (compute capability {info.cc[0]}.{info.cc[1]}): the kernels need Hopper (9.0); "
            "move the tensors to such a GPU, or to the CPU for the reference implementation"
        )
    return info.num_sms


@cache
def table(device: int) -> str:
    """The measured table that is meant for the device, "" for none."""
    return gemm_table.device_of(device_info(device).name)


def repeat(call: Call) -> bool:
    """Launch what was launched for such a call before; False if nothing was.

    Such a call has passed the checks: ask before them.
    """
    key, tensors = call
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
    # A thread that has called nothing of the CUDA runtime yet has no context, and tensor maps need one.
    ensure_context(device)
    prepared = prepare(*arguments)
    if prepared is not None:
        launch(*prepared, device, call)


def launch(spec: KernelSpec, grid: int, block: ParamBlock, device: int, call: Call | None) -> None:
    """Launch the kernel of `spec` on the current `device`, loading it if need be; remember it for `call`."""
    kernel = get_kernel(spec)
    # Found out by a launch that fails, it would end a capture.
    kernel.prepare(device)
    kernel.launch(grid, _raw_stream(device), block, device)
    if call is not None:
        key, tensors = call
        made = _Launch(attributes_like(tensors), kernel, grid, device, block)
        with _remembering:
            while len(_launches) >= _MAX_LAUNCHES:
                del _launches[next(iter(_launches))]
            _launches[key] = made


def new_block(params: ParamStruct) -> ParamBlock:
    """Room for the parameters of one launch."""
    return ParamBlock(-(-params.size // 64) * 64)
