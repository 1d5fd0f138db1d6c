"""`moe-fp8 doctor` on machines with a GPU, a driver, a compiler and a folder, and without."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path

import pytest

from moe_fp8 import cli, doctor
from moe_fp8.errors import ToolchainError
from moe_fp8.jit import driver
from moe_fp8.jit.driver import DeviceInfo
from tests.cpu.cli_runs import Json, built, no_gpu, run_json

__all__ = ["built", "no_gpu", "run_json"]

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0))


def findings(cache_dir: Path | None = None) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.diagnose(cache_dir)}


def test_doctor_finds_what_there_is(built: Path, run_json: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200)
    release = metadata.version("torch").partition("+")[0]  # the tests may run with a build for CPUs
    monkeypatch.setattr(doctor, "_installed", lambda name: release)
    code, told = run_json(["doctor", "--cache-dir", str(built)])
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert code == 0 and told["ok"]
    assert {finding["status"] for finding in told["findings"]} == {"ok"}
    assert "132 SMs" in by_name["GPU"]["detail"]
    assert by_name["torch"]["detail"] == release
    assert f"{len(list(built.glob('*.kernel')))} kernels" in by_name["kernel store"]["detail"]


def test_doctor_without_a_driver_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> DeviceInfo:
        raise ToolchainError("libcuda cannot be loaded; install a driver")

    monkeypatch.setattr(driver, "device_info", missing)
    gpu = findings()["GPU"]
    assert (gpu.status, gpu.detail) == ("warn", "libcuda cannot be loaded; install a driver")


@pytest.mark.parametrize("change", [{"cc": (8, 0)}, {"cc": (10, 0)}, {"driver_version": (12, 9)}])
def test_doctor_warns_of_a_gpu_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, tuple[int, int]]
) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(**change))
    gpu = findings()["GPU"]
    assert gpu.status == "warn" and gpu.remedy
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(driver_version=(13, 0)))
    assert findings()["GPU"].status == "ok"


def test_doctor_fails_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc cannot be loaded; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(doctor, "try_nvrtc", missing)
    assert cli.main(["doctor"]) == 1
    assert "pip install nvidia-cuda-nvrtc" in capsys.readouterr().out


def test_doctor_without_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    torch = findings()["torch"]
    assert torch.status == "warn" and "pip install" in torch.remedy


def test_doctor_warns_of_a_cache_that_will_not_be_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert findings(shared)["kernel store"].status == "warn"
    assert findings(shared)["kernel store"].remedy
    assert "its mode 777 lets all users write: it is not used" in findings(shared)["kernel store"].detail
    file = tmp_path / "file"
    file.write_text("")
    assert findings(file)["kernel store"].status == "warn"
    assert findings(tmp_path / "new" / "deeper" / "still")["kernel store"].status == "ok"


def test_doctor_warns_without_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = dataclasses.replace(doctor.settings(), cache_dir=None)
    monkeypatch.setattr(doctor, "settings", lambda: without)
    store = findings()["kernel store"]
    assert (store.status, store.detail) == ("warn", "no folder: kernels are kept in memory only")
    assert "MOE_FP8_CACHE_DIR" in store.remedy
    assert findings(tmp_path)["kernel store"].status == "ok"


def test_doctor_prints_each_remedy_below_its_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor.Finding("python", "ok", "3.12"), doctor.Finding("torch", "warn", "missing", "install it")
    monkeypatch.setattr(cli, "diagnose", lambda *given: found)
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["ok", "python", "3.12"], ["warn", "torch", "missing"], ["remedy:", "install", "it"]]
