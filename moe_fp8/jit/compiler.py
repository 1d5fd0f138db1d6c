"""KernelSpec -> Artifact through NVRTC. Compiling takes no tensor, launches nothing and needs no driver."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from moe_fp8.errors import CompileError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.key import compile_options, digest
from moe_fp8.jit.sources import SourceTree, package_sources
from moe_fp8.jit.toolchain import nvrtc, nvrtc_version
from moe_fp8.specs import KernelSpec

_logger = logging.getLogger(__name__)

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
# This matches only the known lines of the resource report: ptxas also prints "info" for serialized wgmma
# and for an ignored setmaxnreg, and these messages must count as warnings.
_REPORT_LINE = re.compile(
    r"^ptxas (?:info)?\s*[:.]\s*"
    r"(?:\d+ bytes gmem|Compiling entry function|Function properties for|\d+ bytes stack frame,"
    r"|Used \d+ registers|Compile time)"
    r"|^\s*\d+ bytes stack frame,|^Remark: The warnings can be suppressed"
)


def compile_kernel(spec: KernelSpec, sources: SourceTree | None = None) -> Artifact:
    """Compile `spec`; `sources` defaults to the kernels of this package.

    Raises CompileError with NVRTC's log, also if the result is not exactly one kernel named
    `spec.name`; ToolchainError if there is no usable NVRTC. Compiler warnings are logged at
    WARNING and kept in `Artifact.warnings`. Thread-safe; blocks without holding the GIL.
    """
    closure = (sources or package_sources()).closure(spec.name)
    options = compile_options(spec)
    version = nvrtc_version()
    started = time.perf_counter()
    cubin, log = _run(spec.name, closure.entry, closure.text, closure.headers, options)
    seconds = time.perf_counter() - started

    entries = _ENTRY.findall(log)
    if entries != [spec.name]:
        raise CompileError(
            spec.name,
            f'{closure.entry} must define exactly one kernel, extern "C" __global__ {spec.name}; '
            f"it defines {entries or 'none'}\n{log}",
        )
    warnings = _warnings(log)
    for warning in warnings:
        _logger.warning("%s: %s", spec, warning)
    local, spill_stores, spill_loads = _largest(_STACK, log)
    return Artifact(
        key=digest(closure, options, version),
        name=spec.name,
        cubin=cubin,
        registers=_largest(_REGISTERS, log)[0],
        spill_bytes=spill_stores + spill_loads,
        local_bytes=local,
        static_smem_bytes=_largest(_STATIC_SMEM, log, default=0)[0],
        nvrtc=f"{version[0]}.{version[1]}",
        compile_seconds=seconds,
        log=log,
        warnings=warnings,
    )


def _run(
    kernel: str, entry: str, text: bytes, headers: tuple[tuple[str, bytes], ...], options: tuple[str, ...]
) -> tuple[bytes, str]:
    api = nvrtc()
    program = _call(
        api,
        kernel,
        api.nvrtcCreateProgram,
        text,
        entry.encode(),
        len(headers),
        [body for _, body in headers],
        [name.encode() for name, _ in headers],
    )
    try:
        status = api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = _fetch(api, kernel, program, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog)
        message = log.rstrip(b"\0").decode("utf-8", "replace").strip()
        if status != api.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(kernel, f"{message or repr(status)}\n(options: {' '.join(options)})")
        return _fetch(api, kernel, program, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN), message
    finally:
        api.nvrtcDestroyProgram(program)


def _fetch(api: Any, kernel: str, program: Any, size_of: Any, get: Any) -> bytes:
    buffer = bytearray(_call(api, kernel, size_of, program))
    _call(api, kernel, get, program, buffer)
    return bytes(buffer)


def _call(api: Any, kernel: str, function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if status != api.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(kernel, f"{function.__name__} failed: {status!r}")
    return results[0] if results else None


def _largest(pattern: re.Pattern[str], log: str, default: int | None = None) -> tuple[int, ...]:
    """Element-wise maximum of all matches: a device function that was not inlined has its own report."""
    matches = [tuple(int(group) for group in found.groups()) for found in pattern.finditer(log)]
    if not matches:
        if default is not None:
            return (default,)
        raise CompileError("ptxas report", f"no match for {pattern.pattern!r} in NVRTC's log:\n{log}")
    return tuple(max(column) for column in zip(*matches, strict=True))


def _warnings(log: str) -> tuple[str, ...]:
    """The diagnostics in `log`: its paragraphs without the lines of the resource report."""
    lines = [line for line in log.splitlines() if not _REPORT_LINE.match(line)]
    return tuple(part.strip() for part in re.split(r"\n\s*\n", "\n".join(lines)) if part.strip())
