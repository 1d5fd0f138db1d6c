"""One exception tree: every error this package raises is a `MoeFp8Error`.

Messages say what was wrong, what was expected, what came, and the remedy; the same facts are
attributes, so that a caller can act on them without parsing text.
"""

from __future__ import annotations

from typing import Any


class MoeFp8Error(Exception):
    """Base of every error raised by moe_fp8. They can be pickled, as engines do between their processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with the message alone, which subclasses do not take.
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


class ContractError(ArgumentError):
    """The *contents* of a tensor break an op's contract; only checked mode looks at contents.

    `expert` and `row` name the first offender, where they apply.
    """

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


class UnsupportedError(MoeFp8Error, NotImplementedError):
    """The request is well formed but no kernel serves it; the message names what would be served."""


class ConfigError(MoeFp8Error, ValueError):
    """What was configured is missing, malformed or contradictory: an option, or what the subclasses name."""

    def __init__(self, field: str, expected: str, got: Any, remedy: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.remedy = remedy
        message = f"{field}: expected {expected}, got {got!r}"
        super().__init__(f"{message}; {remedy}" if remedy else message)


class SettingError(ConfigError):
    """A MOE_FP8_* environment variable has an unknown name or a bad value, or does not fit what is asked."""


class ModelError(ConfigError):
    """A model's config or checkpoint is missing, malformed or describes what no kernel serves."""


class TileError(ConfigError):
    """A `config` names no tile that the GEMM may use."""


class JitError(MoeFp8Error, RuntimeError):
    """Base of what can go wrong between a kernel spec and a loaded kernel."""


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
            f"kernel {spec} (key {key}) was not loaded before freeze(); add the shape that asked "
            "for it to the warmup plan, or use freeze('warn') to compile on demand"
        )


class BundleError(JitError):
    """A folder is not a kernel bundle that this process may use, or cannot be made one.

    `bundle` is the folder, `what` the part of it that is wrong.
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
