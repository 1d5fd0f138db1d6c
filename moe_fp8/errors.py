"""The package's exceptions: every error that this package raises is a `MoeFp8Error`.

A message names the wrong argument, the expected value, the given value and a remedy. Attributes hold the
same facts, so that a caller can act on them without parsing text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MoeFp8Error(Exception):
    """Base of every error that moe_fp8 raises. Engines can pickle it and send it to a process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the class with the message alone; subclasses take other arguments.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[MoeFp8Error], args: tuple[Any, ...]) -> MoeFp8Error:
    error = kind.__new__(kind)
    error.args = args
    return error


class ArgumentError(MoeFp8Error, ValueError):
    """An argument of an op has the wrong shape, dtype, stride, device or value."""

    def __init__(self, op: str, argument: str, expected: str, got: Any, remedy: str = "") -> None:
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got
        self.remedy = remedy
        message = f"{op}: {argument}: expected {expected}, got {got}"
        super().__init__(f"{message}; {remedy}" if remedy else message)

    def rename(self, op: str, argument: str) -> None:
        """Name `argument` of the function `op`, whose caller does not know the op that raised the error."""
        message = str(self).removeprefix(f"{self.op}: {self.argument}: ")
        self.op, self.argument = op, argument
        self.args = (f"{op}: {argument}: {message}",)


class ContractError(ArgumentError):
    """The *contents* of a tensor break an op's contract; only checked mode checks contents.

    `expert` and `row` locate the first wrong entry; each is None if it does not apply. `replay_file` is the
    path of a description of the call, or None.
    """

    replay_file: str | None = None

    def __init__(
        self,
        op: str,
        argument: str,
        expected: str,
        got: Any,
        remedy: str = "",
        *,
        expert: int | None = None,
        row: int | None = None,
    ) -> None:
        self.expert = expert
        self.row = row
        super().__init__(op, argument, expected, got, remedy)

    def add_replay_file(self, written: Path | OSError) -> None:
        """Name the replay file, or the reason why there is none, in the message."""
        if isinstance(written, OSError):
            self.args = (f"{self} (no replay file: {written})",)
        else:
            self.replay_file = str(written)
            self.args = (f"{self} (replay file: {written})",)


class UnsupportedError(MoeFp8Error, NotImplementedError):
    """The request is well formed but not supported; the message names a supported request."""


#: Requirements without which a part of the package works: title, and what works.
_REQUIREMENTS = {"torch": ("PyTorch", "planning and building"), "rich": ("rich", "--json and the ops")}


@contextmanager
def requirements_needed() -> Iterator[None]:
    """Within it, an import that fails without PyTorch or rich is an UnsupportedError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _REQUIREMENTS:
            raise
        title, others = _REQUIREMENTS[error.name]
        raise UnsupportedError(
            f"{title} is not installed; `moe-fp8 doctor` says which version fits ({others} do not need it)"
        ) from None


class CaptureError(MoeFp8Error, RuntimeError):
    """A function cannot be captured in a CUDA graph, or its replay does something else than an eager call.

    `function` names it. `what` names the part that is wrong: "capture", an output or an input.
    """

    def __init__(self, function: str, what: str, expected: str, got: Any, remedy: str) -> None:
        self.function = function
        self.what = what
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(f"{function}: {what}: expected {expected}, got {got}; {remedy}")


class ConfigError(MoeFp8Error, ValueError):
    """An option is missing, malformed or contradictory. The subclasses name other kinds of configuration."""

    def __init__(self, field: str, expected: str, got: Any, remedy: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.remedy = remedy
        message = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{message}; {remedy}" if remedy else message)


class SettingError(ConfigError):
    """A MOE_FP8_* environment variable has an unknown name or a bad value.

    A value is also bad if the command or the plug-in that reads it cannot work with it.
    """


class ModelError(ConfigError):
    """A model's config or checkpoint is missing or malformed, or no kernel serves the model."""


class TileError(ConfigError):
    """A `config` names no tile that the GEMM may use."""


class JitError(MoeFp8Error, RuntimeError):
    """Base of the errors in compiling, storing and loading a kernel."""


class CompileError(JitError):
    """NVRTC refused a kernel; `log` holds its diagnostics."""

    def __init__(self, name: str, log: str) -> None:
        self.name = name
        self.log = log
        super().__init__(f"{name}: NVRTC failed to compile it:\n{log}")


class JitMissError(JitError):
    """A frozen process asked for a kernel that warmup had not loaded."""

    def __init__(self, spec: Any, key: str) -> None:
        self.spec = spec
        self.key = key
        super().__init__(
            f"kernel {spec} (key {key}) was not loaded before freeze(); "
            f"`moe-fp8 explain '{spec}' --model PATH` with the options of the warmup plan tells which option "
            "plans it; or use freeze('warn') to compile on demand"
        )


class BundleError(JitError):
    """A folder holds no kernel bundle that this process may use, or a bundle cannot be written there.

    `bundle` is the folder; `what` names the wrong part of it.
    """

    def __init__(self, bundle: str, what: str, expected: str, got: Any, remedy: str) -> None:
        self.bundle = bundle
        self.what = what
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(f"kernel bundle {bundle}: {what}: expected {expected}, got {got}; {remedy}")


class ToolchainError(JitError):
    """NVRTC or the CUDA driver cannot be loaded, or is too old; the message names the remedy."""


class DriverError(JitError):
    """A CUDA driver call failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.call = call
        self.code = code
        self.name = name
        super().__init__(f"{call} failed: {name} ({code})")
