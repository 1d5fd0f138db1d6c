"""Launches of loaded kernels on the current stream.

A launch is remembered for its call, so that `repeat` makes it again without checks or preparation, and
`move` makes it with other addresses. Nothing here waits for the device, reads device data or allocates device
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from moe_fp8.errors import UnsupportedError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.driver import LoadedKernel, ParamBlock, device_info, ensure_context
from moe_fp8.jit.runtime import get_kernel
from moe_fp8.jit.store import default_store
from moe_fp8.jit.tensor_map import starts_with_address
from moe_fp8.ops.keys import Call, Key, attributes_like
from moe_fp8.ops.modes import Modes
from moe_fp8.ops.parameters import Prepared
from moe_fp8.problems import InDtype

#: The names that problems have for the dtypes a kernel may read.
IN_DTYPES: dict[torch.dtype, InDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

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


class _Template(NamedTuple):
    """A launch whose block can be copied for tensors that differ only in their addresses.

    `low`: the lowest four bits of every address, since checks and kernels may depend on alignment. `places`:
    triples of a word of the block, the number of the tensor whose address it holds, and bytes added to it.
    """

    launch: _Launch
    low: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]


_launches: dict[Key, _Launch] = {}
# Calls of one form may still differ in dtypes, strides and alignment, so a form has a few templates. Many
# forms come once, so the first launch of a form leaves only an empty tuple.
_templates: dict[Key, tuple[_Template, ...]] = {}
_MAX_TEMPLATES = 4
# Allocators usually hand out the same addresses again. If they do not, launches are remembered in vain. They
# must not grow without end, so each dictionary drops its oldest. A launch takes up to 3.5 KiB.
_MAX_LAUNCHES = 8192
_remembering = threading.Lock()

_shape, _low_bits = attrgetter("shape"), (15).__and__
_Remembered = TypeVar("_Remembered")


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


def form_of(call: Call) -> Key:
    """The number of SMs to use, the call's key without addresses, and the shapes of all tensors."""
    key, tensors = call
    return Modes.num_sms, key[: -len(tensors)], tuple(map(_shape, tensors))


def move(call: Call, form: Key, check: Callable[[], None]) -> bool:
    """Make the launch of an earlier call that differs from this call only in addresses.

    Returns False if no such launch is remembered. The earlier call has passed the checks. Checks of addresses
    remain: all tensors must be aligned as those of the earlier call, and `check` does the others. `form`:
    `form_of` this call.
    """
    templates = _templates.get(form)
    if not templates or not Modes.launching:
        return False
    key, tensors = call
    addresses: Any = key[-len(tensors) :]
    low_bits = tuple(map(_low_bits, addresses))
    for template in templates:
        if template.low == low_bits and template.launch.same(*tensors):
            break
    else:
        return False
    check()
    (same, kernel, grid, device, block), _, places = template
    block = block.copy()
    words = block.words
    for word, tensor, offset in places:
        words[word] = addresses[tensor] + offset
    if device == _current_device():
        kernel.launch(grid, _raw_stream(device), block, device)
    else:
        with torch.cuda.device(device):
            kernel.launch(grid, _raw_stream(device), block, device)
    _keep(_launches, _key_of_launch(key, form[0]), _Launch(same, kernel, grid, device, block))
    return True


def _key_of_launch(key: Key, num_sms: object) -> Key:
    """The key under which `repeat` looks, for calls that were made while `Modes.num_sms` was `num_sms`."""
    return key if num_sms is None else (num_sms, key)


def _keep(remembered: dict[Key, _Remembered], key: Key, one: _Remembered) -> None:
    with _remembering:
        remembered.pop(key, None)  # a renewed entry is the youngest
        while len(remembered) >= _MAX_LAUNCHES:
            del remembered[next(iter(remembered))]
        remembered[key] = one


def first(
    prepare: Callable[..., Prepared | None],
    arguments: tuple[Any, ...],
    device: int,
    call: Call | None,
    form: Key | None,
) -> None:
    """Prepare a launch from an op's arguments, whose tensors are on `device`, and make it.

    From the second launch of a form on, it is remembered for `call` and its `form`, if they are given.
    """
    if device != _current_device():
        with torch.cuda.device(device):
            return first(prepare, arguments, device, call, form)
    # A thread that has not called the CUDA runtime yet has no context, and tensor maps need one.
    ensure_context(device)
    prepared = prepare(*arguments)
    if prepared is not None:
        launch(prepared, device, call, form)


def launch(prepared: Prepared, device: int, call: Call | None, form: Key | None) -> None:
    """Launch the prepared kernel on the current `device`, loading it if need be; remember as `first` does."""
    kernel = get_kernel(prepared.spec)
    # A launch that fails because the kernel is not prepared would end a capture.
    kernel.prepare(device)
    if not Modes.launching:
        return
    grid, block = prepared.grid, prepared.block
    kernel.launch(grid, _raw_stream(device), block, device)
    # If another thread has changed the number of SMs meanwhile, nobody knows which number the launch has.
    if call is None or form is None or form[0] != Modes.num_sms:
        return
    known = _templates.get(form)
    if known is None:  # the first launch of the form
        return _keep(_templates, form, ())
    key, tensors = call
    made = _Launch(attributes_like(tensors), kernel, grid, device, block)
    _keep(_launches, _key_of_launch(key, form[0]), made)
    if template := _template(made, prepared, call):
        _keep(_templates, form, (template, *known[: _MAX_TEMPLATES - 1]))


def _template(made: _Launch, prepared: Prepared, call: Call) -> _Template | None:
    """The template of a launch; None if it is not known which address in its block is which tensor's."""
    key, tensors = call
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    if len(numbers) < len(tensors) or (prepared.params.maps and not starts_with_address()):
        return None
    addresses: Any = key[-len(tensors) :]
    places = []
    for word, tensor, offset in prepared.places():
        number = numbers.get(id(tensor))
        if number is None or prepared.block.words[word] != addresses[number] + offset:
            return None
        places.append((word, number, offset))
    return _Template(made, tuple(map(_low_bits, addresses)), tuple(places))


def describe(
    prepare: Callable[..., Prepared | None], arguments: tuple[Any, ...], device: int
) -> dict[str, Any]:
    """The kernel that `first` would launch: its spec, its grid and its key in the store."""
    with torch.cuda.device(device):
        ensure_context(device)
        prepared = prepare(*arguments)
    if prepared is None:
        return {}
    key = default_store().key(prepared.spec)
    return {"spec": str(prepared.spec), "grid": prepared.grid, "key": key}
