"""`moe-fp8 build --bundle`, and the use of a bundle by check, doctor, the start-up script and a server."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_fp8 import cli, doctor
from moe_fp8 import settings as settings_module
from moe_fp8.errors import BundleError, ToolchainError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit import bundle as bundle_module
from moe_fp8.jit.bundle import Bundle
from moe_fp8.warmup import __main__ as startup
from moe_fp8.warmup import load_model, plan
from tests.cpu.cli_runs import QWEN, SMALL, SMALL_OPTIONS, Json, no_gpu, run_json

__all__ = ["no_gpu", "run_json"]

ROOT = Path(__file__).parents[2]
PLANNED = plan(load_model(QWEN), SMALL_OPTIONS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bundle(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the small plan; tests must not change it."""
    folder = tmp_path_factory.mktemp("bundles") / "small"
    assert cli.main(["build", *SMALL, "--cache-dir", str(cache), "--bundle", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copied"))


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """in_use(folder) has the same effect as MOE_FP8_BUNDLE=folder."""

    def use(folder: Path) -> None:
        given = dataclasses.replace(settings_module.settings(), bundle=folder)
        monkeypatch.setattr(bundle_module, "settings", lambda: given)
        monkeypatch.setattr(doctor, "settings", lambda: given)
        bundle_module.bundle_in_use.cache_clear()

    yield use
    bundle_module.bundle_in_use.cache_clear()


def test_the_manifest_says_what_it_covers(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    (covered,) = manifest["coverage"]
    assert covered["model"]["name"] == "qwen3_30b"
    assert covered["model"]["hidden_size"] == 2048
    options = covered["options"]
    assert (options["tp"], options["ep"], options["max_tokens"], options["num_sms"]) == (1, 1, 1, 132)
    assert {"max_batch", "next_n", "block_size", "batch_invariant"} <= set(options)
    assert set(covered["tables"]) == {device for device in gemm_table.devices() if device}
    assert manifest["toolchain"]["arch"] == "sm_90a"
    assert {kernel["key"] for kernel in manifest["kernels"]} == set(PLANNED.keys().values())
    assert {kernel["spec"] for kernel in manifest["kernels"]} == set(map(str, PLANNED.specs))
    assert str(ROOT) not in json.dumps(manifest), "a bundle holds no path"


def test_build_says_where_the_bundle_is(bundle: Path, copied: Path, cache: Path, run_json: Json) -> None:
    code, told = run_json(["build", *SMALL, "--cache-dir", str(cache), "--bundle", str(copied), "--quiet"])
    assert code == 0 and told["compiled"] == 0
    assert told["bundle"]["path"] == str(copied)
    assert told["bundle"]["kernels"] == len(PLANNED.specs)
    assert told["bundle"]["digest"] == Bundle.open(bundle).manifest.digest
    files = [path.stat().st_size for path in bundle.glob("*.kernel")]
    assert (told["bundle"]["bytes"], told["bundle"]["models"]) == (sum(files), ["qwen3_30b"])
    nvrtc = ".".join(map(str, Bundle.open(bundle).nvrtc))
    assert (told["bundle"]["toolchain"]["arch"], told["bundle"]["toolchain"]["nvrtc"]) == ("sm_90a", nvrtc)
    assert {path.stem for path in cache.glob("*.kernel")} == set(PLANNED.keys().values())


def test_build_prints_what_is_in_the_bundle(
    copied: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", *SMALL, "--cache-dir", str(cache), "--bundle", str(copied), "--quiet"]
    assert cli.main(build) == 0
    said, bundle = capsys.readouterr().out.splitlines()[-1], Bundle.open(copied)
    size = sum(path.stat().st_size for path in copied.glob("*.kernel")) / 1e6
    counted = f"{len(PLANNED.specs)} kernels, {size:.1f} MB, NVRTC {'.'.join(map(str, bundle.nvrtc))}"
    assert said == f"bundle {copied}: {counted}, for qwen3_30b; digest {bundle.manifest.digest[:12]}"


def test_build_replaces_a_damaged_bundle_by_force_only(copied: Path, cache: Path) -> None:
    victim = next(copied.glob("*.kernel"))
    victim.write_bytes(b"")
    build = ["build", *SMALL, "--cache-dir", str(cache), "--bundle", str(copied), "--quiet"]
    assert cli.main(build) == 6 and victim.read_bytes() == b""
    assert cli.main([*build, "--force"]) == 0
    Bundle.open(copied).verify()


def test_adding_a_model_compiles_only_what_is_new(
    copied: Path, tmp_path: Path, run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*SMALL, "--max-tokens", "9"]
    code, told = run_json(
        ["build", *more, "--cache-dir", str(tmp_path / "cache"), "--bundle", str(copied), "--quiet"]
    )
    wider = plan(load_model(QWEN), dataclasses.replace(SMALL_OPTIONS, max_tokens=9))
    assert code == 0
    assert told["compiled"] == len(set(wider.specs) - set(PLANNED.specs)) > 0
    assert told["bundle"]["kernels"] == len(set(wider.specs) | set(PLANNED.specs))
    assert told["bundle"]["models"] == ["qwen3_30b"], "both plans are of one model"
    for arguments in (SMALL, more):
        assert cli.main(["check", *arguments, "--bundle", str(copied)]) == 0


def test_check_proves_coverage(bundle: Path, run_json: Json) -> None:
    code, told = run_json(["check", *SMALL, "--bundle", str(bundle)])
    assert (code, told["ok"], told["missing"]) == (0, True, [])


def test_check_names_the_rows_that_are_missing(
    bundle: Path, run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    wider = ["check", "--model", str(QWEN), "--max-tokens", "4096", "--bundle", str(bundle)]
    code, told = run_json(wider)
    assert code == 1 and told["missing"]
    assert all(missing["uses"] for missing in told["missing"])
    assert cli.main(wider) == 1
    said = capsys.readouterr()
    assert told["missing"][0]["key"] in said.out
    assert "gemm_fp8 dense 5120 x 2048 rows" in said.out
    assert f"of {told['kernels']} kernels are in the bundle {bundle}" in said.out
    assert "moe-fp8 build --bundle" in said.err


def test_check_looks_into_the_bundle_in_use_and_into_the_cache(
    bundle: Path, tmp_path: Path, in_use: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    in_use(bundle)
    assert cli.main(["check", *SMALL, "--cache-dir", str(tmp_path)]) == 0
    count = len(PLANNED.specs)
    said = capsys.readouterr().out
    assert said == f"{count} of {count} kernels are in the bundle {bundle} or {tmp_path}\n"


def test_check_refuses_a_damaged_bundle(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = next(copied.glob("*.kernel"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert cli.main(["check", *SMALL, "--bundle", str(copied)]) == 6
    said = capsys.readouterr()
    assert victim.name in said.err and said.err.count("\n") == 1
    assert cli.main(["check", *SMALL, "--bundle", "/nowhere"]) == 6


def test_force_needs_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", *SMALL, "--force"]) == 2
    assert "--bundle" in capsys.readouterr().err


def test_an_unfit_bundle_is_refused_before_anything_is_compiled(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = ["build", *SMALL, "--cache-dir", str(tmp_path / "cache"), "--bundle", str(copied), "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(bundle_module, "installed_nvrtc", lambda: (13, 99))
        assert cli.main(build) == 6
    said = capsys.readouterr().err
    assert "NVRTC" in said and "--force" in said
    assert not (tmp_path / "cache").exists()


def findings() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.diagnose()}


def test_doctor_reports_the_bundle(
    bundle: Path, copied: Path, in_use: Callable[[Path], None], run_json: Json
) -> None:
    assert findings()["kernel bundle"].detail == "none: MOE_FP8_BUNDLE is not set"
    in_use(copied)
    found = findings()["kernel bundle"]
    assert found.status == "ok"
    assert f"{len(PLANNED.specs)} kernels" in found.detail and "qwen3_30b" in found.detail
    victim = next(copied.glob("*.kernel"))
    victim.write_bytes(b"")
    found = findings()["kernel bundle"]
    assert found.status == "fail" and victim.name in found.detail
    assert run_json(["doctor", "--bundle", str(copied)])[0] == 1
    named = {each.name: each.detail for each in doctor.diagnose(bundle=bundle)}
    assert str(bundle) in named["kernel bundle"], "the option is stronger than the variable"


def test_doctor_wants_no_compiler_beside_a_bundle(
    bundle: Path, in_use: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ToolchainError("libnvrtc cannot be loaded; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(doctor, "try_nvrtc", missing)
    monkeypatch.setattr(bundle_module, "installed_nvrtc", lambda: None)
    assert findings()["NVRTC"].status == "fail"
    named = {finding.name: finding.status for finding in doctor.diagnose(bundle=bundle)}
    assert (named["NVRTC"], named["kernel bundle"]) == ("warn", "ok")
    in_use(bundle)
    assert (findings()["NVRTC"].status, findings()["kernel bundle"].status) == ("warn", "ok")


def test_the_startup_script_takes_kernels_from_the_bundle(
    bundle: Path, tmp_path: Path, in_use: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    in_use(bundle)
    capsys.readouterr()
    assert startup.main([*SMALL, "--cache-dir", str(tmp_path / "cache"), "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["compiled"], told["cached"]) == (0, len(PLANNED.specs))
    assert not list((tmp_path / "cache").glob("*.kernel"))


def test_the_startup_script_refuses_an_unfit_bundle(
    copied: Path, tmp_path: Path, in_use: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    copied.chmod(0o777)
    in_use(copied)
    assert startup.main([*SMALL, "--cache-dir", str(tmp_path / "cache"), "--quiet"]) == 6
    assert json.loads(capsys.readouterr().out)["error"] == "BundleError"


_SERVER = """
import sys
if sys.argv[2] == "bare":
    sys.modules["cuda"] = sys.modules["cuda.bindings"] = None
from moe_fp8.jit.runtime import _RUNTIME as runtime
from moe_fp8.warmup import PlanOptions, load_model, load_plan, plan
runtime._loader = lambda artifact, smem, threads: artifact.cubin
planned = plan(load_model(sys.argv[1]), PlanOptions(engine="sglang", max_tokens=1, max_batch=1))
loaded = load_plan(planned)
runtime.freeze("strict")
assert all(runtime.get_kernel(spec).startswith(b"\\x7fELF") for spec in planned.specs)
counts = runtime.counters()
print(loaded, counts.compiles, counts.store_hits, counts.loads, counts.misses)
"""


@pytest.mark.parametrize("compiler", ["installed", "bare"])
def test_a_server_runs_from_the_bundle_alone(bundle: Path, tmp_path: Path, compiler: str) -> None:
    """The variable is set, the cache is empty, NVRTC is installed or not; only the driver is fake."""
    environment = {
        **os.environ,
        "MOE_FP8_BUNDLE": str(bundle),
        "MOE_FP8_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", _SERVER, str(QWEN), compiler]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = len(PLANNED.specs)
    assert done.stdout.split() == [str(number) for number in (kernels, 0, kernels, kernels, 0)]
    assert not list((tmp_path / "cache").glob("*.kernel"))


def test_an_unfit_bundle_stops_the_server(copied: Path, tmp_path: Path) -> None:
    manifest = copied / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"arch": "sm_90a"', '"arch": "sm_90"'))
    environment = {**os.environ, "MOE_FP8_BUNDLE": str(copied), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _SERVER, str(QWEN), "installed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert BundleError.__name__ in done.stderr and str(copied) in done.stderr
