"""Fixtures that make bundles of a tiny kernel, compiled once for the tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.bundle_writer import write_bundle
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec
from tests.cpu.bundles import Make, told
from tests.cpu.jit_kernels import spec, write_kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernels(tmp_path_factory.mktemp("kernels") / "kernels", "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def sources(kernels: Path) -> SourceTree:
    return SourceTree(kernels)


@pytest.fixture
def make(tmp_path: Path, sources: SourceTree, cache: Path) -> Make:
    def make(
        *factors: int, name: str = "m", folder: Path = tmp_path / "bundle", force: bool = False
    ) -> Bundle:
        store = KernelStore(cache, sources)
        specs: list[KernelSpec] = [spec(factor=factor) for factor in factors]
        artifacts = {each: store.get_or_compile(each)[0] for each in specs}
        return write_bundle(folder, artifacts, told(name), force=force, sources=sources)

    return make
