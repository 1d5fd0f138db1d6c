"""Registration of the ops with torch, and the steps that every op takes around its kernel.

A family registers an op in one statement, `op = register(schema, check=..., reference=..., cuda=..., ...)`.
Every op writes into outputs that the caller allocates, so one schema serves eager calls, graphs and
`torch.compile` (which functionalizes it). This module is the only user of `torch.library`. It uses the
low-level `Library`, because `torch.library.custom_op` costs several microseconds per call.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from operator import attrgetter, itemgetter
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.autograd.profiler as _profiler
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import apart, demand_tensors, traced
from moe_fp8.ops.examine import examine
from moe_fp8.ops.keys import Call, Key
from moe_fp8.ops.scales import is_mn_major, to_mn_major
from moe_fp8.settings import settings

if TYPE_CHECKING:
    from moe_fp8.ops.launch import Launched

_log = logging.getLogger(__name__)

# The type is Any, because torch leaves Library's methods untyped.
_library: Any = torch.library.Library("moe_fp8", "DEF")


class Op(NamedTuple):
    """A registered op: the package calls `call`, and torch's dispatcher calls `run` for the CPU and for CUDA.

    `fresh` checks and runs a call without using a remembered launch. Given the arguments alone, it
    remembers nothing of the call. It returns the launch, or None if the call is not the launch of one kernel
    with these arguments. With `own_memory`, outputs are known to share no memory with other arguments.
    `arguments` are the argument names of the schema, in order; `cuda` names the function that prepares the
    launch, as "module:function". `check` is that of `register`. `apart` raises ArgumentError if an output
    shares memory with another argument. `examine` checks contents in checked mode, given the caller's
    arguments and those that the check made of them. `converts` tells whether torch's dispatcher would convert
    an argument that is no tensor, such as a tensor in the place of a number.
    """

    call: Callable[..., None]
    run: Callable[..., None]
    fresh: Callable[..., Launched | None]
    arguments: tuple[str, ...]
    cuda: str
    check: Callable[..., tuple[Any, ...] | None]
    apart: Callable[[tuple[Any, ...]], None]
    examine: Callable[[tuple[Any, ...], tuple[Any, ...]], None]
    converts: Callable[[tuple[Any, ...]], bool]


#: Name -> registered op.
OPS: dict[str, Op] = {}


@cache
def launcher() -> ModuleType:
    """The module `moe_fp8.ops.launch`. The first CUDA call imports it; the ops alone load no CUDA binding."""
    return importlib.import_module("moe_fp8.ops.launch")


@cache
def resolve(cuda: str) -> Callable[..., Any]:
    """Import the function that `cuda` names as "module:function"."""
    module, _, function = cuda.partition(":")
    prepare: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return prepare


def checked(tensor: Tensor) -> bool:
    """Whether to check contents now: checked mode is on, and the current stream is not being captured.

    Reading contents waits for the device, which a capture does not allow. Tensors of the meta device and of
    exporters have none.
    """
    if not settings().checked or tensor.is_meta or is_fake(tensor):
        return False
    if not tensor.is_cuda:
        return True
    with torch.cuda.device(tensor.device):  # whose current stream runs the op
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        _say_unchecked()
    return not capturing


@cache
def _say_unchecked() -> None:
    """Warn once in a process."""
    _log.warning(
        "MOE_FP8_CHECKED=1: contents are not checked while a stream is captured, nor when its graph is "
        "replayed; run the same calls without a graph to check them"
    )


def _nothing(*_arguments: object) -> None:
    """The usual meta implementation: the caller gives the outputs, so there is nothing to infer."""


# is_compiling would take twice as long and is not needed: other compilers and exporters use a dispatch mode.
_gradients_on, tracing = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack

# These types override nothing, unlike other subclasses of Tensor. An optional tensor may be None.
_plain = frozenset({Tensor, torch.nn.Parameter, NoneType}).issuperset
_shape, _data_ptr = attrgetter("shape"), Tensor.data_ptr


def past_dispatcher(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a call on these tensors may skip torch's dispatcher, which costs 1.5 us a call.

    The result is the same if all are plain CUDA tensors, gradients are off, as in engines, and nothing
    traces, transforms or profiles the call. Callers ask for `tracing` first, since torch.compile cannot trace
    this function. The first tensor is not None. A call that is not remembered must also ask
    `needs_dispatcher`.
    """
    return (
        _plain(map(type, tensors))
        and tensors[0].is_cuda  # type: ignore[union-attr]
        and not _gradients_on()
        and not _dispatch_modes()
        and not _profiler._is_profiler_enabled
        and settings().past_dispatcher
    )


def needs_dispatcher(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a call on these tensors needs torch's dispatcher although `past_dispatcher` lets it pass.

    What is remembered never matches such a call: functional tensors, zero tensors and tensors with a negative
    bit have other dispatch keys, and the sizes of tensors that `torch.jit.trace` traces are tensors. Within a
    transform of `torch.func`, a layer allocates other tensors than an eager layer (`traced`).
    """
    return (
        traced()
        or torch._C._get_tracing_state() is not None
        or any(map(torch._is_functional_tensor, tensors))
        or any(map(Tensor.is_neg, tensors))
        or any(map(Tensor._is_zerotensor, tensors))
    )


#: The types that the dispatcher passes on as they are, or as an equal number.
_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)
}  # fmt: skip


def _converts(kinds: list[str]) -> Callable[[tuple[Any, ...]], bool]:
    """`Op.converts` for arguments of these kinds."""
    positions = [at for at, kind in enumerate(kinds) if "Tensor" not in kind]
    types = []
    for at in positions:
        kind = kinds[at].removeprefix("Optional[").removesuffix("]")
        types.append(_SCALARS[kind] + ((NoneType,) if kind != kinds[at] else ()))
    scalars_of, passed = _getter(positions), frozenset(product(*types))

    def converts(arguments: tuple[Any, ...]) -> bool:
        scalars = scalars_of(arguments)
        return tuple(map(type, scalars)) not in passed and not all(map(isinstance, scalars, types))

    return converts


def register(
    schema: str,
    *,
    check: Callable[..., tuple[Any, ...] | None],
    empty: Callable[..., bool],
    reference: Callable[..., None],
    cuda: str,
    contract: Callable[..., None] | None = None,
    fake: Callable[..., None] = _nothing,
    varying: tuple[str, ...] = (),
    mn_major: str | None = None,
) -> Callable[..., None]:
    """Register one op with torch; returns a function that takes every argument of the schema, in order.

    `schema`: torch's text, in which `(a!)` marks the outputs. The first argument is a tensor; its device
    decides where the op runs. The functions below take the schema's arguments by position.

    `check` raises an error for invalid arguments. It may return other arguments to run with, such as
    converted scales; the launch of this call is then not remembered.
    `contract` is called in checked mode, before the launch, and raises ContractError for invalid contents of
    tensors. It is plain torch, on either device. A failed check leaves a replay file (`examine`).
    `empty` returns whether there is nothing for a kernel to compute; it has then done any remaining work.
    `reference` is the CPU implementation.
    `cuda`, "module:function", prepares the launch: it returns `Prepared` (`parameters`). Apart from the
    addresses, which it gives as the op's own tensors, the result depends only on the tensors' attributes, on
    the alignment of their addresses to 16 bytes, on the other arguments and on the modes. It is imported at
    the first CUDA call.
    `fake` is the meta implementation; the caller gives the outputs, so for most ops it does nothing.
    `varying` names tensors, in addition to the first, whose shapes change from call to call while their
    addresses do not, such as a cache that grows.
    `mn_major` names an output of scales that the kernel writes only if they are MN-major. Others are written
    through an MN-major copy: torch's functionalization may replace an output by a clone without padding.

    All ops share the other steps. A call is checked, prepared and launched, and its launch is remembered
    (`launch`). Calls that differ from it only in addresses make it again, with their own addresses, and an
    equal call does so without any check.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    op = getattr(torch.ops.moe_fp8, name).default
    parameters = op._schema.arguments
    kinds = [str(parameter.type) for parameter in parameters]
    names = tuple(parameter.name for parameter in parameters)
    arity, defaults = len(parameters), tuple(parameter.default_value for parameter in parameters)

    tensors = tuple(at for at, kind in enumerate(kinds) if "Tensor" in kind)
    written = tuple(at for at in tensors if (alias := parameters[at].alias_info) and alias.is_write)
    check_apart = partial(apart, name, names, tensors, written)
    tensors_of = _getter(tensors)
    optional = tuple(at for at in tensors if "Optional" in kinds[at])
    scales_at = None if mn_major is None else names.index(mn_major)
    integers = tuple(at for at, kind in enumerate(kinds) if "int" in kind)
    texts = tuple(at for at, kind in enumerate(kinds) if "str" in kind)
    call_of, converts = _call_of(name, names, kinds, varying), _converts(kinds)

    def fresh(
        arguments: tuple[Any, ...],
        call: Call | None = None,
        form: Key | None = None,
        own_memory: bool = False,
    ) -> Launched | None:
        """Check and run a call that has no remembered launch, or that must not use it (`call` is None).

        Its launch is remembered for `call` and its `form` (`launch.form_of`). `own_memory`: outputs are known
        to share no memory with other arguments.
        """
        first = arguments[0]
        given, others = arguments, check(*arguments)
        if not own_memory:
            check_apart(arguments)
        if others is not None:
            arguments, call, form = others, None, None
        examine_contents(given, arguments)
        if empty(*arguments):
            return None
        if first.is_cuda:
            if scales_at is not None and not is_mn_major(scales := arguments[scales_at]):
                padded = to_mn_major(scales)  # rows that the kernel does not write keep their values
                run(*arguments[:scales_at], padded, *arguments[scales_at + 1 :])
                scales.detach().copy_(padded)  # also within `compile_only`
                return None
            device = first.get_device()
            launched: Launched | None = launcher().first(resolve(cuda), arguments, device, call, form)
            return launched if others is None else None
        # As on a GPU, no derivative is computed and no operand is rounded.
        plain = (one.detach() if isinstance(one, Tensor) else one for one in arguments)
        with torch.autocast("cpu", enabled=False):
            reference(*plain)
        return None

    def examine_contents(given: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        if contract is not None and checked(first := arguments[0]):
            examine(
                name,
                dict(zip(names, given, strict=True)),
                partial(contract, *arguments),
                partial(describe, arguments) if first.is_cuda else None,
            )

    def describe(arguments: tuple[Any, ...]) -> dict[str, Any]:
        described: dict[str, Any] = launcher().describe(resolve(cuda), arguments, arguments[0].get_device())
        return described

    def run(*arguments: Any) -> None:
        if len(arguments) < arity:  # torch omits trailing arguments that equal their defaults
            arguments += defaults[len(arguments) :]
        first = arguments[0]
        call = form = None
        if first.is_cuda and (contract is None or not checked(first)):
            call = call_of(arguments, tensors_of(arguments))
            if launcher().repeat(call):
                return
            form = launcher().form_of(call)
            if launcher().move(call, form, partial(check_apart, arguments)):
                return
        fresh(arguments, call, form)

    def eager(*arguments: Any) -> None:
        # It repeats some steps of `run`, since a function for them would cost each call time.
        try:
            if not tracing() and past_dispatcher(given := tensors_of(arguments)):
                try:
                    call = call_of(arguments, given)
                except RuntimeError:  # the tensors of a function transform have no address
                    op(*arguments)
                    return
                if launcher().repeat(call):
                    return
                form = launcher().form_of(call)
                if launcher().move(call, form, partial(check_apart, arguments)):
                    return
                if not converts(arguments) and not needs_dispatcher(call[1]):
                    fresh(arguments, call, form)
                    return
            for at in integers:
                if isinstance(arguments[at], float):
                    raise ArgumentError(name, names[at], "an integer", arguments[at])
            for at in texts:
                if at < len(arguments) and not isinstance(arguments[at], (str, NoneType)):
                    raise ArgumentError(name, names[at], "a text", arguments[at])
            op(*arguments)
        except (AttributeError, TypeError, RuntimeError):
            # Nothing has looked whether tensors are tensors, which would take time.
            needed = [at for at in tensors if at not in optional or arguments[at] is not None]
            demand_tensors(name, {names[at]: arguments[at] for at in needed})
            raise

    def meta(*arguments: Any) -> None:
        # Torch also comes here if only some of the tensors are on the meta device.
        given = [(at, one) for at, one in zip(names, arguments, strict=False) if isinstance(one, Tensor)]
        without = next((at for at, one in given if one.is_meta), "")
        for at, one in given:
            if not one.is_meta:
                raise ArgumentError(name, without, f"device {one.device}, as {at}", "meta", "load it there")
        fake(*arguments)

    for key, implementation in (("CPU", run), ("CUDA", run), ("Meta", meta)):
        _library.impl(name, implementation, key)
    OPS[name] = Op(eager, run, fresh, names, cuda, check, check_apart, examine_contents, converts)
    return eager


#: All arguments of a call, and the tensors among them -> the key and the tensors of the call.
_CallOf: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...]], Call]


def _call_of(name: str, names: tuple[str, ...], kinds: list[str], varying: tuple[str, ...]) -> _CallOf:
    scalars_of = _getter([at for at, kind in enumerate(kinds) if "Tensor" not in kind])
    shapes_of = _getter([0, *(names.index(one) for one in varying)])

    # Every call runs one of these functions; a function for each kind of op is faster than a general one.
    # The addresses come last, as `launch` expects.
    def plain(arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Call:
        return (name, tensors[0].shape, *scalars_of(arguments), *map(_data_ptr, tensors)), tensors

    def with_shapes(arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Call:
        shapes = map(_shape, shapes_of(arguments))
        return (name, *shapes, *scalars_of(arguments), *map(_data_ptr, tensors)), tensors

    def with_optional(arguments: tuple[Any, ...], tensors: tuple[Any, ...]) -> Call:
        given = [tensor is not None for tensor in tensors]
        tensors = tuple([tensor for tensor in tensors if tensor is not None])
        shapes = map(_shape, shapes_of(arguments))
        return (name, *shapes, *given, *scalars_of(arguments), *map(_data_ptr, tensors)), tensors

    if "Optional[Tensor]" in kinds:
        return with_optional
    return with_shapes if varying else plain


def _getter(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The arguments at `positions`, as a tuple, in one call that runs no Python code."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))
