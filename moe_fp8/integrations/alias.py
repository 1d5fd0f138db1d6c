"""Puts `moe_fp8.integrations.deep_gemm` in the place of the module `deep_gemm`, and takes it away again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from moe_fp8.integrations import kinds, vendored
from moe_fp8.integrations.kinds import KINDS
from moe_fp8.integrations.vendored import NAME

HOME = "moe_fp8.integrations.deep_gemm"
MODULES = ("", ".utils", ".utils.layout", ".utils.math")

#: What `sys.modules` had under each name that `install` has taken; None blocks an import.
_before: dict[str, Any] = {}
_NOTHING = object()


class _Given(Loader):
    """Gives an import a module that exists already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module


class _Submodules(MetaPathFinder):
    """Finds the modules under `deep_gemm` that are not ours, such as `deep_gemm.testing`, in the copy."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        module = vendored.submodule(name) if package == NAME and name else None
        if module is None:
            return None
        self.given.append(fullname)
        return ModuleSpec(fullname, _Given(module))

    def forget(self) -> None:
        """Take back what was found: the names in `sys.modules`, and the attributes that imports have set."""
        for fullname in self.given:
            sys.modules.pop(fullname, None)
            parent, _, name = fullname.rpartition(".")
            if parent in _before:
                vars(sys.modules[parent]).pop(name, None)
        self.given.clear()


_submodules = _Submodules()


def install(serve: Iterable[str] = KINDS) -> ModuleType:
    """From now on, `import deep_gemm` gives `moe_fp8.integrations.deep_gemm`; returns this module.

    serve: the kinds of calls that our kernels serve ("dense", "experts", "indexer"). The other kinds, and
    names that no kernel of ours serves, go to the engine's own copy of `deep_gemm`, which is loaded when it
    is first needed. Names that the copy lacks too are absent. This includes modules, such as
    `deep_gemm.testing`.

    The call may be repeated with other kinds. It needs no GPU. It does not change modules that have already
    looked names up; the plug-ins do this for vLLM and SGLang. Raises ConfigError for an unknown kind.
    """
    kinds.serve(serve)
    if not _before:
        vendored.remember()
        origin = _origin()
        for part in MODULES:
            module = importlib.import_module(HOME + part)
            _before[NAME + part] = sys.modules.get(NAME + part, _NOTHING)
            sys.modules[NAME + part] = module
        # No import finds a file of ours under the name `deep_gemm`. (All our modules are loaded by now.)
        sys.modules[NAME].__path__ = []
        sys.meta_path.insert(0, _submodules)
        if origin is not None:
            _set_origin(origin)
    return sys.modules[NAME]


def _origin() -> str | None:
    """The file of the installed package `deep_gemm`; None if there is none."""
    try:
        spec = importlib.util.find_spec(NAME)
    except ValueError:  # a module of this name was made by hand
        return None
    return None if spec is None else spec.origin


def _set_origin(origin: str | None) -> None:
    """Make `importlib.util.find_spec` give `origin` as our module's file. The module's `repr` shows it, too.

    SGLang looks for DeepGEMM's C++ headers beside this file.
    """
    spec = importlib.import_module(HOME).__spec__
    assert spec is not None
    spec.origin = origin


def uninstall() -> None:
    """Undo `install`: `import deep_gemm` finds what it found before. Does nothing if nothing is installed.

    The modes and the alignment that the engine has set are as at first again, and our module serves all kinds
    under its own name.
    """
    if _before:
        kinds.serve(KINDS)
        home: Any = importlib.import_module(HOME)
        _set_origin(home.__file__)
        home.__path__ = home.__spec__.submodule_search_locations
        sys.meta_path.remove(_submodules)
        _submodules.forget()
        for part in (".modes", ".layout"):
            importlib.import_module(HOME + part).reset()
    for name, module in _before.items():
        if module is _NOTHING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _before.clear()
    vendored.forget()


def installed() -> tuple[str, ...]:
    """The kinds of calls that our kernels serve in the place of `deep_gemm`; () if it is not installed."""
    return kinds.served() if _before else ()
