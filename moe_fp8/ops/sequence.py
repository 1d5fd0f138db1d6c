"""Functions of several ops whose launches are remembered together, such as a layer.

A call of such a function that differs from an earlier call only in addresses copies the parameters of all
launches and writes its own addresses there. It takes no view of a tensor, and checks nothing but addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import demand_tensors
from moe_fp8.ops.modes import Modes
from moe_fp8.ops.registry import OPS, launcher, needs_dispatcher, past_dispatcher, tracing

_data_ptr = Tensor.data_ptr

#: An op's name, and its arguments in the order of its schema.
Step = tuple[str, tuple[Any, ...]]


def run(
    name: str,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[object, ...],
    check: Callable[[], None],
    steps: Callable[[], Sequence[Step]],
) -> None:
    """Run the ops of `steps` one after another.

    name: the function's name. tensors: all tensors that its caller gave or gets, with their `names`; the
    first is not None. scalars: its other arguments, hashable. check: raises ArgumentError if outputs share
    memory that they may not share; it comes before every launch that is not the repetition of an equal call.
    steps: the ops and their arguments. Arguments that are tensors are `tensors`, or views into tensors that
    `check` keeps apart from all others. Addresses affect nothing else: the steps depend on the scalars and on
    the tensors' attributes alone. `steps` raises ArgumentError for other invalid arguments. An op's error
    about one of `tensors`, or about a number, names the function and its argument.
    """
    given = tuple([tensor for tensor in tensors if tensor is not None])
    work = name, names, tensors, steps
    call = None
    if not tracing() and past_dispatcher(given):
        which = tuple([tensor is not None for tensor in tensors])
        try:  # noqa: SIM105 - suppress takes longer
            call = (name, given[0].shape, which, *scalars, *map(_data_ptr, given)), given
        except RuntimeError:  # the tensors of a function transform have no address
            pass
    if call is None:
        try:
            try:  # noqa: SIM105 - torch.compile traces this
                check()
            except RuntimeError:  # such tensors again: they cannot be checked
                pass
            _each(*work, fresh=False)
        except (AttributeError, TypeError):  # as in `registry`: what is no tensor always comes here
            demand_tensors(name, {at: one for at, one in zip(names, tensors, strict=True) if one is not None})
            raise
        return
    launch = launcher()
    if launch.repeat(call):
        return
    form = launch.form_of(call)
    if launch.move(call, form, check):
        return
    check()
    if not launch.movable(call, form) or needs_dispatcher(given):
        _each(*work, fresh=False)
        return
    changes = Modes.changes
    launched = _each(*work, fresh=True)
    if launched is None:
        return
    if all(launched):
        launch.remember(call, form, given[0].get_device(), launched, changes)
    elif Modes.launching:  # an op had nothing to do, or has done more than a launch
        launch.give_up(form)


def _each(
    name: str,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    steps: Callable[[], Sequence[Step]],
    *,
    fresh: bool,
) -> list[Any] | None:
    """Run the steps. With `fresh` the result has each step's launch, or None if there is none to remember.

    It is None if the dispatcher has converted arguments: a call of equal arguments would not be converted.
    """
    launched: list[Any] | None = []
    op_name, arguments = "", ()
    try:
        for op_name, arguments in steps():
            op = OPS[op_name]
            if not fresh or op.converts(arguments):
                op.call(*arguments)
                launched = None
            else:
                made = op.fresh(arguments, own_memory=True)
                if launched is not None:
                    launched.append(made)
    except ArgumentError as error:
        if op_name:
            wrong = dict(zip(OPS[op_name].arguments, arguments, strict=True)).get(error.argument)
            known = [own_name for tensor, own_name in zip(tensors, names, strict=True) if tensor is wrong]
            if not isinstance(wrong, Tensor) or error.argument in known:
                error.rename(name, error.argument)
            elif known:
                error.rename(name, known[0])
        raise
    return launched
