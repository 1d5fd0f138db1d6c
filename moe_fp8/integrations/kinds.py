"""The kinds of calls that an engine may leave to our kernels."""

from __future__ import annotations

from collections.abc import Iterable

from moe_fp8.errors import ConfigError
from moe_fp8.settings import ENGINE_KINDS

#: "dense": products of linear layers. "experts": grouped products. "indexer": logits of sparse attention.
KINDS = ENGINE_KINDS

_served: tuple[str, ...] = KINDS


def checked(kinds: Iterable[str]) -> tuple[str, ...]:
    """`kinds`, each once; a text is one kind. Raises ConfigError for an unknown kind."""
    given = (kinds,) if isinstance(kinds, str) else tuple(dict.fromkeys(kinds))
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown:
        raise ConfigError("serve", f"some of {', '.join(KINDS)}", unknown[0])
    return given


def serve(kinds: Iterable[str]) -> None:
    """From now on, our kernels serve these kinds. Raises ConfigError for an unknown kind."""
    global _served
    _served = checked(kinds)


def served() -> tuple[str, ...]:
    """The kinds that our kernels serve."""
    return _served
