"""`moe-fp8 doctor` where the import of cuda.bindings fails: with any error it is a finding with a remedy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import pytest

from moe_fp8 import cli, doctor
from moe_fp8.errors import ToolchainError
from moe_fp8.jit import driver, toolchain
from moe_fp8.warmup.arguments import EXIT_FAILED
from tests.cpu.cli_runs import SMALL, no_gpu

__all__ = ["no_gpu"]

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


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is kept of NVRTC, neither before the test nor after it."""
    for cached in _CACHES:
        cached.cache_clear()
    yield
    for cached in _CACHES:
        cached.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_an_nvrtc_that_is_too_old_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process compiles nothing, so a bundle's version counts."""
    monkeypatch.setattr(toolchain, "_query_version", lambda module: (12, 9))
    assert toolchain.installed_nvrtc() is None
    found = {finding.name: finding for finding in doctor.diagnose()}["NVRTC"]
    assert found.status == "fail" and "12.9 is too old" in found.detail


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("minor", "status"), [(0, "ok"), (2, "ok"), (3, "warn"), (5, "warn")])
def test_an_nvrtc_whose_kernels_are_slower_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, minor: int, status: str
) -> None:
    monkeypatch.setattr(toolchain, "_query_version", lambda module: (13, minor))
    found = {finding.name: finding for finding in doctor.diagnose()}["NVRTC"]
    assert found.status == status and f"13.{minor}" in found.detail
    assert ("pip install 'nvidia-cuda-nvrtc<13.3," in found.remedy) == (status == "warn")
    assert toolchain.installed_nvrtc() == (13, minor), "its kernels run all the same"


@pytest.mark.usefixtures("forgotten")
def test_a_library_that_cannot_be_loaded_is_a_finding_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("libnvrtc.so.13\nwas not found")

    monkeypatch.setattr(toolchain.import_bindings("nvrtc", ""), "nvrtcVersion", broken)
    found = {finding.name: finding for finding in doctor.diagnose()}["NVRTC"]
    assert found.status == "fail" and "pip install" in found.detail
    assert "libnvrtc cannot be loaded (libnvrtc.so.13 was not found)" in found.detail


@pytest.mark.usefixtures("forgotten")
def test_an_nvrtc_without_a_version_is_a_finding_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    api = toolchain.import_bindings("nvrtc", "")
    failure = api.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    monkeypatch.setattr(api, "nvrtcVersion", lambda: (failure, None, None))
    found = {finding.name: finding for finding in doctor.diagnose()}["NVRTC"]
    assert found.status == "fail" and "nvrtcVersion failed" in found.detail and "pip install" in found.detail


def test_an_nvrtc_that_lacks_a_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image to which only libnvrtc itself was copied."""
    api = toolchain.nvrtc()
    failure = api.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
    monkeypatch.setattr(api, "nvrtcCompileProgram", lambda *_: (failure,))
    found = {finding.name: finding for finding in doctor.diagnose()}["NVRTC"]
    assert found.status == "fail" and "BUILTIN_OPERATION_FAILURE" in found.detail
    assert "pip install" in found.detail


def test_a_missing_rich_is_a_finding_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, modules = metadata.version, [name for name in sys.modules if name.split(".")[0] == "rich"]
    for name in (*modules, "moe_fp8.warmup.tables", "moe_fp8.warmup.explain"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)

    def version(name: str) -> str:
        if name == "rich":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    told = {finding.name: finding for finding in doctor.diagnose()}["rich"]
    assert told.status == "fail" and "pip install 'rich>=" in told.remedy
    assert cli.main(["plan", *SMALL]) == EXIT_FAILED
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("error: rich is not installed; `moe-fp8 doctor`")
    )
    assert cli.main(["plan", *SMALL, "--json"]) == 0


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
