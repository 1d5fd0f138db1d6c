"""`moe-fp8 doctor` where the import of cuda.bindings fails: with any error it is a finding with a remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import pytest

from moe_fp8 import doctor
from moe_fp8.errors import ToolchainError
from moe_fp8.jit import driver, toolchain

_CACHES = (toolchain.nvrtc, toolchain.installed_nvrtc, toolchain.nvrtc_version, driver._driver)


@pytest.fixture(params=[ImportError, RuntimeError, OSError, AttributeError])
def cause(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exception]:
    """The error that every import of a module of cuda.bindings raises."""
    error: Exception = request.param("the library\nis broken")
    imported = importlib.import_module

    def broken(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("cuda.bindings"):
            raise error
        return imported(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    for cached in _CACHES:
        cached.cache_clear()
    yield error
    for cached in _CACHES:
        cached.cache_clear()


def test_a_broken_installation_is_a_finding(cause: Exception) -> None:
    found = {finding.name: finding for finding in doctor.diagnose()}
    for name, module, status in (("NVRTC", "nvrtc", "fail"), ("GPU", "driver", "warn")):
        assert found[name].status == status
        assert f"cuda.bindings.{module} cannot be imported (the library is broken)" in found[name].detail
        assert "pip install" in found[name].detail


def test_the_error_is_typed_and_has_its_cause(cause: Exception) -> None:
    with pytest.raises(ToolchainError) as caught:
        toolchain.nvrtc()
    assert caught.value.__cause__ is cause
    assert toolchain.installed_nvrtc() is None
    assert driver.device_count() == 0


@pytest.mark.parametrize(("name", "engine"), [("torch", None), ("vllm", "vllm"), ("sglang", "sglang")])
def test_an_installation_without_a_version_is_a_finding(
    name: str, engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an interrupted installation leaves it."""
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda one: None if one == name else found(one))
    told = {finding.name: finding for finding in doctor.diagnose(engine=engine)}
    assert told[name].status == "fail" and f"the installation of {name} has no version" in told[name].detail


def test_any_error_of_a_check_is_a_finding() -> None:
    def check() -> doctor.Finding:
        raise TypeError("of a broken package")

    assert doctor._guarded("torch", check) == doctor.Finding(
        "torch", "fail", "TypeError: of a broken package"
    )
