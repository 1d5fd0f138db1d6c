"""Launches of loaded kernels on the current stream, and what is remembered of earlier launches.

  call      an op's arguments: a key, and the tensors (`keys`)
  launch    the kernels of a call with their parameters; `repeat` makes it again for an equal call
  form      what calls have in common that differ only in the addresses of their tensors (`form_of`)
  template  the launch of one call of a form; `move` copies its parameters and writes other addresses there
  places    the words of the parameters that hold addresses, and the tensor of each address

A call tries `repeat`, then `move`, and then, after its checks, `first`, which prepares it. A `sequence`
remembers the kernels of its ops as one launch. Nothing here waits for the device, reads device data or
allocates device memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from moe_fp8.errors import UnsupportedError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.driver import HOPPER, LoadedKernel, ParamBlock, device_info, ensure_context
from moe_fp8.jit.runtime import get_kernel
from moe_fp8.jit.store import default_store
from moe_fp8.jit.tensor_map import starts_with_address
from moe_fp8.ops.arguments import end_of
from moe_fp8.ops.keys import Call, Key, attributes_like
from moe_fp8.ops.modes import Modes
from moe_fp8.ops.parameters import Prepared

_shape, _low_bits = attrgetter("shape"), (15).__and__

_raw_stream = torch._C._cuda_getCurrentRawStream


def _same_device(device: int) -> int:
    return device


# Both functions make a device current, and return the device that was current. (torch.cuda.current_device may
# tell a device that torch would only make current at its next use.) Asking takes 2 to 5% of a repeated call,
# so nothing asks if the process sees one GPU. The first CUDA call imports this module; then the number is
# final.
_exchange_device = torch.cuda._exchange_device if torch.cuda.device_count() > 1 else _same_device
_restore_device = torch.cuda._maybe_exchange_device


#: A kernel, its grid and its parameters.
_Kernel: TypeAlias = tuple[LoadedKernel, int, ParamBlock]


class _Launch(NamedTuple):
    """The launches of a call, except their stream. It is read-only, so that threads may share it.

    `same` tells whether tensors have the attributes of the tensors that the launches were made for.
    """

    same: Callable[..., bool]
    device: int
    kernels: tuple[_Kernel, ...]


#: For each kernel: triples of a word of its block, the number of the tensor whose address the word holds, and
#: bytes added to it.
_Places: TypeAlias = tuple[tuple[tuple[int, int, int], ...], ...]


class Launched(NamedTuple):
    """A kernel that was launched, and what was prepared for it."""

    kernel: LoadedKernel
    prepared: Prepared


class _Template:
    """Launches whose blocks can be copied for tensors that differ only in their addresses.

    `addresses` are those of the tensors that the launches were made for. `low` are their lowest four bits,
    since checks and kernels may depend on alignment. `prepared` is what was prepared for each kernel.
    `places` is empty if calls cannot be moved, and None before the second call.
    """

    __slots__ = ("addresses", "launch", "low", "places", "prepared")

    def __init__(self, launch: _Launch, addresses: tuple[int, ...], prepared: tuple[Prepared, ...]) -> None:
        self.launch, self.addresses, self.prepared = launch, addresses, prepared
        self.low = tuple(map(_low_bits, addresses))
        self.places: _Places | None = None

    def find_places(self, tensors: tuple[Tensor, ...]) -> _Places:
        """Which address in a block is which tensor's, for tensors like those of the launches.

        (The first call of a form does not ask for it, since many forms come once.)
        """
        numbers = {address: number for number, address in enumerate(self.addresses)}
        if len(numbers) < len(tensors):  # the addresses in a block would not tell such tensors apart
            return ()
        spans = None
        places = []
        for _, _, block, params, offsets in self.prepared:
            if params.maps and not starts_with_address():
                return ()
            of_kernel, added = [], dict(offsets)
            for word in params.addresses:
                address = block.words[word]
                if address == 0:
                    continue
                begin = address - added.get(word, 0)
                number = numbers.get(begin)
                if number is None:  # it is the address of a view
                    spans = spans or _Spans(self.addresses, tensors)
                    number = spans.holder(begin)
                if number is None:
                    return ()
                of_kernel.append((word, number, address - self.addresses[number]))
            places.append(tuple(of_kernel))
        return tuple(places)


class _Spans:
    """The memory that tensors like `tensors` would have at `addresses`."""

    def __init__(self, addresses: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
        ends = [begin + end_of(one) - one.data_ptr() for begin, one in zip(addresses, tensors, strict=True)]
        spans = sorted(zip(addresses, ends, range(len(tensors)), strict=True))
        self.begins, self.ends, self.numbers = zip(*spans, strict=True)
        self.apart = all(end <= begin for end, begin in zip(self.ends, self.begins[1:], strict=False))

    def holder(self, address: int) -> int | None:
        """The number of the only tensor that holds the address."""
        at = bisect_right(self.begins, address) - 1
        return self.numbers[at] if self.apart and at >= 0 and address < self.ends[at] else None


# Allocators usually hand out the same addresses again. If they do not, launches are remembered in vain, and
# they must not grow without end. A kernel of a launch takes up to 3.5 KiB.
_MAX_KERNELS = 8192
_remembering = threading.RLock()

_Remembered = TypeVar("_Remembered")


class _Memory(OrderedDict[Key, _Remembered]):
    """What is remembered, the youngest last. When its kernels are too many, it drops the oldest.

    `kernels` counts the kernels of an entry.
    """

    def __init__(self, kernels: Callable[[_Remembered], int]) -> None:
        super().__init__()
        self._kernels, self._total, self._busy = kernels, 0, False

    def put(self, key: Key, one: _Remembered) -> None:
        """Remember `one` in place of what `key` had."""
        count = self._kernels(one)
        with _remembering:
            if self._busy:  # a finalizer or a signal handler makes a call while its own thread is in here
                return
            try:
                self._busy = True
                if key in self:
                    self._total -= self._kernels(self.pop(key))
                while self and self._total + count > _MAX_KERNELS:
                    self._total -= self._kernels(self.popitem(last=False)[1])
                self[key] = one
                self._total += count
            finally:
                self._busy = False


class _Seen:
    """Hashes of the keys of calls that were moved. It knows at least the last `_MAX_KERNELS` of them."""

    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()

    def again(self, key: Key) -> bool:
        """Whether a call with this key was moved before. Hashes that agree by chance do no harm."""
        hashed = hash(key)
        if hashed in self._young or hashed in self._old:
            return True
        if len(self._young) >= _MAX_KERNELS:
            self._young, self._old = set(), self._young
        self._young.add(hashed)
        return False


_seen = _Seen()


class _Scratch(threading.local):
    """A thread's own blocks for launches that are not remembered: a launch copies its block.

    Their keys are the number of a kernel among those of a call, and the size of its block. A call takes its
    blocks out until it has launched, since a finalizer or a signal handler may make another call meanwhile.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], ParamBlock] = {}


_scratch = _Scratch()


def _kernels_of_templates(templates: tuple[_Template, ...]) -> int:
    # Forms that were given up have no template, but must not grow without end either.
    return sum(len(template.prepared) for template in templates) or 1


# Calls of one form may still differ in dtypes, strides and alignment, so a form has a few templates. It has
# none if its calls make more, or fewer, than the launches of their ops.
_MAX_TEMPLATES = 4
_launches: _Memory[_Launch] = _Memory(lambda launch: len(launch.kernels))
_templates: _Memory[tuple[_Template, ...]] = _Memory(_kernels_of_templates)


def num_sms(device: int) -> int:
    """Return the number of SMs that a kernel may use. Raises UnsupportedError if the GPU is no Hopper."""
    return _all_sms(device) if Modes.num_sms is None else min(Modes.num_sms, _all_sms(device))


@cache
def _all_sms(device: int) -> int:
    info = device_info(device)
    if info.cc != HOPPER:
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
    """Repeat the launches that are remembered for an equal call; return False if there are none.

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
    same, device, kernels = launch
    if not same(*tensors):
        return False
    _start(device, kernels)
    return True


def _start(device: int, kernels: tuple[_Kernel, ...]) -> None:
    before = _exchange_device(device)
    try:
        stream = _raw_stream(device)
        for kernel, grid, block in kernels:
            kernel.launch(grid, stream, block, device)
    finally:
        if before != device:
            _restore_device(before)


def form_of(call: Call) -> Key:
    """The number of SMs to use, the call's key without addresses, and the shapes of all tensors."""
    key, tensors = call
    return Modes.num_sms, key[: -len(tensors)], tuple(map(_shape, tensors))


def move(call: Call, form: Key, check: Callable[[], None]) -> bool:
    """Make the launches of an earlier call that differs from this call only in addresses.

    Returns False if no launches of such an earlier call are remembered. The earlier call has passed the
    checks. Checks of addresses remain: all tensors must be aligned as those of the earlier call, and `check`
    does the others. `form`: `form_of` this call. The launches are remembered for `repeat` only if an equal
    call was moved before, since the calls of a prompt come once.
    """
    templates = _templates.get(form)
    if not templates or not Modes.launching:
        return False
    key, tensors = call
    addresses: Any = key[-len(tensors) :]
    if not all(addresses):  # empty, or without memory, which `prepared` refuses
        return False
    low_bits = tuple(map(_low_bits, addresses))
    for template in templates:
        if template.low == low_bits and template.launch.same(*tensors):
            break
    else:
        return False
    places = template.places
    if places is None:
        ensure_context(template.launch.device)
        places = template.places = template.find_places(tensors)
    if not places:
        return False
    check()
    same, device, kernels = template.launch
    launch_key = _key_of_launch(key, form[0])
    again, blocks = _seen.again(launch_key), _scratch.blocks
    moved = []
    for number, ((kernel, grid, block), of_kernel) in enumerate(zip(kernels, places, strict=True)):
        own = None if again else blocks.pop((number, block.size), None)
        if own is None:
            own = block.copy()
        else:
            own.assign(block)
        words = own.words
        for word, tensor, offset in of_kernel:
            words[word] = addresses[tensor] + offset
        moved.append((kernel, grid, own))
    kernels = tuple(moved)
    _start(device, kernels)
    if again:
        _launches.put(launch_key, _Launch(same, device, kernels))
    else:
        for number, (_, _, own) in enumerate(kernels):
            blocks[number, own.size] = own
    return True


def movable(call: Call, form: Key) -> bool:
    """Whether it is of use to remember the launches of this call of a sequence together.

    It is not if tensors share an address, or if the form was given up or has all its templates.
    """
    key, tensors = call
    templates = _templates.get(form)
    apart = len(set(key[-len(tensors) :])) == len(tensors)
    return apart and (templates is None or 0 < len(templates) < _MAX_TEMPLATES)


def give_up(form: Key) -> None:
    """Calls of this form are not to be moved, unless it has templates."""
    if form not in _templates:
        _templates.put(form, ())


def _key_of_launch(key: Key, num_sms: object) -> Key:
    """The key under which `repeat` looks, for calls that were made while `Modes.num_sms` was `num_sms`."""
    return key if num_sms is None else (num_sms, key)


def first(
    prepare: Callable[..., Prepared],
    arguments: tuple[Any, ...],
    device: int,
    call: Call | None,
    form: Key | None,
) -> Launched | None:
    """Prepare a launch from an op's arguments, whose tensors are on `device`, and make it.

    It is remembered for `call` and its `form`, if they are given. Returns None if nothing was launched.
    """
    before = _exchange_device(device)
    try:
        changes = Modes.changes
        # A thread that has not called the CUDA runtime yet has no context, and tensor maps need one.
        ensure_context(device)
        return launch(prepare(*arguments), device, call, form, changes)
    finally:
        if before != device:
            _restore_device(before)


def launch(
    prepared: Prepared, device: int, call: Call | None, form: Key | None, changes: int
) -> Launched | None:
    """Launch the prepared kernel on the current `device`, loading it if need be; remember as `first` does.

    `changes`: `Modes.changes` before the preparation.
    """
    kernel = get_kernel(prepared.spec)
    # A launch that fails because the kernel is not prepared would end a capture.
    kernel.prepare(device)
    if not Modes.launching:
        return None
    kernel.launch(prepared.grid, _raw_stream(device), prepared.block, device)
    launched = Launched(kernel, prepared)
    if call is not None and form is not None:
        remember(call, form, device, [launched], changes)
    return launched


def remember(call: Call, form: Key, device: int, launched: Sequence[Launched], changes: int) -> None:
    """Remember what a call has launched on `device`, for `repeat` and `move`.

    `changes`: `Modes.changes` before the launches were prepared.
    """
    # If another thread has changed the number of SMs meanwhile, nobody knows which number the launches have.
    if form[0] != Modes.num_sms or changes != Modes.changes:
        return
    key, tensors = call
    kernels = tuple([(kernel, prepared.grid, prepared.block) for kernel, prepared in launched])
    made = _Launch(attributes_like(tensors), device, kernels)
    _launches.put(_key_of_launch(key, form[0]), made)
    addresses: Any = key[-len(tensors) :]
    template = _Template(made, addresses, tuple([prepared for _, prepared in launched]))
    _templates.put(form, (template, *_templates.get(form, ())[: _MAX_TEMPLATES - 1]))


def describe(prepare: Callable[..., Prepared], arguments: tuple[Any, ...], device: int) -> dict[str, Any]:
    """The kernel that `first` would launch: its spec, its grid and its key in the store."""
    with torch.cuda.device(device):
        ensure_context(device)
        prepared = prepare(*arguments)
    key = default_store().key(prepared.spec)
    return {"spec": str(prepared.spec), "grid": prepared.grid, "key": key}
