"""An engine's modules, executed from their sources in a process that does not have the engine.

Modules named in `real` run unchanged. Every other module of the engine is hollow: its names exist, so that an
import succeeds, but a call of one fails unless the test provides a stand-in for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.engines.sources import Engine, fetch


class Hollow(type):
    """The class of every name that a module imports and no test provides.

    Such a name can be a base class, a part of an annotation or a value to compare with.
    """

    layers: EngineLayers
    path: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.layers.name(f"{cls.path}.{name}")

    def __getitem__(cls, key: Any) -> Hollow:
        return cls

    def __bool__(cls) -> bool:
        raise AssertionError(f"{cls.path} decides what runs, but the test provides no value for it")

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{cls.path} is called, but the test provides no stand-in for it")


class HollowModule(ModuleType):
    """A module of the engine of which nothing is executed."""

    layers: EngineLayers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.layers.name(f"{self.__name__}.{name}")


class EngineLayers(MetaPathFinder, Loader):
    """The modules `real` of an engine, with `provided` (dotted name -> stand-in) for names of other modules.

    `absent` are modules whose import fails, as it does where an optional part of the engine is not built.
    `active()` makes the modules importable. `files` are the sources that ran, and `used` the names of
    `provided` that the engine's code has asked for.
    """

    def __init__(
        self,
        engine: Engine,
        real: Iterable[str],
        provided: Mapping[str, Any],
        *,
        absent: Iterable[str] = (),
    ) -> None:
        self.engine = engine
        self.real = frozenset(real)
        self.provided = dict(provided)
        self.absent = frozenset(absent)
        self.files: set[Path] = set()
        self.used: set[str] = set()
        self._modules: dict[str, ModuleType] = {}
        self._names: dict[str, Any] = {}

    @contextmanager
    def active(self) -> Iterator[EngineLayers]:
        """The engine's modules are importable inside; the same ones in every use."""
        if self in sys.meta_path:
            yield self
            return
        outside = self._taken_out()
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self)
        try:
            yield self
        finally:
            sys.meta_path.remove(self)
            self._modules = self._taken_out()
            sys.modules.update(outside)

    def _owns(self, name: str) -> bool:
        return name.split(".", 1)[0] == self.engine.package

    def _taken_out(self) -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if self._owns(name)}

    def name(self, path: str) -> Any:
        """What the engine's code gets for a dotted name of a hollow module."""
        if path in self.provided:
            self.used.add(path)
            return self.provided[path]
        if path in self.real or any(name.startswith(f"{path}.") for name in (*self.real, *self.provided)):
            return importlib.import_module(path)
        if path not in self._names:
            self._names[path] = Hollow(path.rpartition(".")[2], (), {"layers": self, "path": path})
        return self._names[path]

    def module(self, name: str) -> Any:
        """The engine's module `name`."""
        with self.active():
            return importlib.import_module(name)

    def source(self, name: str) -> Path:
        """The file of a real module."""
        stem = fetch(self.engine) / name.replace(".", "/")
        package = stem / "__init__.py"
        return package if package.is_file() else stem.with_suffix(".py")

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._owns(name) or name in self.absent:
            return None
        if name not in self.real:
            return ModuleSpec(name, self, is_package=True)
        file = self.source(name)
        self.files.add(file)
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = HollowModule(spec.name)
        module.layers = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass
