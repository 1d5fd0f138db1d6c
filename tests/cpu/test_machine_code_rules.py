"""The rules of tests/machine_code.py for early arrivals, on code that is written by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.machine_code import SIZE, Instruction, MachineCodeError, early_arrivals, unwaited_uses

#: For each rule: its code, and the open loads of each arrival, both as indices of instructions. >n means that
#: an instruction signals scoreboard n, and <n that it waits on it.
RULES: dict[str, tuple[str, dict[int, list[int]]]] = {
    "nothing waits": ("LDS R0 >0; SYNCS.ARRIVE; FADD <0; EXIT", {1: [0]}),
    "waited": ("LDS R0 >0; FADD <0; SYNCS.ARRIVE; EXIT", {}),
    "the arrival waits": ("LDS R0 >0; SYNCS.ARRIVE <0; EXIT", {}),
    "a wait under a predicate": ("LDS R0 >0; @P0 FADD <0; SYNCS.ARRIVE; EXIT", {}),
    "another scoreboard": ("LDS R0 >0; FADD <1; SYNCS.ARRIVE; EXIT", {2: [0]}),
    "a shared scoreboard": ("LDS R0 >0; LDG R1 >0; FADD <0; SYNCS.ARRIVE; EXIT", {}),
    "a later one covers": ("LDS R0 >0; LDSM R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {}),
    "also one that signals nothing": ("LDS R0; LDS R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {}),
    "also under a predicate": ("LDS R0; @P0 LDS R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {}),
    "also a shuffle": ("LDS R0; SHFL R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {}),
    "but no other instruction": ("LDS R0; LDG R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {3: [0]}),
    "an earlier one does not": ("LDS R0 >0; LDS R1 >1; FADD <0; SYNCS.ARRIVE; EXIT", {3: [1]}),
    "nor one that is passed by": ("LDS R0; @P0 BRA 0x30; LDS R1 >1; FADD <1; SYNCS.ARRIVE; EXIT", {4: [0]}),
    "a peer's memory": ("LD R0 >0; LDS R1 >1; FADD <1; UCGABAR_ARV; EXIT", {3: [0]}),
    "a fence": ("LD R0 >0; LDS R1 >1; MEMBAR.ALL.GPU; UCGABAR_ARV; EXIT", {3: [1]}),
    "a fence of the block": ("LD R0 >0; MEMBAR.ALL.CTA; UCGABAR_ARV; EXIT", {2: [0]}),
    "BAR is of the block": ("LD R0 >0; LDS R1 >1; BAR.SYNC; EXIT", {2: [1]}),
    "an atomic with a result": ("ATOMS.ADD R0 >0; SYNCS.ARRIVE; EXIT", {1: [0]}),
    "an atomic without": ("ATOMS.ADD RZ; SYNCS.ARRIVE; EXIT", {}),
    "a product": ("QGMMA R8,gdesc[UR4],R8,gsb0; SYNCS.ARRIVE; EXIT", {1: [0]}),
    "a product that is waited for": ("QGMMA R8; WARPGROUP.DEPBAR.LE gsb0,0x1; SYNCS.ARRIVE; EXIT", {}),
    "a product and a scoreboard": ("QGMMA R8 >0; FADD <0; SYNCS.ARRIVE; EXIT", {2: [0]}),
    "another kind of wait": ("QGMMA R8; DEPBAR.LE SB0,0x0; SYNCS.ARRIVE; EXIT", {2: [0]}),
    "a product behind the wait": ("WARPGROUP.DEPBAR.LE gsb0,0x0; QGMMA R8; SYNCS.ARRIVE; EXIT", {2: [1]}),
    "never executed": ("@!PT LDS RZ; SYNCS.ARRIVE; EXIT", {}),
    "EXIT": ("@P0 BRA 0x30; LDS R0 >0; EXIT; SYNCS.ARRIVE; EXIT", {}),
    "EXIT of some": ("LDS R0 >0; @P0 EXIT; SYNCS.ARRIVE; EXIT", {2: [0]}),
    "nothing falls through": ("@P0 BRA 0x30; LDS R0 >0; BRA 0x40; SYNCS.ARRIVE; EXIT", {}),
    "but it does here": ("@P0 BRA 0x30; LDS R0 >0; BRA P1,0x40; SYNCS.ARRIVE; EXIT", {3: [1]}),
    "open around the loop": ("SYNCS.ARRIVE; LDS R0 >0; @P0 BRA 0x0; EXIT", {0: [1]}),
    "waited around the loop": ("FADD <0; SYNCS.ARRIVE; LDS R0 >0; @P0 BRA 0x0; EXIT", {}),
    "BSYNC leads on": ("BSSY B0,0x30; LDS R0 >0; BSYNC B0; SYNCS.ARRIVE; EXIT", {3: [1]}),
    "BSYNC leads away": ("BSSY B0,0x40; LDS R0 >0; BSYNC B0; EXIT; SYNCS.ARRIVE; EXIT", {4: [1]}),
    "a function": ("CALL.REL 0x30; SYNCS.ARRIVE; EXIT; LDS R0 >0; RET.REL R2,0x0", {1: [3]}),
    "a jump table": ("LDS R0 >0; BRX R4,-0x10; FADD <0; EXIT; SYNCS.ARRIVE; EXIT", {4: [0]}),
}


@pytest.mark.parametrize(("text", "expected"), RULES.values(), ids=RULES)
def test_rules(text: str, expected: dict[int, list[int]]) -> None:
    found = early_arrivals(code(text))
    numbers: dict[int, list[int]] = defaultdict(list)
    for one in found:
        numbers[one.arrival.address // SIZE].append(one.load.address // SIZE)
    assert numbers == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LDS R0 >0; SYNCS.ARRIVE; FADD <0; SYNCS.ARRIVE; EXIT", [0]),
        ("LDS R0 >0; SYNCS.ARRIVE; SYNCS.ARRIVE; FADD <0; EXIT", [0, 1]),
        ("LDS R0 >0; @P0 BRA 0x30; SYNCS.ARRIVE; SYNCS.ARRIVE; EXIT", [0, 1]),
        ("LDS R0 >0; SYNCS.ARRIVE; @P0 BRA 0x10; EXIT", [2]),
    ],
)
def test_passed_arrivals_are_counted(text: str, expected: list[int]) -> None:
    assert [one.passed for one in early_arrivals(code(text))] == expected


def test_uses_are_looked_up_in_all_registers() -> None:
    uses = {load.opcode: use.operands for load, use in unwaited_uses(code("LDS.64 R4 >0; FADD R9,R5; EXIT"))}
    assert uses == {"LDS.64": "R9,R5"}
    assert not unwaited_uses(code("LDS.64 R4 >0; FADD R9,R5 <0; EXIT"))
    assert not unwaited_uses(code("LDS.64 R4 >0; FADD R9,UR5,R6; LDS R5,[R9] >1; EXIT"))


@pytest.mark.parametrize("text", ["EXIT; SYNCS.ARRIVE; EXIT", "SYNCS.NEW; EXIT", "LDS R0 >0"])
def test_what_is_not_understood_raises(text: str) -> None:
    with pytest.raises(MachineCodeError):
        early_arrivals(code(text))


def code(text: str) -> list[Instruction]:
    result = []
    for number, row in enumerate(text.split("; ")):
        words = row.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        signals, waits = (sum(1 << int(word[1:]) for word in words if word[0] == mark) for mark in "><")
        opcode, *rest = (word for word in words if word[0] not in "><")
        operands = "".join(rest)
        names_one = opcode.startswith(("BRA", "BSSY", "CALL"))
        target = int(operands.rpartition(",")[2], 16) if names_one else None
        result.append(Instruction(number * SIZE, predicate, opcode, operands, target, signals, waits))
    return result
