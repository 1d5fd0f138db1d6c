"""Registration of the ops with torch, and what every op does around its kernel.

A family registers an op in one statement, `op = register(schema, check=..., reference=..., cuda=..., ...)`.
Every op writes into outputs that the caller allocates, so one schema serves eager calls, graphs and
`torch.compile` (which functionalises it). This module is the only user of `torch.library`; its low-level
`Library` is used because `torch.library.custom_op` costs several microseconds a call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from operator import attrgetter, itemgetter
from types import ModuleType, NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.autograd.profiler as _profiler
from torch import Tensor

from moe_fp8.ops.keys import Call
from moe_fp8.settings import settings

# Any: torch leaves Library's methods untyped.
_library: Any = torch.library.Library("moe_fp8", "DEF")


class Op(NamedTuple):
    """A registered op: `call` is what the package calls, `run` what torch does for the CPU and for CUDA.

    `arguments` are the names of the schema, in order; `cuda` is where the launch is prepared.
    """

    call: Callable[..., None]
    run: Callable[..., None]
    arguments: tuple[str, ...]
    cuda: str


#: Every registered op by its name.
OPS: dict[str, Op] = {}


class _Launcher:
    """`repeat` of `moe_fp8.ops.launch`, which is imported at the first CUDA call.

    So importing the ops loads no CUDA binding.
    """

    repeat: Callable[[Call], bool] | None = None


@cache
def _launcher() -> ModuleType:
    return importlib.import_module("moe_fp8.ops.launch")


def _load_repeat() -> Callable[[Call], bool]:
    repeat: Callable[[Call], bool] = _launcher().repeat
    _Launcher.repeat = repeat
    return repeat


@cache
def resolve(cuda: str) -> Callable[..., Any]:
    """The function that `register` was given as "module:function"."""
    module, _, function = cuda.partition(":")
    prepare: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return prepare


def checked(tensor: Tensor) -> bool:
    """Whether to look at contents now: checked mode is on, and `tensor`'s stream is not being captured.

    Reading contents waits for the device, which a capture does not allow.
    """
    if not settings().checked:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _nothing(*_arguments: object) -> None:
    """The usual meta implementation: outputs are given, so there is nothing to infer."""


# Not is_compiling, which takes twice as long: what else compiles or exports does it in a dispatch mode.
_gradients_on, _tracing = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack

# Types that override nothing, as other subclasses of Tensor do; a tensor that is not given is None.
_plain = frozenset({Tensor, torch.nn.Parameter, NoneType}).issuperset
_shape, _data_ptr = attrgetter("shape"), Tensor.data_ptr


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
) -> Callable[..., None]:
    """Register one op of torch; returns what the package calls with every argument of the schema, in order.

    `schema`: torch's text, in which `(a!)` marks the outputs; the first argument is a tensor, whose device
    decides where the op runs. The other parts take the schema's arguments by position.

    `check` raises what is wrong with them. It may return other arguments to run with, such as converted
    scales; such a call is not remembered.
    `contract` is called in checked mode and raises what is wrong with the tensors' contents.
    `empty` tells whether there is nothing to compute; what little there is instead, it has done then.
    `reference` is the CPU implementation.
    `cuda`, "module:function", prepares the launch: it returns (spec, grid, parameter block), or None where it
    has launched what was necessary itself. It is imported at the first CUDA call.
    `fake` is the meta implementation; outputs are given, so that most ops have nothing to do there.
    `varying` names tensors, in addition to the first, whose shapes change from call to call while their
    addresses do not, such as a cache that grows.

    Around them every op does the same: a call like one made before is launched again from what was
    remembered (`launch`); otherwise it is checked, prepared, launched and remembered.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    op = getattr(torch.ops.moe_fp8, name).default
    parameters = op._schema.arguments
    kinds = [str(parameter.type) for parameter in parameters]
    names = tuple(parameter.name for parameter in parameters)
    arity, defaults = len(parameters), tuple(parameter.default_value for parameter in parameters)

    tensors_of = _getter([at for at, kind in enumerate(kinds) if "Tensor" in kind])
    call_of = _call_of(name, names, kinds, varying)

    def fresh(arguments: tuple[Any, ...], call: Call | None) -> None:
        """A call like none before, or one that must not pass unseen."""
        first = arguments[0]
        others = check(*arguments)
        if others is not None:
            arguments, call = others, None
        if contract is not None and checked(first):
            contract(*arguments)
        if empty(*arguments):
            return
        if first.is_cuda:
            _launcher().first(resolve(cuda), arguments, first.get_device(), call)
        else:
            reference(*arguments)

    def run(*arguments: Any) -> None:
        if len(arguments) < arity:  # torch leaves out what has its default
            arguments += defaults[len(arguments) :]
        first = arguments[0]
        call = None
        if first.is_cuda and (contract is None or not checked(first)):
            call = call_of(arguments, tensors_of(arguments))
            if (_Launcher.repeat or _load_repeat())(call):
                return
        fresh(arguments, call)

    def eager(*arguments: Any) -> None:
        # Past torch's dispatcher, which is 1.5 us of a call, where that changes nothing: for plain CUDA
        # tensors with gradients off, as engines run, and where nothing traces, transforms or profiles.
        if (
            not _tracing()
            and _plain(map(type, tensors := tensors_of(arguments)))
            and tensors[0].is_cuda
            and not _gradients_on()
            and not _dispatch_modes()
            and not _profiler._is_profiler_enabled
            and settings().past_dispatcher
        ):
            call = call_of(arguments, tensors)
            if (_Launcher.repeat or _load_repeat())(call):
                return
            # These are of the plain type, and no call with one was ever remembered.
            if not any(map(torch._is_functional_tensor, call[1])):
                return fresh(arguments, call)
        op(*arguments)

    for key, implementation in (("CPU", run), ("CUDA", run), ("Meta", fake)):
        _library.impl(name, implementation, key)
    OPS[name] = Op(eager, run, names, cuda)
    return eager


#: All arguments of a call, and the tensors among them -> what the call is remembered by.
_CallOf: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...]], Call]


def _call_of(name: str, names: tuple[str, ...], kinds: list[str], varying: tuple[str, ...]) -> _CallOf:
    scalars_of = _getter([at for at, kind in enumerate(kinds) if "Tensor" not in kind])
    shapes_of = _getter([0, *(names.index(one) for one in varying)])

    # This is on the path of every call: a way for each kind of op takes less time than one way for all.
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


def _getter(positions: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The arguments at `positions`, as a tuple, in one call that runs no Python code."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))
