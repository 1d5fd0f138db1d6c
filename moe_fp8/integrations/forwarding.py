"""Calls that our kernels do not serve go to the engine's own copy of `deep_gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from moe_fp8.errors import UnsupportedError
from moe_fp8.integrations import vendored

_Function = TypeVar("_Function", bound=Callable[..., Any])


class NotServed(Exception):
    """The arguments are legal, and no kernel of ours serves them; the text says which and why."""


def or_vendored(function: _Function, names: Sequence[str] = ()) -> _Function:
    """`function`, but if it raises NotServed, the engine's own copy serves the call.

    names: the name that engines call, and its other spellings; by default the name of `function`. The copy's
    function is the first of these that it has. If there is no copy, or it has none of them, the call raises
    UnsupportedError with the reason.
    """
    names = names or (function.__name__,)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except NotServed as reason:
            other = next(filter(None, map(vendored.lookup, names)), None)
            if other is None:
                raise UnsupportedError(f"{names[0]}: {reason}") from None
        return other(*arguments, **options)

    return call  # type: ignore[return-value]
