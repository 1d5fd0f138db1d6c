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

    If the copy lacks this name, as newer copies may, its other spelling is called (`fp8_fp4_x` for `fp8_x`).
    If there is no copy, or it has neither name, the call raises UnsupportedError with the reason.
    """
    name = function.__name__

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except NotServed as reason:
            other = vendored.lookup(name) or vendored.lookup(name.replace("fp8_", "fp8_fp4_", 1))
            if other is None:
                raise UnsupportedError(f"{name}: {reason}") from None
        return other(*arguments, **options)

    return call  # type: ignore[return-value]
