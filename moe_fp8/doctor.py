"""Checks of this machine: whether each requirement of the package is met, and a remedy if it is not."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from moe_fp8.errors import MoeFp8Error, ToolchainError
from moe_fp8.integrations.supported import ENGINES, ENTRY_POINT, Engine
from moe_fp8.jit import driver
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.files import distrust
from moe_fp8.jit.sources import package_sources
from moe_fp8.jit.toolchain import nvrtc_version, try_nvrtc
from moe_fp8.settings import settings

Status = Literal["ok", "warn", "fail"]

_INVARIANT = "MOE_FP8_BATCH_INVARIANT"

#: Local versions of torch builds without CUDA begin with one of these.
_OTHER_BUILDS = ("cpu", "rocm", "xpu")


@dataclass(frozen=True)
class Finding:
    """The result of one check. With "warn", planning and building still work; with "fail", they do not."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The finding as JSON types."""
        return asdict(self)


def diagnose(
    cache_dir: Path | None = None, bundle: Path | None = None, engine: str | None = None
) -> tuple[Finding, ...]:
    """Run all checks; a problem becomes a finding, not an exception. The folders override the settings.

    engine: also check whether this engine's plug-in would serve it ("vllm" or "sglang"). The engine is not
    imported.
    """

    def store() -> Finding:
        return _store(cache_dir)

    def bundled() -> Finding:
        return _bundle(bundle)

    def compiler() -> Finding:
        return _nvrtc(bundle)

    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("python", _python),
        ("NVRTC", compiler),
        ("kernel sources", _sources),
        ("kernel bundle", bundled),
        ("kernel store", store),
        ("rich", _rich),
        ("torch", _torch),
        ("GPU", _gpu),
        *(() if engine is None else _engine_checks(ENGINES[engine])),
    )
    return tuple(_guarded(name, check) for name, check in checks)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """The check's finding. Whatever stops the check is a finding, too."""
    try:
        return check()
    except (MoeFp8Error, OSError) as error:
        # The message of a MoeFp8Error already ends with a remedy.
        return Finding(name, "warn" if name == "GPU" else "fail", str(error).splitlines()[0])
    except Exception as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])


def _installed(name: str) -> str:
    """The version of an installed package. Raises PackageNotFoundError, ToolchainError."""
    version: str | None = metadata.version(name)
    if version is None:  # an installation that was interrupted has no metadata
        raise ToolchainError(f"the installation of {name} has no version; install it again")
    return version


def _python() -> Finding:
    version = platform.python_version()
    detail = f"{version} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13) or platform.system() != "Linux":
        return Finding("python", "fail", detail, "use Python 3.10 to 3.13 on Linux")
    return Finding("python", "ok", detail)


def _nvrtc(bundle: Path | None) -> Finding:
    try:
        try_nvrtc()
    except ToolchainError as error:
        if (bundle or settings().bundle) is None:
            raise
        return Finding("NVRTC", "warn", f"only kernels of the bundle can run: {error}".splitlines()[0])
    found, wanted = ".".join(map(str, nvrtc_version())), _requirement("nvidia-cuda-nvrtc")
    if not _fits(found, wanted):
        remedy = f"pip install '{wanted}', unless PyTorch needs another"
        return Finding("NVRTC", "warn", f"{found}, whose kernels may be slower", remedy)
    return Finding("NVRTC", "ok", found)


def _sources() -> Finding:
    closures = [package_sources().closure(name) for name in ("gemm_fp8", "quantize_fp8")]
    headers = {name for closure in closures for name, _ in closure.headers}
    return Finding("kernel sources", "ok", f"found, {len(headers)} headers")


def _bundle(path: Path | None) -> Finding:
    folder = settings().bundle if path is None else path
    if folder is None:
        return Finding("kernel bundle", "ok", "none: MOE_FP8_BUNDLE is not set")
    found = Bundle.open(folder)
    found.verify()
    return Finding("kernel bundle", "ok", f"{folder}, {found.summary()}")


def _store(cache_dir: Path | None) -> Finding:
    folder = settings().cache_dir if cache_dir is None else cache_dir
    name = "kernel store"
    remedy = "set MOE_FP8_CACHE_DIR (or pass --cache-dir) to a folder that only this user can write"
    if folder is None:
        return Finding(name, "warn", "no folder: kernels are kept in memory only", remedy)
    try:
        existing = _nearest(folder)
        if not existing.is_dir():
            return Finding(name, "warn", f"{existing} is not a folder", remedy)
        problem = distrust(existing.stat()) if existing == folder else ""
    except OSError as error:
        problem = f"cannot be looked at ({error.strerror})"
    if not problem and existing == folder and not os.access(folder, os.R_OK | os.X_OK):
        problem = "cannot be read"
    if problem:
        return Finding(name, "warn", f"{folder} {problem}: it is not used", remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(name, "warn", f"{existing} is read-only: new kernels are kept in memory only", remedy)
    if existing != folder:
        return Finding(name, "ok", f"{folder}, to be created")
    return Finding(name, "ok", f"{folder}, {len(list(folder.glob('*.kernel')))} kernels")


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest of its parents that exists; raises OSError."""
    for path in (folder, *folder.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # a link to nothing exists, and no folder can be created in its place
            return path
    return folder


def _rich() -> Finding:
    try:
        return Finding("rich", "ok", _installed("rich"))
    except metadata.PackageNotFoundError:
        detail = "not installed: the commands show no tables, and on a terminal nothing is built"
        return Finding("rich", "fail", detail, f"pip install '{_requirement('rich')}'")


def _torch() -> Finding:
    wanted = _requirement("torch")
    try:
        found = _installed("torch")
    except metadata.PackageNotFoundError:
        remedy = f"pip install '{wanted}'; planning and building do not need it"
        return Finding("torch", "warn", "not installed: the ops cannot be called", remedy)
    if not _fits(found, wanted):
        remedy = (
            f"pip install '{wanted}'; if an engine requires {found}, compare outputs with and without moe_fp8"
        )
        return Finding("torch", "warn", f"{found}, but moe_fp8 is tested with {wanted}", remedy)
    # Without a Hopper GPU, a build for CPUs is as good as another.
    if found.partition("+")[2].startswith(_OTHER_BUILDS) and not _no_hopper():
        detail = f"{found} is built without CUDA: the ops cannot be called on this GPU"
        remedy = f"pip install --force-reinstall '{wanted}', from an index whose builds have CUDA"
        return Finding("torch", "warn", detail, remedy)
    return Finding("torch", "ok", found)


def _requirement(name: str) -> str:
    """What this package requires of another package, such as "torch>=2.11,<2.14"."""
    with suppress(metadata.PackageNotFoundError):  # a source tree that is not installed
        for requirement in metadata.requires("moe-fp8") or ():
            if re.split(r"[^\w-]", requirement)[0] == name:
                return requirement
    return name


def _fits(version: str, requirement: str) -> bool:
    """Whether a version is within the bounds of a requirement, which name a major and a minor number."""
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    for sign, *bound in re.findall(r"(>=|<)(\d+)\.(\d+)", requirement):
        if ((major, minor) >= tuple(map(int, bound))) != (sign == ">="):
            return False
    return True


def _gpu() -> Finding:
    info = driver.device_info()
    cc = ".".join(map(str, info.cc))
    version = ".".join(map(str, info.driver_version))
    detail = f"{info.name}, compute capability {cc}, {info.num_sms} SMs, driver for CUDA {version}"
    if info.cc != driver.HOPPER:
        return Finding(
            "GPU", "warn", detail, "the kernels need compute capability 9.0: H100, H200, H20 or GH200"
        )
    if info.driver_version < (13, 0):
        return Finding("GPU", "warn", detail, "install driver 580 or newer: cubins of CUDA 13 need it")
    return Finding("GPU", "ok", detail)


def _engine_checks(engine: Engine) -> tuple[tuple[str, Callable[[], Finding]], ...]:
    def layer(kind: str) -> Callable[[], Finding]:
        return lambda: _layer(engine, kind)

    return (
        (engine.distribution, lambda: _version(engine)),
        ("plug-in", lambda: _plug_in(engine)),
        ("MOE_FP8_ENGINE", lambda: _variable(engine)),
        (_INVARIANT, lambda: _invariance(engine)),
        *((kind, layer(kind)) for kind in engine.layers),
        ("other kernels", lambda: Finding("other kernels", "ok", f"{engine.title}'s own: {engine.rest}")),
    )


def _version(engine: Engine) -> Finding:
    name, known = engine.distribution, " or ".join(engine.versions)
    try:
        found = _installed(name)
    except metadata.PackageNotFoundError:
        remedy = f"run moe-fp8 in the environment of {engine.title} {known}"
        return Finding(name, "warn", f"{engine.title} is not installed in this environment", remedy)
    # A build may append its CUDA version, as in 0.24.0+cu130.
    if found.partition("+")[0] not in engine.versions:
        remedy = (
            f"compare outputs with and without the plug-in, or install {engine.title} {engine.versions[-1]}"
        )
        return Finding(name, "warn", f"{found}, but the plug-in was made for {known}", remedy)
    return Finding(name, "ok", f"{found}, for which the plug-in was made")


def _plug_in(engine: Engine) -> Finding:
    if problem := _unregistered(engine):
        remedy = f"install moe-fp8 into the environment of {engine.title} (again)"
        return Finding("plug-in", "warn", problem, remedy)
    if problem := _kept_out(engine):
        remedy = f"add {ENTRY_POINT} to {engine.only}, with a comma, or unset {engine.only}"
        return Finding("plug-in", "warn", problem, remedy)
    return Finding("plug-in", "ok", f"{ENTRY_POINT} is registered in {engine.group}")


def _variable(engine: Engine) -> Finding:
    kinds = settings().engine
    if not kinds:
        remedy = (
            f"export MOE_FP8_ENGINE=1 where {engine.title} starts, or name some of {', '.join(engine.layers)}"
        )
        return Finding("MOE_FP8_ENGINE", "warn", "it is not set, or 0: the plug-in does nothing", remedy)
    return Finding("MOE_FP8_ENGINE", "ok", f"the plug-in serves {', '.join(kinds)}")


def _invariance(engine: Engine) -> Finding:
    if settings().batch_invariant:
        return Finding(_INVARIANT, "ok", "it is on: a row's bits depend on no other row")
    absent = not settings().engine or _unregistered(engine) or _kept_out(engine)
    if not absent and (problem := _variant(engine)):
        remedy = f"export {_INVARIANT}=1 where {engine.title} starts"
        return Finding(_INVARIANT, "warn", f"{engine.title} does not start: {problem}", remedy)
    return Finding(_INVARIANT, "ok", f"it is off; {engine.title} needs it with {engine.invariance}")


def _layer(engine: Engine, kind: str) -> Finding:
    """Which kernels compute the layers of `kind`, and why."""
    asked = settings().engine
    if kind not in asked:
        reason = "MOE_FP8_ENGINE does not name them" if asked else "MOE_FP8_ENGINE is not set"
        return Finding(kind, "ok", f"{engine.title}'s own kernels: {reason}")
    problem = _unregistered(engine) or _kept_out(engine)
    if not problem and (problem := _no_hopper()) and not engine.forgiving:
        remedy = f"unset MOE_FP8_ENGINE where {engine.title} runs on another GPU"
        return Finding(kind, "warn", f"none, {engine.title} does not start: {problem}", remedy)
    if not problem and (refused := _variant(engine)):
        return Finding(kind, "warn", f"none, {engine.title} does not start: {refused}")
    problem = problem or _switched_off(engine, kind)
    if problem:
        return Finding(kind, "warn", f"{engine.title}'s own kernels: {problem}")
    return Finding(kind, "ok", f"moe_fp8: {engine.layers[kind]}")


def _unregistered(engine: Engine) -> str:
    if any(point.name == ENTRY_POINT for point in metadata.entry_points(group=engine.group)):
        return ""
    return f"no entry point {ENTRY_POINT} in the group {engine.group}"


def _kept_out(engine: Engine) -> str:
    only = os.environ.get(engine.only)
    if only is None or (engine.lenient and not only):
        return ""
    names = [name.strip() if engine.lenient else name for name in only.split(",")]
    return "" if ENTRY_POINT in names else f"{engine.only}={only} keeps the plug-in {ENTRY_POINT} out"


def _no_hopper() -> str:
    try:
        info = driver.device_info()
    except MoeFp8Error:
        return "no GPU can be used"
    return "" if info.cc == driver.HOPPER else f"{info.name} is no Hopper GPU"


def _variant(engine: Engine) -> str:
    """Why the engine refuses to start: it must not depend on the batch, and our kernels may.

    Nothing here tells whether an engine gets an argument, so only a variable counts.
    """
    value = os.environ.get(engine.invariance, "").strip()
    if settings().batch_invariant or value in ("", "0"):
        return ""
    return f"{engine.invariance}={value} is on, and {_INVARIANT} is off"


def _switched_off(engine: Engine, kind: str) -> str:
    for switch in engine.switches:
        value = os.environ.get(switch.variable, "")
        if kind in switch.kinds and value.lower() in switch.off:
            return f"{switch.variable}={value} turns these calls off"
    return ""
