"""Functions of several ops whose launches are remembered together, such as a layer.

A call of such a function that differs from an earlier call only in addresses copies the parameters of all
launches and writes its own addresses there. It takes no view of a tensor, and checks nothing but addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.modes import Modes
from moe_fp8.ops.registry import OPS, Op, launcher, needs_dispatcher, past_dispatcher, tracing

_data_ptr = Tensor.data_ptr

#: An op's name, and its arguments in the order of its schema.
Step = tuple[str, tuple[Any, ...]]


_Made = TypeVar("_Made")


def run(
    name: str,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[object, ...],
    check: Callable[[], None],
    steps: Callable[[], Sequence[Step]],
) -> None:
    """Run the ops of `steps` one after another.

    name: the function's. tensors: all that its caller gave or gets, with their `names`; the first is not
    None. scalars: its other arguments, hashable. check: raises ArgumentError if outputs share memory that
    they may not share; it comes before every launch that is not the repetition of an equal call.
    steps: the ops and their arguments. Arguments that are tensors are `tensors`, or views into tensors that
    `check` keeps apart from all others. Nothing else depends on addresses; it depends on the scalars and the
    tensors' attributes alone. It raises ArgumentError for other invalid arguments. An op's error about one of
    `tensors` names it as the function does.
    """

    def each(do: Callable[[Op, tuple[Any, ...]], _Made]) -> list[_Made]:
        return [_named(name, names, tensors, op, arguments, do) for op, arguments in steps()]

    given = tuple([tensor for tensor in tensors if tensor is not None])
    if tracing() or not (past_dispatcher(given) and Modes.launching):
        check()
        each(_call)
        return
    which = tuple([tensor is not None for tensor in tensors])
    try:
        call = (name, given[0].shape, which, *scalars, *map(_data_ptr, given)), given
    except RuntimeError:  # the tensors of a function transform have no address
        each(_call)
        return
    launch = launcher()
    if launch.repeat(call):
        return
    form = launch.form_of(call)
    if launch.move(call, form, check):
        return
    check()
    if not launch.movable(call, form) or needs_dispatcher(given):
        each(_call)
        return
    launched = each(_fresh)
    if all(launched):
        launch.remember(call, form, given[0].get_device(), launched)
    elif Modes.launching:  # an op had nothing to do, or has done more than a launch
        launch.give_up(form)


def _call(op: Op, arguments: tuple[Any, ...]) -> None:
    op.call(*arguments)


def _fresh(op: Op, arguments: tuple[Any, ...]) -> Any:
    """The op's launch, or None if there is none to remember."""
    if op.converts(arguments):
        return op.call(*arguments)
    return op.fresh(arguments, own_memory=True)


def _named(
    name: str,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    op: str,
    arguments: tuple[Any, ...],
    do: Callable[[Op, tuple[Any, ...]], _Made],
) -> _Made:
    """`do` one step."""
    try:
        return do(OPS[op], arguments)
    except ArgumentError as error:
        wrong = dict(zip(OPS[op].arguments, arguments, strict=True)).get(error.argument)
        for tensor, known in zip(tensors, names, strict=True):
            if tensor is not None and tensor is wrong:
                error.rename(name, known)
        raise
