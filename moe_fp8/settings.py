"""Settings from `MOE_FP8_*` environment variables, which are read once and checked strictly.

No other module reads these variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from moe_fp8.errors import SettingError

_PREFIX = "MOE_FP8_"

#: Variables that Kubernetes sets in containers beside a service whose name is `moe-fp8`, or begins with
#: `moe-fp8-`. They are no settings.
_OF_A_SERVICE = re.compile(rf"{_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")

MissPolicy = Literal["compile", "warn", "strict"]


@dataclass(frozen=True)
class Settings:
    """The settings of a process, each with its environment variable.

    `cache_dir` (MOE_FP8_CACHE_DIR): the folder of compiled kernels. It is None without a home directory, and
    kernels are then kept in memory only.
    `checked` (MOE_FP8_CHECKED): ops also check the contents of index tensors and scales.
    `checked_dir` (MOE_FP8_CHECKED_DIR): the folder of the replay files of checked mode; None: `checked` in
    `cache_dir`.
    `batch_invariant` (MOE_FP8_BATCH_INVARIANT): a row's bits in a GEMM or in prefill logits depend neither on
    the other rows nor on their number.
    `jobs` (MOE_FP8_JOBS): the number of compiler processes of a build.
    `miss` (MOE_FP8_JIT_MISS): how a frozen process treats a kernel that is not loaded.
    `bundle` (MOE_FP8_BUNDLE): a kernel bundle that is searched before `cache_dir`, or None.
    `dispatch` (MOE_FP8_DISPATCH): every call of an op goes through torch's dispatcher, so that an observer of
    the dispatcher sees a `moe_fp8::` event. An active torch profiler has the same effect.
    `engine` (MOE_FP8_ENGINE): the kinds of calls that the plug-ins for vLLM and SGLang serve: "1" for all
    ("dense", "experts" and "indexer"), or some of these with commas between them; "0" or nothing for none.
    """

    cache_dir: Path | None
    checked: bool
    batch_invariant: bool
    jobs: int
    miss: MissPolicy
    bundle: Path | None = None
    dispatch: bool = False
    engine: tuple[str, ...] = ()
    checked_dir: Path | None = None

    @cached_property
    def past_dispatcher(self) -> bool:
        """Whether an eager call may skip torch's dispatcher, and after an equal call also its checks."""
        return not (self.dispatch or self.checked)


@cache
def settings() -> Settings:
    """The process's settings, read at the first call; raises SettingError."""
    return parse_settings(os.environ)


def engine_asked() -> bool:
    """Whether MOE_FP8_ENGINE asks for a plug-in.

    The other variables are not read, so that they cannot stop an engine that has the package and does not use
    it.
    """
    return os.environ.get("MOE_FP8_ENGINE", "") not in _NO_ENGINE


def parse_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from `environ`; raises SettingError for an unknown MOE_FP8_* name or a bad value."""
    names = [name for name in environ if name.startswith(_PREFIX) and not _OF_A_SERVICE.fullmatch(name)]
    given = {name: environ[name] for name in names}
    unknown = sorted(set(given) - set(_PARSERS))
    if unknown:
        raise SettingError(
            unknown[0],
            f"one of {', '.join(sorted(_PARSERS))}",
            given[unknown[0]],
            "correct the name of the environment variable or unset it",
        )
    values: dict[str, Any] = {
        "cache_dir": _default_cache_dir(environ),
        "checked": False,
        "batch_invariant": False,
        "jobs": len(os.sched_getaffinity(0)),
        "miss": "strict",
    }
    for name, value in given.items():
        field, parse = _PARSERS[name]
        values[field] = parse(name, value)
    return Settings(**values)


def _default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if base.startswith("/"):
        return Path(base) / "moe_fp8"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "moe_fp8" if home.startswith("/") else None


def _parse_path(name: str, value: str) -> Path:
    try:
        path = Path(value).expanduser() if value else Path()
    except RuntimeError:  # "~" or "~user" without a home directory
        raise SettingError(name, "an absolute path", value) from None
    if not path.is_absolute():
        raise SettingError(name, "an absolute path", value)
    return path


def _parse_bool(name: str, value: str) -> bool:
    known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    try:
        return known[value.lower()]
    except KeyError:
        raise SettingError(name, "1, true, on, 0, false or off", value) from None


def _parse_jobs(name: str, value: str) -> int:
    try:
        jobs = int(value) if value.isascii() and value.isdigit() else 0
    except ValueError:  # Python converts no text of thousands of digits
        jobs = 0
    if jobs < 1:
        raise SettingError(name, "a whole number of processes, 1 or more", value)
    return jobs


def _parse_miss(name: str, value: str) -> MissPolicy:
    if value not in ("compile", "warn", "strict"):
        raise SettingError(name, "compile, warn or strict", value)
    return value  # type: ignore[return-value]


#: The kinds of an engine's calls: products of linear layers, grouped products, logits of sparse attention.
ENGINE_KINDS = ("dense", "experts", "indexer")


#: What MOE_FP8_ENGINE may say to ask for no plug-in.
_NO_ENGINE = ("", "0")


def _parse_engine(name: str, value: str) -> tuple[str, ...]:
    if value in _NO_ENGINE:
        return ()
    if value == "1":
        return ENGINE_KINDS
    given = value.split(",")
    if set(given) - set(ENGINE_KINDS):
        kinds = ", ".join(ENGINE_KINDS)
        raise SettingError(name, f"1, 0, or some of {kinds} with commas between them", value)
    return tuple(kind for kind in ENGINE_KINDS if kind in given)


_PARSERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "MOE_FP8_CACHE_DIR": ("cache_dir", _parse_path),
    "MOE_FP8_BUNDLE": ("bundle", _parse_path),
    "MOE_FP8_CHECKED": ("checked", _parse_bool),
    "MOE_FP8_CHECKED_DIR": ("checked_dir", _parse_path),
    "MOE_FP8_DISPATCH": ("dispatch", _parse_bool),
    "MOE_FP8_BATCH_INVARIANT": ("batch_invariant", _parse_bool),
    "MOE_FP8_JOBS": ("jobs", _parse_jobs),
    "MOE_FP8_JIT_MISS": ("miss", _parse_miss),
    "MOE_FP8_ENGINE": ("engine", _parse_engine),
}
