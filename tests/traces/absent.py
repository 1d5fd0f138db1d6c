"""Stand-ins for what an engine imports and this machine lacks, so that its model code runs without a GPU.

A module that the engine's files import and that is not installed becomes a module whose attributes are empty classes. The
engine's own Python files are never replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection
from typing import Any

from pydantic_core import core_schema


class _Empty(type):
    """The class of stand-ins: every attribute is another stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __or__(cls, other: object) -> type:
        return object

    def __ror__(cls, other: object) -> type:
        return object

    def __getitem__(cls, item: object) -> object:
        return item

    def __iter__(cls) -> Any:
        return iter(())


def _stand_in(name: str) -> Any:
    def call(self: object, *arguments: Any, **options: Any) -> Any:
        # As a decorator it returns what it decorates.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    body = {
        "__init__": lambda self, *arguments, **options: None,
        "__call__": call,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: core_schema.any_schema()),
    }
    return _Empty(name, (object,), body)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that nothing else finds, if a file below `engine` imports them; see the module's text.

    `missing` are modules that stay missing, because the engine asks whether they are there. `compiled` are the
    engine's own extension modules, which are replaced.
    """

    def __init__(self, engine: str, missing: Collection[str], compiled: Collection[str]) -> None:
        self._engine, self._missing, self._compiled = engine, missing, tuple(compiled)
        self._made: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in self._missing or top in sys.stdlib_module_names:
            return None
        if top == self._engine and not name.startswith(self._compiled):
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if f"/{self._engine}/" not in frame.f_code.co_filename and top not in self._made:
            return None
        self._made.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Nothing:
    """A stand-in for streams, events and allocators of a GPU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None
