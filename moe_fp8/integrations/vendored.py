"""The engine's own copy of `deep_gemm`, which has the names that no kernel of ours serves.

It is imported when such a name is first needed, because its import needs a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_logger = logging.getLogger(__name__)

#: A package that vLLM ships.
_VLLM = "vllm.third_party.deep_gemm"
NAME = "deep_gemm"


#: Held while the copy is imported, so that no other thread takes a name for absent meanwhile. The import may
#: ask for names itself.
_lock = threading.RLock()


class _Copy:
    """The copy, once somebody has looked for it.

    `modules` are those of an installed package, by the names that they have there. `in_place` says that these
    names lead to them now. `modes` are settings that the copy must get when it is loaded.
    """

    looked: bool = False
    module: ModuleType | None = None
    modules: dict[str, ModuleType] = {}  # noqa: RUF012
    in_place: bool = False
    modes: dict[str, Any] = {}  # noqa: RUF012


def remember() -> None:
    """Keep the modules of an imported `deep_gemm`, and look for a copy anew at the next call."""
    _Copy.looked, _Copy.module = False, None
    _Copy.modules = in_force()


def forget() -> None:
    """Look for the copy again at the next call."""
    _Copy.looked, _Copy.module, _Copy.modules, _Copy.modes = False, None, {}, {}


def lookup(name: str, submodule: str = "") -> Any:
    """The object `name` of the copy's module (or of its `submodule`); None if there is none."""
    module = find()
    if module is None:
        return None
    for part in filter(None, submodule.split(".")):
        module = getattr(module, part, None)
        if module is None:
            return None
    return getattr(module, name, None)


def getter(module: str, submodule: str = "") -> Callable[[str], Any]:
    """A `__getattr__` for our module `module`: it gives the names of the copy's `submodule`."""

    def get(name: str) -> Any:
        found = None if name.startswith("__") else lookup(name, submodule)
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return found

    return get


def submodule(name: str) -> ModuleType | None:
    """The copy's own module `name`, such as "testing.bench"; None if it has none."""
    with _lock:
        copy = None if _Copy.in_place else find()
        if copy is None:
            return None
        if copy.__name__ != NAME:
            return _import(f"{copy.__name__}.{name}")
        known = _Copy.modules.get(f"{NAME}.{name}")
        if known is not None:
            return known
        with _in_its_place():
            return _import(f"{NAME}.{name}")


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def find() -> ModuleType | None:
    """The copy: an installed package `deep_gemm`, else the package that vLLM ships, else None."""
    with _lock:
        if not _Copy.looked:
            _Copy.looked = True  # for what the import itself asks for
            _Copy.module = _installed() or _shipped()
            where = "none" if _Copy.module is None else getattr(_Copy.module, "__file__", "?")
            _logger.info("the engine's own deep_gemm: %s", where)
            for setter, value in _Copy.modes.items():
                getattr(_Copy.module, setter, _nothing)(value)
        return _Copy.module


def set_too(setter: str, value: Any) -> None:
    """Call the copy's function `setter` with `value`, now or when the copy is loaded."""
    _Copy.modes[setter] = value
    if _Copy.module is not None:
        getattr(_Copy.module, setter, _nothing)(value)


def _nothing(value: Any) -> None:
    pass


def in_force() -> dict[str, ModuleType]:
    """The modules that have the place of `deep_gemm` and of its submodules now.

    A name whose import the user has blocked has None, as in `sys.modules`.
    """
    modules = list(sys.modules.items())
    return {name: module for name, module in modules if f"{name}.".startswith(f"{NAME}.")}


def _take_away() -> dict[str, ModuleType]:
    """Take these modules out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in in_force()}


@contextmanager
def _in_its_place() -> Iterator[None]:
    """Inside, `deep_gemm` and its submodules are the installed package's own."""
    hidden = _take_away()
    sys.modules.update(_Copy.modules)
    _Copy.in_place = True
    try:
        yield
    finally:
        _Copy.modules = _take_away()
        sys.modules.update(hidden)
        _Copy.in_place = False


def _installed() -> ModuleType | None:
    """A package `deep_gemm` on the path, behind the module that has its place in `sys.modules`."""
    if NAME in _Copy.modules:
        return _Copy.modules[NAME]
    with _in_its_place():
        try:
            if importlib.util.find_spec(NAME) is None:
                return None
            return importlib.import_module(NAME)
        except Exception as error:  # its import compiles and asks the GPU
            _logger.info("the installed deep_gemm cannot be imported: %s", error)
            return None


def _shipped() -> ModuleType | None:
    try:
        return importlib.import_module(_VLLM)
    except ImportError:
        return None
    except Exception as error:
        _logger.info("vLLM's own deep_gemm cannot be imported: %s", error)
        return None
