"""Puts `moe_fp8.integrations.deep_gemm` in the place of the module `deep_gemm`, and takes it away again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType

from moe_fp8.integrations import kinds, vendored
from moe_fp8.integrations.kinds import KINDS

_NAME = "deep_gemm"
_HOME = "moe_fp8.integrations.deep_gemm"
_MODULES = ("", ".utils", ".utils.layout", ".utils.math")

#: What `sys.modules` had under each name that `install` has taken; None if it had nothing.
_before: dict[str, ModuleType | None] = {}


def install(serve: Iterable[str] = KINDS) -> ModuleType:
    """From now on, `import deep_gemm` gives `moe_fp8.integrations.deep_gemm`; returns this module.

    serve: the kinds of calls that our kernels serve ("dense", "experts", "indexer"). The other kinds, and
    names that no kernel of ours serves, go to the engine's own copy of `deep_gemm`, which is loaded when it
    is first needed. Names that the copy lacks too are absent.

    The call may be repeated with other kinds. It needs no GPU. It does not change modules that have already
    looked names up; the plug-ins reset those of vLLM. Raises ConfigError for an unknown kind.
    """
    kinds.serve(serve)
    if not _before:
        vendored.remember()
        for part in _MODULES:
            module = importlib.import_module(_HOME + part)
            _before[_NAME + part] = sys.modules.get(_NAME + part)
            sys.modules[_NAME + part] = module
    return sys.modules[_NAME]


def uninstall() -> None:
    """Undo `install`: `import deep_gemm` finds what it found before. Does nothing if nothing is installed."""
    for name, module in _before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _before.clear()
    vendored.forget()


def installed() -> tuple[str, ...]:
    """The kinds of calls that our kernels serve in the place of `deep_gemm`; () if it is not installed."""
    return kinds.served() if _before else ()
