"""Find arrivals on a barrier that may execute before a read of shared memory is done (sm_90 machine code).

An arrival says "I have read this stage". It says so too early if it comes after a load and no instruction has
waited for the load's value. Under memory traffic such a load comes late and reads data that the next copy has
written. ptxas does not wait before any kind of arrival; the source decides whether the value is needed first.
The tensor core reads shared memory, too. There the source decides where a warp waits for it.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

#: Size of an instruction in bytes.
SIZE = 16

_HEX_AT_END = re.compile(r"0x[0-9a-f]+$")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
_WIDTH = re.compile(r"\.(64|128)\b")

# Control flow by the first word of the opcode. Straight instructions lead only to the next instruction. BSSY
# is one of them; it names the address that its BSYNC leads to.
_STRAIGHT = frozenset(
    {"ACQBULK", "BMOV", "BPT", "BREAK", "BSSY", "ELECT", "ENDCOLLECTIVE", "NANOSLEEP", "PREEXIT", "YIELD"}
)
_DIRECT = frozenset({"BRA", "CALL", "WARPSYNC"})
_INDIRECT = frozenset({"BRX", "BRXU", "JMP", "JMX", "JMXU"})
_ENDS = frozenset({"EXIT", "KILL"})
_KNOWN = _STRAIGHT | _DIRECT | _INDIRECT | _ENDS | {"BSYNC", "RET"}

_ARRIVALS = ("SYNCS.ARRIVE", "ARRIVES", "UCGABAR_ARV", "BAR.ARV", "BAR.RED", "BAR.SYNC")
_GLOBAL = frozenset(
    {"ATOM", "ATOMG", "LD", "LDG", "LDGSTS", "RED", "REDG", "ST", "STG", "UBLKCP", "UBLKPF", "UBLKRED"}
    | {"UTMALDG", "UTMAPF", "UTMAREDG", "UTMASTG"}
)
_OTHER_SYNCS = ("SYNCS.EXCH", "SYNCS.PHASECHK", "SYNCS.CCTL")  # set up, wait, tear down


class MachineCodeError(Exception):
    """The disassembler is missing or fails, or the analysis does not know some code."""


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction at `address`, in bytes from the start of its section.

    `target`: the address that it may lead to, if it names an address (for BSSY, the address that its BSYNC
    leads to). `signals`: a bit for the scoreboard that it signals when its result is there, or 0. `waits`: a
    bit for each scoreboard that it waits on before it is issued.
    """

    address: int
    predicate: str
    opcode: str
    operands: str = ""
    target: int | None = None
    signals: int = 0
    waits: int = 0

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.address:04x}", self.predicate, self.opcode, self.operands)))

    @cached_property
    def family(self) -> str:
        """The opcode's first word."""
        return self.opcode.partition(".")[0]

    @cached_property
    def is_arrival(self) -> bool:
        """Whether it tells other threads that this thread is here, by an mbarrier or a barrier of threads."""
        if self.family == "SYNCS" and not self.opcode.startswith((*_ARRIVALS, *_OTHER_SYNCS)):
            raise MachineCodeError(f"is this an arrival? {self}")
        return self.opcode.startswith(_ARRIVALS)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether its result comes after the results of all such instructions before it in the warp.

        ptxas relies on this order, even if a predicate is off (`unwaited_uses`).
        """
        return self.family in ("LDS", "LDSM", "SHFL")

    @cached_property
    def is_generic_load(self) -> bool:
        """Whether it may load from the shared memory of another block of the cluster."""
        return self.family == "LD"

    @property
    def is_global(self) -> bool:
        """Whether it may read or write global memory (generic addresses count)."""
        return self.family in _GLOBAL

    @cached_property
    def is_product(self) -> bool:
        """Whether the tensor core reads shared memory for it, until some WARPGROUP.DEPBAR has passed."""
        return self.family.endswith("GMMA")

    @cached_property
    def is_load(self) -> bool:
        """Whether it may read shared memory into registers, perhaps to change it."""
        if self.predicate == "@!PT":  # a filler before LDGSTS
            return False
        changes = self.family == "ATOMS" and not self.operands.startswith("RZ")
        return self.family in ("LDS", "LDSM") or self.is_generic_load or changes

    @cached_property
    def registers(self) -> frozenset[int]:
        """The general registers that it names."""
        return frozenset(int(found) for found in _REGISTER.findall(self.operands))

    @cached_property
    def results(self) -> frozenset[int]:
        """The registers that a load writes."""
        found, width = _REGISTER.match(self.operands), _WIDTH.search(self.opcode)
        if found is None:
            return frozenset()
        first, count = int(found[1]), int(width[1]) // 32 if width else 1
        return frozenset(range(first, first + count))


#: The instructions of a section, in order and without gaps from address 0, which is its entry.
Code: TypeAlias = Sequence[Instruction]


@dataclass(frozen=True)
class EarlyArrival:
    """An arrival that some path reaches while `load` is open. The load may be a product of the tensor core.

    `passed`: the number of other arrivals at which the load was open before, on the path with the most of
    them; 2 means two or more. In a loop that loads one stage ahead, the first arrival is about an older stage
    than the load.
    """

    arrival: Instruction
    load: Instruction
    passed: int


@cache
def nvdisasm() -> Path:
    """nvdisasm from the wheel nvidia-cuda-nvdisasm; raises MachineCodeError if it is not installed."""
    remedy = "install it with `pip install 'nvidia-cuda-nvdisasm>=13,<14'`"
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError as error:
        raise MachineCodeError(f"nvidia-cuda-nvdisasm is not installed; {remedy}") from error
    # The file is found by name, because its folder depends on the wheel's version: nvidia/cu13/bin or
    # nvidia/cuda_nvdisasm/bin.
    found = [Path(str(file.locate())) for file in files if file.name == "nvdisasm"]
    if not found or not found[0].is_file():
        raise MachineCodeError(f"nvidia-cuda-nvdisasm is installed, but nvdisasm is not there; {remedy}")
    return found[0]


def run_nvdisasm(image: bytes, *options: str) -> str:
    """The output of nvdisasm for `image`; raises MachineCodeError if nvdisasm fails."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(image)
        file.flush()
        result = subprocess.run([nvdisasm(), *options, file.name], capture_output=True, text=True)
    if result.returncode:
        raise MachineCodeError(f"nvdisasm {' '.join(options)}: {result.stderr.strip()}")
    return result.stdout


def sections(cubin: bytes) -> dict[str, bytes]:
    """The contents of an ELF file's sections, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    named = {}
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        named[cubin[start : cubin.index(0, start)].decode()] = cubin[offset : offset + size]
    return named


def code_section(cubin: bytes) -> bytes:
    """The machine code of a cubin; raises MachineCodeError if it is not in exactly one section."""
    found = [section for name, section in sections(cubin).items() if name.startswith(".text.")]
    if len(found) != 1:
        raise MachineCodeError(f"a cubin with {len(found)} sections of code, expected one")
    return found[0]


def disassemble(cubins: Iterable[bytes]) -> list[Code]:
    """The code of each cubin; raises MachineCodeError for unknown code.

    nvdisasm takes half a second to start and 0.04 s for a kernel. So each core runs it once, on many
    sections.
    """
    texts = [code_section(cubin) for cubin in cubins]
    cores = min(os.cpu_count() or 1, len(texts)) or 1
    with ThreadPoolExecutor(cores) as pool:
        shares = list(pool.map(_disassemble, (texts[core::cores] for core in range(cores))))
    return [shares[i % cores][i // cores] for i in range(len(texts))]


def _disassemble(texts: Sequence[bytes]) -> list[Code]:
    whole = b"".join(texts)
    if not whole:
        return []
    # The listing is a header and a list of functions; mere code has one function.
    rows = json.loads(run_nvdisasm(whole, "--emit-json", "--binary", "SM90a"))[1][0]["sass-instructions"]
    if len(rows) * SIZE != len(whole):
        raise MachineCodeError(f"nvdisasm lists {len(rows)} instructions in {len(whole)} bytes")
    codes: list[Code] = []
    first = 0
    for text in texts:
        last = first + len(text) // SIZE
        offsets = range(0, len(text), SIZE)
        listed = zip(rows[first:last], offsets, strict=True)
        codes.append([_instruction(row, text, offset, first * SIZE) for row, offset in listed])
        first = last
    return codes


def _instruction(row: dict[str, Any], text: bytes, address: int, base: int) -> Instruction:
    """`base`: the address of the section's start in the listing."""
    opcode, operands, target = row["opcode"], row.get("operands", ""), None
    family = opcode.partition(".")[0]
    if "control-flow" in row.get("other-attributes", {}) and family not in _KNOWN:
        raise MachineCodeError(f"where does this lead to? {opcode} {operands}")
    if (family in _DIRECT or family == "BSSY") and (found := _HEX_AT_END.search(operands)):
        target = int(found[0], 16) - base
        operands = f"{operands[: found.start()]}{target:#x}"
    # From bit 105: stall 4, yield 1, scoreboard of the result 3, scoreboard of the operands 3, wait mask 6.
    control = struct.unpack_from("<Q", text, address + 8)[0] >> 41
    signals = 1 << (control >> 5 & 7) & 63  # 7 means none
    waits = control >> 11 & 63
    return Instruction(address, row.get("predicate", ""), opcode, operands, target, signals, waits)


#: Open loads. Each entry has the load, the scoreboards that cover it (any of them suffices), and the number
#: of arrivals that it has passed. Each state that a path leads to has its own entry, so a union of two paths
#: loses nothing.
_Open: TypeAlias = frozenset[tuple[Instruction, int, int]]


def early_arrivals(code: Code) -> list[EarlyArrival]:
    """The arrivals that some path reaches with open loads, by the arrival's address and then the load's.

    A load is open until an instruction waits on its scoreboard. The scoreboard of a later instruction serves
    as well if that instruction's result comes after the load's. A product is open until a WARPGROUP.DEPBAR;
    how many products this one waits for is up to the source. MEMBAR at GPU scope also closes a generic
    load, because it waits until the load is performed. At a BAR a generic load does not count, because BAR
    tells only the own block. DEPBAR does not count as a wait. Raises MachineCodeError for an arrival that
    nothing leads to, or if the code runs off its end: the control flow is then not understood.
    """
    open_loads = _open_loads(code)
    found = []
    for at, one in enumerate(code):
        if one.is_arrival:
            if at not in open_loads:
                raise MachineCodeError(f"nothing leads to {one}")
            passed: dict[Instruction, int] = defaultdict(int)
            for load, _, count in open_loads[at]:
                if one.family != "BAR" or not load.is_generic_load:
                    passed[load] = max(passed[load], count)
            found += [EarlyArrival(one, load, passed[load]) for load in sorted(passed, key=_address)]
    return found


def _address(one: Instruction) -> int:
    return one.address


def unwaited_uses(code: Code) -> list[tuple[Instruction, Instruction]]:
    """Pairs (load, instruction that names a register of the load's result while the load is open).

    ptxas makes each instruction wait for its operands, so any such pair means that the rules here miss a
    wait.
    """
    found = []
    for at, entries in _open_loads(code).items():
        one = code[at]
        for load in {load for load, _, _ in entries if not load.is_product}:
            # A load may overwrite the result of an earlier load, if its own result comes later.
            overwrites = one.results if one.is_in_order and load.is_in_order else frozenset()
            if load.results & (one.registers - overwrites):
                found.append((load, one))
    return found


def ahead_of_wait(code: Code) -> list[Instruction]:
    """The instructions that some path reaches without a wait for the kernel before (griddepcontrol.wait)."""
    successors = _successors(code)
    reached: set[int] = set()
    pending = [0]
    while pending:
        at = pending.pop()
        if at in reached:
            continue
        reached.add(at)
        if code[at].family != "ACQBULK" or code[at].predicate:
            pending += successors(at)
    return [code[at] for at in sorted(reached)]


def _open_loads(code: Code) -> dict[int, _Open]:
    """For each instruction that some path leads to, by index: the open loads when it is issued."""
    successors = _successors(code)
    issued: dict[int, _Open] = {}
    pending: list[tuple[int, _Open]] = [(0, frozenset())]
    while pending:
        at, before = pending.pop()
        if at >= len(code):
            raise MachineCodeError(f"the code runs off its end behind {code[-1]}")
        known = issued.get(at)
        # The wait comes before the issue, so a predicate does not turn it off.
        open_ = frozenset(entry for entry in before if not entry[1] & code[at].waits)
        if known is not None and open_ <= known:
            continue
        issued[at] = open_ if known is None else known | open_
        after = _after(code[at], issued[at])
        pending += [(successor, after) for successor in successors(at)]
    return issued


def _after(one: Instruction, open_: _Open) -> _Open:
    if one.family == "MEMBAR" and not one.predicate and one.opcode.endswith((".GPU", ".SYS")):
        open_ = frozenset(entry for entry in open_ if not entry[0].is_generic_load)
    if one.opcode.startswith("WARPGROUP.DEPBAR"):
        open_ = frozenset(entry for entry in open_ if not entry[0].is_product)
    if one.is_in_order and one.signals:
        open_ = frozenset(
            (load, by | one.signals if load.is_in_order else by, count) for load, by, count in open_
        )
    if one.is_arrival:
        open_ = frozenset((load, by, min(count + 1, 2)) for load, by, count in open_)
    if one.is_product:
        return open_ | {(one, 0, 0)}  # no scoreboard covers it
    return open_ | {(one, one.signals, 0)} if one.is_load else open_


def _successors(code: Code) -> Callable[[int], Sequence[int]]:
    """A function from an instruction's index to the indices that it may lead to."""
    joins = {(one.operands.partition(",")[0], one.target) for one in code if one.family == "BSSY"}
    behind_joins = {target // SIZE for _, target in joins if target is not None}
    returns = [at + 1 for at, one in enumerate(code) if one.family == "CALL"]

    def lead(at: int) -> Sequence[int]:
        one = code[at]
        following = at + 1
        if one.family in _STRAIGHT or one.family not in _KNOWN:
            return (following,)
        # Other operands are conditions, or a register to add.
        alone = one.operands == ("" if one.target is None else hex(one.target))
        if one.family in _ENDS:
            return () if alone and not one.predicate else (following,)
        if one.family == "BSYNC":
            # It leads to the target of its BSSY, which is usually the next instruction.
            expected = (one.operands, following * SIZE) in joins
            return (following,) if expected else (following, *behind_joins)
        if one.family == "RET":
            return (*returns, following) if one.predicate else returns
        if one.target is not None and one.family in ("BRA", "WARPSYNC"):
            always = one.family == "BRA" and alone and not one.predicate
            return (one.target // SIZE,) if always else (one.target // SIZE, following)
        if one.family == "WARPSYNC":
            return (following,)
        if one.target is not None and one.opcode.startswith("CALL.REL") and alone:
            return (one.target // SIZE, following) if one.predicate else (one.target // SIZE,)
        return range(len(code))  # it leads to an address in a register

    return lead
