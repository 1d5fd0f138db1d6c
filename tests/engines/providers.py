"""The modules that an engine can find under the name `deep_gemm`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from moe_fp8 import integrations
from moe_fp8.integrations import vendored

_NAME = "deep_gemm"


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}


class Ours:
    """The module of this package."""

    name = "moe_fp8"

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = _taken_out()
        module = integrations.install()
        early_weights = module.get_pdl()
        try:
            yield
            # With a copy of DeepGEMM behind it, a call that we do not serve would go unnoticed.
            assert vendored.find() is None
        finally:
            module.set_pdl(early_weights)
            integrations.uninstall()
            sys.modules.update(outside)


class Peer:
    """DeepGEMM's own package in `folder`, which is as benchmarks/peer.py describes it."""

    name = _NAME

    def __init__(self, folder: Path) -> None:
        from benchmarks.peer import DeepGemm

        path, outside = list(sys.path), _taken_out()
        try:
            DeepGemm(folder)
            self._path = [entry for entry in sys.path if entry not in path]
            module = sys.modules[_NAME]
            # SGLang's release still uses the name that DeepGEMM 2.8 has dropped.
            if not hasattr(module, "fp8_m_grouped_gemm_nt_masked"):
                module.fp8_m_grouped_gemm_nt_masked = module.m_grouped_fp8_gemm_nt_masked
        finally:
            sys.path[:] = path
            self._modules = _taken_out()
            sys.modules.update(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = _taken_out()
        sys.modules.update(self._modules)
        sys.path[:0] = self._path
        try:
            yield
        finally:
            self._modules = _taken_out()
            for entry in self._path:
                sys.path.remove(entry)
            sys.modules.update(outside)
