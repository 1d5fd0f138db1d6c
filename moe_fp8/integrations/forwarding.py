"""Calls that our kernels do not serve go to the engine's own copy of `deep_gemm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from moe_fp8.errors import UnsupportedError
from moe_fp8.integrations import vendored

_Function = TypeVar("_Function", bound=Callable[..., Any])


class NotServed(Exception):
    """The arguments are legal, and no kernel of ours serves them; the text says which and why."""


def or_vendored(function: _Function) -> _Function:
    """Make `function` call the same name of the engine's own copy if it raises NotServed.

    If there is no copy, or it lacks the name, the call raises UnsupportedError with the reason.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except NotServed as reason:
            other = vendored.lookup(function.__name__)
            if other is None:
                raise UnsupportedError(f"{function.__name__}: {reason}") from None
        return other(*arguments, **options)

    return call  # type: ignore[return-value]
