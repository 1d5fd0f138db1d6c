"""The line of device code that each instruction of a kernel comes from."""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from moe_fp8.jit import compiler
from moe_fp8.jit.key import compile_options
from moe_fp8.jit.sources import SourceTree, package_sources
from moe_fp8.specs import KernelSpec
from tests.machine_code import SIZE, MachineCodeError, code_section, sections

# Opcodes of a table of lines; the last two are extended opcodes.
_COPY, _ADVANCE_ADDRESS, _ADVANCE_LINE, _SET_FILE = 1, 2, 3, 4
_CONST_ADD_ADDRESS, _FIXED_ADVANCE_ADDRESS = 8, 9
_SET_ADDRESS, _INLINED_CALL = 0x02, 0x90


@dataclass(frozen=True)
class SourceLine:
    """A line of device code: its file, relative to the folder of the kernels, its number, its text."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


#: A line, the line of the call that inlined it, and so on up to the kernel.
Chain: TypeAlias = tuple[SourceLine, ...]


def source_lines(spec: KernelSpec, cubin: bytes, sources: SourceTree | None = None) -> dict[int, Chain]:
    """The lines that the instructions of `cubin` come from, by address.

    `cubin` was compiled for `spec` from `sources`. The function compiles them once more, with line numbers.
    It raises MachineCodeError if the line numbers change the code. Instructions that the compiler has copied
    elsewhere have no line there and get the line of the instruction before them; their operands then tell
    what they read.
    """
    closure = (sources or package_sources()).closure(spec.name)
    options = (*compile_options(spec), "-lineinfo")
    marked, _ = compiler._run(spec.name, closure.entry, closure.text, closure.headers, options)
    code = code_section(marked)
    if code != code_section(cubin):
        raise MachineCodeError(f"{spec}: compiled with line numbers it is other code")
    texts = {name: text.decode().splitlines() for name, text in closure.files}
    rows = _rows(sections(marked)[".debug_line"])

    def chain(row: _Row | None) -> Chain:
        if row is None:
            return ()
        text = texts[row.file][row.line - 1].strip() if row.file in texts else ""
        return (SourceLine(row.file, row.line, text), *chain(row.inlined_at))

    starts = [row.address for row in rows]
    last = (bisect.bisect_right(starts, address) for address in range(0, len(code), SIZE))
    return {number * SIZE: chain(rows[found - 1] if found else None) for number, found in enumerate(last)}


@dataclass(frozen=True)
class _Row:
    address: int
    file: str
    line: int
    inlined_at: _Row | None


def _rows(table: bytes) -> list[_Row]:
    """The rows of a .debug_line section: DWARF 2, and an NVIDIA opcode for the place where a row is inlined.

    nvdisasm does not serve here: it drops a row that differs from the row before only in this place, and so
    confuses callers.
    """
    reader = _Reader(table, 10)
    _, _, base, span, first_special = struct.unpack("<BBbBB", reader.take(5))
    operands = list(reader.take(first_special - 1))
    folders, files = [Path.cwd()], []
    while name := reader.name():
        folders.append(Path(name))
    while name := reader.name():
        path = folders[reader.unsigned()] / name
        files.append(str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path))
        reader.unsigned(), reader.unsigned()
    rows: list[_Row] = []
    address, file, line, inlined_at = 0, 1, 1, 0
    while reader.at < len(table):
        opcode = reader.take(1)[0]
        if opcode >= first_special:
            address += (opcode - first_special) // span
            line += base + (opcode - first_special) % span
        elif opcode == 0:
            end = reader.unsigned() + reader.at
            extended = reader.take(1)[0]
            if extended == _SET_ADDRESS:
                address = int.from_bytes(reader.take(8), "little")
            elif extended == _INLINED_CALL:
                inlined_at = reader.unsigned()
            reader.at = end
        elif opcode == _ADVANCE_ADDRESS:
            address += reader.unsigned()
        elif opcode == _ADVANCE_LINE:
            line += reader.signed()
        elif opcode == _SET_FILE:
            file = reader.unsigned()
        elif opcode == _CONST_ADD_ADDRESS:
            address += (255 - first_special) // span
        elif opcode == _FIXED_ADVANCE_ADDRESS:
            address += int.from_bytes(reader.take(2), "little")
        else:
            for _ in range(operands[opcode - 1]):
                reader.unsigned()
        if opcode == _COPY or opcode >= first_special:
            rows.append(_Row(address, files[file - 1], line, rows[inlined_at - 1] if inlined_at else None))
    return rows


@dataclass
class _Reader:
    data: bytes
    at: int

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def name(self) -> str:
        end = self.data.index(0, self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        start = self.at
        value = self.unsigned()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value
