"""The names of `deep_gemm` that modules of SGLang hold.

SGLang imports `deep_gemm` when its own modules are imported, and the processes that run a model import these
modules before they call a plug-in. So each name that such a module holds is replaced.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from moe_fp8.integrations import alias, vendored

_SGLANG = "sglang."

#: Modules with functions that look a name of `deep_gemm` up once and keep it.
_KEEPERS = ("sglang.srt.layers.attention.dsa.utils", "sglang.srt.layers.attention.dsv4.v41_indexer")


class Names:
    """The modules of `deep_gemm` before another module takes their place, and the change of all names."""

    def __init__(self) -> None:
        self._before = vendored.in_force()

    def replace(self) -> None:
        """Make each module of SGLang hold the objects of the modules that have the place of `deep_gemm`."""
        _exchange(self._before, vendored.in_force())

    def restore(self) -> None:
        """Give each module of SGLang the objects of SGLang's own `deep_gemm` again, if it can be imported.

        Call it after the modules of `deep_gemm` have their place again.
        """
        ours = {vendored.NAME + part: importlib.import_module(alias.HOME + part) for part in alias.MODULES}
        for name in ours:
            with suppress(Exception):  # its import compiles and asks the GPU
                importlib.import_module(name)
        _exchange(ours, vendored.in_force())


def _exchange(old: dict[str, ModuleType], new: dict[str, ModuleType]) -> None:
    """In SGLang's modules, replace each object of the modules `old` by that of the same name in `new`."""
    # The id of an object -> the object, which must live as long as its id counts, and what replaces it.
    wanted: dict[int, tuple[Any, Any]] = {}
    for name, module in old.items():
        if name not in new or new[name] is module or None in (module, new[name]):
            continue
        wanted[id(module)] = module, new[name]
        for attribute in dir(module):
            value = getattr(module, attribute, None)
            if callable(value) and not attribute.startswith("__"):
                replacement = getattr(new[name], attribute, value)
                # One function may have several names; the new module may still give it for some of them.
                if replacement is not value:
                    wanted.setdefault(id(value), (value, replacement))
    for name, holder in list(sys.modules.items()):
        if isinstance(holder, ModuleType) and name.startswith(_SGLANG):
            for attribute, value in list(vars(holder).items()):
                if id(value) in wanted:
                    setattr(holder, attribute, wanted[id(value)][1])
            if name in _KEEPERS:
                _forget(holder)


def _forget(module: ModuleType) -> None:
    """Make the functions of `module` that keep their results compute them again."""
    for value in list(vars(module).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
