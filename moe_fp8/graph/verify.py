"""A trial whether a function may be captured: its replays are compared with eager calls, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError, CaptureError, UnsupportedError
from moe_fp8.graph import memory
from moe_fp8.graph.capture import capture, refuse_synchronization, warm_up
from moe_fp8.ops import contents
from moe_fp8.ops.arguments import integer

#: The inputs of a function: tensors by name, or in order.
Inputs: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor]

#: The bits of outputs and inputs after a call, by their names in messages.
_Bits: TypeAlias = dict[str, Tensor]

#: Every bit of the two differs. The first is NaN in every float format, and -1 as an integer.
_POISONS = (0xFF, 0x00)


@dataclass(frozen=True)
class CaptureReport:
    """What `verify_capture_safe` found: the outputs that it compared, and the bytes of the graph's pool.

    Inputs that the function changed are among them. `unchanged` are outputs whose bits are equal for both
    inputs; the trial shows little about them.
    """

    outputs: tuple[str, ...]
    unchanged: tuple[str, ...]
    pool_bytes: int


class _Captured(NamedTuple):
    """A captured call: its outputs at their fixed addresses, and what may be done with it."""

    outputs: dict[str, Tensor]
    replay: Callable[[], None]
    poison: Callable[[int], None]
    pool_bytes: Callable[[], int]


def verify_capture_safe(
    fn: Callable[[Any], object], inputs: Inputs, other_inputs: Inputs, *, warmup_runs: int = 2
) -> CaptureReport:
    """Capture `fn` in a CUDA graph and compare its replays with eager calls, bit for bit.

    fn: takes the tensors of `inputs`, as a dict by the same names or as a list in the same order, and returns
    tensors: one, or a mapping, tuple, named tuple or list of them, or None. It may write to its inputs.
    inputs, other_inputs: tensors of the same names, shapes, strides and dtypes, with other contents; at least
    one is on a CUDA device, and all CUDA tensors are on that device. Tensors on the CPU stand for host data.
    `fn` gets copies with the same strides. A tensor that fn writes in place (an `out`, a cache) belongs
    in the inputs: it is compared too, and fn may leave any of its elements as they are.
    warmup_runs: calls before the capture, at least 1; the last of them must not synchronize.

    The trial calls fn eagerly on both inputs, and once more on the first. It captures fn on static copies of
    `inputs`. Before each replay it fills the graph's pool, outputs and freed scratch included, with bytes
    that no eager call sees. It replays with `other_inputs`, twice with different fillings, and with `inputs`.

    Returns a `CaptureReport`. Raises CaptureError, which names the output, its first wrong element and a
    remedy, for: a host synchronization, with its line; values frozen at the capture; elements of a returned
    tensor that the graph does not write, or scratch that it reads before it writes; memory outside the
    graph's pool; calls that differ for the same inputs (random numbers, state that fn keeps); shapes
    that depend on contents. Raises ArgumentError for inputs that do not match or change no output,
    UnsupportedError without a CUDA device. What fn itself raises is raised as it is. No other thread may use
    the device meanwhile.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    warmup_runs = integer("verify_capture_safe", "warmup_runs", warmup_runs, 1)
    device = _device(name, inputs, other_inputs)
    first, other, again = (_eager(fn, given) for given in (inputs, other_inputs, inputs))
    static = _Static(inputs)
    captured = _capture(name, fn, static, inputs, device, warmup_runs)

    def replay(given: Inputs, byte: int) -> _Bits:
        static.load(given)
        captured.poison(_POISONS[byte])
        captured.replay()
        return _bits({**captured.outputs, **static.named()})

    replays = [replay(other_inputs, 0), replay(other_inputs, 1), replay(inputs, 0)]

    def compare_eager_calls() -> None:
        _compare(
            name, again, first, "the same bits from two eager calls with the same inputs",
            "give what fn keeps between calls as an input, and fix its random numbers",
        )  # fmt: skip

    if _differ(replays[1], replays[0]) and _differ(replay(other_inputs, 1), replays[1]):
        compare_eager_calls()  # replays differ after equal fillings, too
    _compare(
        name, replays[1], replays[0], "elements that every replay writes",
        "write the whole output, or give it as an input; write scratch before reading it",
    )  # fmt: skip
    compare_eager_calls()
    written = _written(first, inputs) | _written(other, other_inputs)
    outputs = tuple(key for key in first if key in written)
    unchanged = tuple(key for key in outputs if key in other and _difference(first[key], other[key]) is None)
    if len(unchanged) == len(outputs):
        raise ArgumentError(
            "verify_capture_safe", "other_inputs", "contents that change an output of fn", "the same outputs"
        )
    _compare(
        name, replays[0], other, "the bits of an eager call with the same inputs",
        "read every value on the device: what the host reads or computes is frozen at the capture",
        frozen=first,
    )  # fmt: skip
    _compare(
        name, replays[2], first, "the bits of an eager call with the first inputs",
        "a replay must not depend on what replays before it left behind",
    )  # fmt: skip
    return CaptureReport(outputs, unchanged, captured.pool_bytes())


def _capture(
    name: str,
    fn: Callable[[Any], object],
    static: _Static,
    inputs: Inputs,
    device: torch.device,
    warmup_runs: int,
) -> _Captured:
    """Warm up and capture `fn` on the static tensors with the contents of `inputs`, in a pool of its own."""
    with torch.cuda.device(device):
        warm_up(lambda: fn(static.load(inputs)), warmup_runs - 1)
        arguments = static.load(inputs)
        refuse_synchronization(name, lambda: fn(arguments))
        arguments = static.load(inputs)
        pool = torch.cuda.graph_pool_handle()

        def call() -> tuple[object, set[int]]:
            before = {block.address for block in memory.blocks(device) if block.used}
            result = fn(arguments)
            return result, {block.address for block in memory.blocks(device) if block.used} - before

        graph, (result, outside) = capture(name, call, pool)
        # Outputs that are inputs, or views of them, are compared as inputs.
        storages = {tensor.untyped_storage().data_ptr() for tensor in static.named().values()}
        outputs = {
            key: tensor
            for key, tensor in _named("output", result).items()
            if tensor.untyped_storage().data_ptr() not in storages
        }
        own = list(memory.blocks(device, pool))
        stray = [
            key for key, tensor in outputs.items() if tensor.numel() and not memory.contains(own, tensor)
        ]
        if stray or outside:
            raise CaptureError(
                name,
                stray[0] if stray else "capture",
                "memory of the graph's pool, or an input",
                "memory that fn allocated or keeps elsewhere",
                "allocate on the captured stream, and give tensors that outlive a call as inputs",
            )

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()
            torch.cuda.synchronize()

    return _Captured(
        outputs,
        replay,
        lambda byte: memory.poison(device, pool, byte),
        lambda: memory.pool_bytes(pool),
    )


class _Static:
    """Copies of a function's inputs at addresses that stay, with the strides of the inputs."""

    def __init__(self, given: Inputs) -> None:
        twins = [_twin(tensor) for _, tensor in _items(given)]
        self.tensors: Any = dict(zip(given, twins, strict=True)) if isinstance(given, Mapping) else twins

    def load(self, given: Inputs) -> Any:
        """Copy the contents of `given`, and return the tensors as an argument for one call.

        The call may write to the tensors, and bind other tensors to their names.
        """
        for (_, mine), (_, theirs) in zip(_items(self.tensors), _items(given), strict=True):
            _memory_of(mine).copy_(_memory_of(theirs))
        return self.tensors.copy()

    def named(self) -> dict[str, Tensor]:
        return {f"input {key}": tensor for key, tensor in _items(self.tensors)}


def _items(given: Inputs) -> list[tuple[object, Tensor]]:
    return list(given.items()) if isinstance(given, Mapping) else list(enumerate(given))


def _memory_of(tensor: Tensor) -> Tensor:
    """The elements from the first to the last of `tensor` in memory, those between its rows included."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span if tensor.numel() else 0,), (1,))


def _twin(tensor: Tensor) -> Tensor:
    elements = torch.empty(_memory_of(tensor).numel(), dtype=tensor.dtype, device=tensor.device)
    return elements.as_strided(tensor.shape, tensor.stride())


def _eager(fn: Callable[[Any], object], given: Inputs) -> _Bits:
    static = _Static(given)
    result = fn(static.load(given))
    storages = {tensor.untyped_storage().data_ptr() for tensor in static.named().values()}
    outputs = _named("output", result).items()
    own = {key: tensor for key, tensor in outputs if tensor.untyped_storage().data_ptr() not in storages}
    return _bits({**own, **static.named()})


def _bits(tensors: Mapping[str, Tensor]) -> _Bits:
    return {
        key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }


def _written(after: _Bits, given: Inputs) -> set[str]:
    """The outputs, and the inputs that a call has changed."""
    before = {f"input {key}": tensor for key, tensor in _items(given)}
    return {
        key
        for key, tensor in after.items()
        if key not in before or _difference(tensor, before[key]) is not None
    }


def _named(prefix: str, value: object) -> dict[str, Tensor]:
    """The tensors of a result, by their places in it."""
    parts: Iterable[tuple[str, object]]
    if isinstance(value, Tensor):
        return {prefix: value}
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = ((f"{prefix} {key}", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts = ((f"{prefix}.{key}", part) for key, part in value._asdict().items())
    elif isinstance(value, (tuple, list)):
        parts = ((f"{prefix}[{at}]", part) for at, part in enumerate(value))
    else:
        raise ArgumentError("verify_capture_safe", "fn", "a result of tensors", type(value).__name__)
    return {name: tensor for key, part in parts for name, tensor in _named(key, part).items()}


def _compare(
    name: str, got: _Bits, expected: _Bits, rule: str, remedy: str, frozen: _Bits | None = None
) -> None:
    """Raise CaptureError for the first output, or input after the call, whose bits differ."""
    if got.keys() != expected.keys():
        raise CaptureError(name, "outputs", f"{rule}: {sorted(expected)}", sorted(got), remedy)
    for key, tensor in got.items():
        wanted = expected[key]
        at = _difference(tensor, wanted)
        if at is None:
            continue
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
        else:
            found = f"{_value(tensor, at)} instead of {_value(wanted, at)} at {list(at)}"
            if frozen is not None and _difference(tensor, frozen[key]) is None:
                found += ", which is the result of the first inputs"
        raise CaptureError(name, key, rule, found, remedy)


def _differ(got: _Bits, expected: _Bits) -> bool:
    """Whether an output, or an input after the call, differs between two replays."""
    return any(_difference(tensor, expected[key]) is not None for key, tensor in got.items())


def _value(tensor: Tensor, at: tuple[int, ...]) -> object:
    return tensor[at].to(torch.float64).item() if tensor.is_floating_point() else tensor[at].item()


def _difference(got: Tensor, expected: Tensor) -> tuple[int, ...] | None:
    """The index of the first element whose bits differ, () if shapes or dtypes do; None if all are equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return ()
    if got.numel() == 0:
        return None
    size = got.element_size()
    left, right = (tensor.reshape(-1, 1).view(torch.uint8).view(-1, size) for tensor in (got, expected))
    return contents.first((left != right).any(1).view(got.shape))


def _device(name: str, inputs: Inputs, others: Inputs) -> torch.device:
    """The device of all CUDA tensors; raises for inputs that do not match."""
    op = "verify_capture_safe"
    for argument, given in (("inputs", inputs), ("other_inputs", others)):
        kind = type(given).__name__
        if not isinstance(given, (Mapping, Sequence)):  # a tensor would count as the sequence of its rows
            raise ArgumentError(op, argument, "a dict or a list of tensors", kind)
        for key, value in _items(given):
            if not isinstance(value, Tensor):
                raise ArgumentError(op, f"{argument}: {key}", "a tensor", type(value).__name__)
    if [key for key, _ in _items(inputs)] != [key for key, _ in _items(others)]:
        raise ArgumentError(
            op,
            "other_inputs",
            f"the names {[key for key, _ in _items(inputs)]}",
            [key for key, _ in _items(others)],
        )
    for (key, one), (_, two) in zip(_items(inputs), _items(others), strict=True):
        like = (one.shape, one.stride(), one.dtype, one.device)
        if like != (two.shape, two.stride(), two.dtype, two.device):
            expected = f"{one.dtype} {list(one.shape)} with stride {one.stride()} on {one.device}"
            got = f"{two.dtype} {list(two.shape)} with stride {two.stride()} on {two.device}"
            raise ArgumentError(op, f"other_inputs: {key}", expected, got)
    devices = {tensor.device for _, tensor in _items(inputs) if tensor.is_cuda}
    if not devices:
        raise UnsupportedError(
            f"{op}: {name} has no input on a CUDA device, and a CPU captures nothing; give tensors on a GPU"
        )
    if len(devices) > 1:
        raise ArgumentError(op, "inputs", "tensors on one CUDA device", sorted(map(str, devices)))
    return devices.pop()
