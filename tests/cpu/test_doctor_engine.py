"""`moe-fp8 doctor --engine`: whether a plug-in would serve an engine, without importing the engine."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from moe_fp8 import cli, doctor
from moe_fp8.errors import ToolchainError
from moe_fp8.integrations.supported import ENGINES
from moe_fp8.jit import driver
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.settings import ENGINE_KINDS, parse_settings
from tests.cpu.cli_runs import Json, run_json

__all__ = ["run_json"]

INVARIANT = "MOE_FP8_BATCH_INVARIANT"
H100 = DeviceInfo("NVIDIA H100 80GB HBM3", (9, 0), 132, (13, 0))


class Machine:
    """A machine with both engines and the plug-ins, a Hopper GPU and MOE_FP8_ENGINE=1; tests change it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.versions = {"vllm": "0.33.0+cu130", "sglang": "0.5.23"}
        self.groups = {engine.group for engine in ENGINES.values()}
        installed = metadata.version

        def version(name: str) -> str:
            return self.versions[name] if name in self.versions else installed(name)

        def entry_points(group: str) -> list[metadata.EntryPoint]:
            ours = metadata.EntryPoint("moe_fp8", "moe_fp8:register", group)
            other = metadata.EntryPoint("other", "other:register", group)
            return [other, ours] if group in self.groups else [other]

        patch.setattr(metadata, "version", version)
        patch.setattr(metadata, "entry_points", entry_points)
        self.gpu(H100)
        self.ask("1")
        for engine in ENGINES.values():
            for variable in (
                engine.only,
                engine.invariance,
                *(switch.variable for switch in engine.switches),
            ):
                patch.delenv(variable, raising=False)

    def gpu(self, info: DeviceInfo) -> None:
        self._patch.setattr(driver, "device_info", lambda: info)

    def ask(self, value: str, **variables: str) -> None:
        given = parse_settings({"MOE_FP8_ENGINE": value, **variables})
        self._patch.setattr(doctor, "settings", lambda: given)

    def findings(self, engine: str) -> dict[str, doctor.Finding]:
        return {finding.name: finding for finding in doctor.diagnose(engine=engine)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_kinds_are_served(engine: str, machine: Machine) -> None:
    found = machine.findings(engine)
    names = (engine, "plug-in", "MOE_FP8_ENGINE", INVARIANT, *ENGINE_KINDS, "other kernels")
    assert list(found)[-len(names) :] == list(names) and "GPU" in found
    assert {found[name].status for name in names} == {"ok"}
    assert all(found[kind].detail.startswith("moe_fp8: ") for kind in ENGINE_KINDS)
    assert ENGINES[engine].title in found["other kernels"].detail


def test_without_an_engine_nothing_is_said_of_engines() -> None:
    assert not {"plug-in", "MOE_FP8_ENGINE", "dense"} & {finding.name for finding in doctor.diagnose()}


@pytest.mark.parametrize("engine", ENGINES)
def test_versions(engine: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.versions[engine] = "9.9.9"
    assert (found := machine.findings(engine)[engine]).status == "warn" and "9.9.9, but" in found.detail
    assert found.detail.endswith(f"made for {' or '.join(ENGINES[engine].versions)}")
    for version in ENGINES[engine].versions:
        machine.versions[engine] = version
        assert machine.findings(engine)[engine].status == "ok"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert (found := machine.findings(engine)[engine]).status == "warn" and "not installed" in found.detail


def test_a_torch_that_is_not_tested(machine: Machine) -> None:
    wanted = next(line for line in metadata.requires("moe-fp8") or () if line.startswith("torch"))
    for version, tested in (
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.2+cu130", True),
        ("2.14.0a0+git12", False),
        ("2.14.0", False),
        ("3.0.0", False),
    ):
        machine.versions["torch"] = version
        found = machine.findings("vllm")["torch"]
        assert found.status == ("ok" if tested else "warn") and version in found.detail
        assert tested or (f"tested with {wanted}" in found.detail and f"'{wanted}'" in found.remedy)


@pytest.mark.parametrize(("minor", "status"), [(9, "fail"), (10, "ok"), (13, "ok"), (14, "fail")])
def test_pythons_that_are_served(
    minor: int, status: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, minor, 0, "final", 0))
    assert doctor._python().status == status
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert doctor._python().status == "fail"


def test_a_torch_without_cuda_beside_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for build in ("rocm7.1", "xpu", "cpu"):
        machine.versions["torch"] = f"2.13.0+{build}"
        found = machine.findings("vllm")["torch"]
        assert found.status == "warn" and "without CUDA" in found.detail
    machine.versions["torch"] = "2.13.0+cu130"
    assert machine.findings("vllm")["torch"].status == "ok"

    def no_driver() -> DeviceInfo:
        raise ToolchainError("no driver")

    monkeypatch.setattr(driver, "device_info", no_driver)
    machine.versions["torch"] = "2.13.0+cpu"
    assert machine.findings("vllm")["torch"].status == "ok"


def test_a_torch_beside_a_source_tree_is_not_judged(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    machine.versions["torch"] = "2.99.0"
    assert machine.findings("vllm")["torch"].status == "ok"


def test_kinds_that_are_not_asked_for(machine: Machine) -> None:
    machine.ask("dense,indexer")
    found = machine.findings("vllm")
    assert found["MOE_FP8_ENGINE"].detail.endswith("dense, indexer")
    assert found["experts"].detail == "vLLM's own kernels: MOE_FP8_ENGINE does not name them"
    machine.ask("0")
    found = machine.findings("vllm")
    assert (
        found["MOE_FP8_ENGINE"].status == "warn"
        and "export MOE_FP8_ENGINE=1" in found["MOE_FP8_ENGINE"].remedy
    )
    assert all("MOE_FP8_ENGINE is not set" in found[kind].detail for kind in ENGINE_KINDS)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_keeps_the_plug_in_out(engine: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    only, vllm = ENGINES[engine].only, engine == "vllm"
    for value, kept in (("other", True), ("other,moe_fp8", False), ("", vllm), ("other, moe_fp8", vllm)):
        monkeypatch.setenv(only, value)
        found = machine.findings(engine)
        for name in ("plug-in", "dense"):
            assert found[name].status == ("warn" if kept else "ok"), value
            assert (f"{only}={value}" in found[name].detail) is kept
    monkeypatch.delenv(only)
    machine.groups.clear()
    found = machine.findings(engine)
    assert found["plug-in"].status == found["experts"].status == "warn"
    assert "install moe-fp8" in found["plug-in"].remedy


def test_no_hopper(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpu(H100._replace(name="NVIDIA A100", cc=(8, 0)))
    assert machine.findings("sglang")["dense"].detail == "SGLang's own kernels: NVIDIA A100 is no Hopper GPU"
    found = machine.findings("vllm")["dense"]
    assert found.detail == "none, vLLM does not start: NVIDIA A100 is no Hopper GPU" and found.remedy

    def missing() -> DeviceInfo:
        raise ToolchainError("libcuda cannot be loaded; install a driver")

    monkeypatch.setattr(driver, "device_info", missing)
    assert machine.findings("sglang")["dense"].detail.endswith("no GPU can be used")


def test_switches_of_the_engine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "True")
    found = machine.findings("sglang")
    assert [found[kind].status for kind in ENGINE_KINDS] == ["ok", "ok", "warn"]
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    found = machine.findings("sglang")
    assert all("SGLANG_ENABLE_JIT_DEEPGEMM=0" in found[kind].detail for kind in ENGINE_KINDS)


def test_batch_invariance_that_keeps_vllm_from_starting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.findings("vllm")[INVARIANT].detail == "it is off; vLLM needs it with VLLM_BATCH_INVARIANT"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert machine.findings("vllm")[INVARIANT].status == "ok"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    reason = f"vLLM does not start: VLLM_BATCH_INVARIANT=1 is on, and {INVARIANT} is off"
    found = machine.findings("vllm")
    assert found[INVARIANT].status == "warn" and found[INVARIANT].detail == reason
    assert found[INVARIANT].remedy == f"export {INVARIANT}=1 where vLLM starts"
    for kind in ENGINE_KINDS:
        assert found[kind].status == "warn" and found[kind].detail == f"none, {reason}"
    assert machine.findings("sglang")[INVARIANT].status == "ok"

    machine.ask("1", MOE_FP8_BATCH_INVARIANT="1")
    found = machine.findings("vllm")
    assert {found[name].status for name in (INVARIANT, *ENGINE_KINDS)} == {"ok"}
    assert found[INVARIANT].detail.startswith("it is on")
    for value, plugins in (("0", "moe_fp8"), ("1", "other")):
        machine.ask(value)
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        found = machine.findings("vllm")
        assert found[INVARIANT].status == "ok", "the plug-in does nothing"
        assert all(found[kind].detail.startswith("vLLM's own kernels") for kind in ENGINE_KINDS)


def test_deterministic_inference_is_an_argument_that_is_not_seen(machine: Machine) -> None:
    (found,) = {machine.findings("sglang")[INVARIANT]}
    assert found.status == "ok" and found.detail.endswith("needs it with --enable-deterministic-inference")


def test_the_command(machine: Machine, run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run_json(["doctor", "--engine", "sglang"])
    named: dict[str, Any] = {finding["name"]: finding for finding in told["findings"]}
    assert code == 0 and named["sglang"]["detail"].startswith("0.5.23")
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--engine", "other"])
    assert "sglang" in capsys.readouterr().err


def test_no_engine_is_imported() -> None:
    program = (
        "import sys\nfrom moe_fp8 import cli\ncli.main(['doctor', '--engine', 'vllm'])\n"
        "print([name for name in ('torch', 'vllm', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
