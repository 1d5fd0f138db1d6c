"""No kernel hands shared memory back too early, takes global memory to be constant, or runs ahead too far."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.jit.sources import SourceTree
from moe_fp8.specs import KernelSpec
from tests.cpu.jit_kernels import spec as tiny
from tests.machine_code import (
    Code,
    EarlyArrival,
    Instruction,
    ahead_of_wait,
    disassemble,
    early_arrivals,
    unwaited_uses,
)
from tests.reachable_kernels import ReachableKernels
from tests.source_lines import Chain, source_lines

#: In the place of a load's line, since instructions of wgmma have lines of other statements.
PRODUCT = "a product"


@dataclass(frozen=True)
class Allowed:
    """An arrival that may come while a load is open.

    `kernel`: a pattern of kernel names. `arrival`, `load`: "file: part of a line" of device code, either
    their own line or the line that they are inlined in (source_lines says which instructions have no line of
    their own). `load` may also be PRODUCT. `reason`: the memory that the arrival hands back, and the memory
    that the load reads.
    `passed`: the number of other arrivals at which the load may have been open before. With 0, a load for the
    next stage is allowed at the arrival for this stage, but not at its own arrival.
    """

    kernel: str
    arrival: str
    load: str
    reason: str
    passed: int = 0


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "gemm_fp8",
        arrival="gemm/accumulate.cuh: come = finish_block<1>(sum, done, ahead.full, more);",
        load="gemm/accumulate.cuh: load(next.stage, next.scales);",
        reason="The promoted stage is handed back; the scales are read from the stage after it.",
    ),
    Allowed(
        "k_grouped_gemm_fp8",
        arrival="gemm/accumulate.cuh: release_promoted(stage, sum[0], sum[kLast]);",
        load="gemm/accumulate.cuh: load(at(ring_), scales);",
        reason="The promoted stage is handed back; the tokens' scales are read from the stage after it.",
    ),
    Allowed(
        "*gemm_fp8",
        arrival="gemm/kernel.cuh: reader.pop(copy);",
        load=PRODUCT,
        reason="The record of the tile before is handed back; the product reads the next tile's first stage.",
    ),
    Allowed(
        "mqa_logits_fp8",
        arrival="mqa/scores.cuh: sched::release(&shared.key_empty[ring.slot], k_scale);",
        load="mqa/scores.cuh: finish(",
        reason="A stage of keys is handed back; the token's range is in the task, which query_empty guards.",
    ),
)

#: Source lines cost a compile and a disassembly of each kernel, so a failure explains only this many kernels
#: at once.
EXPLAINED = 32


@dataclass(frozen=True)
class Finding:
    """One load that is open at an arrival, and the source lines of the two."""

    spec: KernelSpec
    early: EarlyArrival
    arrival_lines: Chain
    load_lines: Chain

    def is_allowed(self, entry: Allowed) -> bool:
        """Whether `entry` matches this finding."""
        return (
            fnmatchcase(self.spec.name, entry.kernel)
            and self.early.passed <= entry.passed
            and _names(entry.arrival, self.arrival_lines)
            and (self.early.load.is_product if entry.load == PRODUCT else _names(entry.load, self.load_lines))
        )


@pytest.fixture(scope="module")
def cubins(reachable_kernels: ReachableKernels) -> dict[KernelSpec, bytes]:
    return {row.spec: reachable_kernels.cubin(row.spec) for row in reachable_kernels.report.rows}


@pytest.fixture(scope="module")
def codes(cubins: dict[KernelSpec, bytes]) -> dict[KernelSpec, Code]:
    return disassembled(cubins)


def disassembled(cubins: dict[KernelSpec, bytes]) -> dict[KernelSpec, Code]:
    return dict(zip(cubins, disassemble(cubins.values()), strict=True))


def constant_loads(code: Code) -> list[Instruction]:
    """Loads that take memory not to change while the kernel runs (ld.global.nc)."""
    return [one for one in code if "CONSTANT" in one.opcode.split(".")]


def test_no_kernel_takes_memory_to_be_constant(codes: dict[KernelSpec, Code]) -> None:
    # A kernel begins while the kernel before still writes.
    found = [f"{spec}: {load}" for spec, code in codes.items() for load in constant_loads(code)]
    assert not found


def launches(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The instructions that let the next kernel begin."""
    return [one for one in instructions if one.family == "PREEXIT"]


def test_no_kernel_lets_the_next_begin_before_its_own_wait(codes: dict[KernelSpec, Code]) -> None:
    # So when a kernel begins, all kernels have ended but the kernel before.
    found = [f"{spec}: {one}" for spec, code in codes.items() for one in launches(ahead_of_wait(code))]
    assert not found
    assert all(launches(code) for code in codes.values())


def test_only_gemms_use_global_memory_ahead_of_the_wait(codes: dict[KernelSpec, Code]) -> None:
    # A GEMM with constant weights reads these and its index. Its math warps wait for a copy instead, which
    # comes behind the wait.
    users = {spec.name for spec, code in codes.items() if any(one.is_global for one in ahead_of_wait(code))}
    assert users == {"gemm_fp8", "gemm_silu_mul_fp8", "k_grouped_gemm_fp8"}
    assert all(any(one.is_global for one in code) for code in codes.values())


def test_no_kernel_arrives_before_it_has_read(
    cubins: dict[KernelSpec, bytes], codes: dict[KernelSpec, Code]
) -> None:
    early = early_arrivals_of(codes)
    order = list(early)
    random.Random(0).shuffle(order)  # so that the first few kernels are of every kind
    findings: list[Finding] = []
    for first in range(0, len(order), EXPLAINED):
        some = order[first : first + EXPLAINED]
        findings += explain({spec: early[spec] for spec in some}, cubins)
        unexpected = [one for one in findings if not any(one.is_allowed(entry) for entry in ALLOWED)]
        left = len(order) - first - len(some)
        assert not unexpected, (
            f"arrivals before a load has read:\n{table(unexpected)}\n"
            f"and {left} kernels with such arrivals that were not looked into, of {len(cubins)}"
        )
    idle = [entry for entry in ALLOWED if not any(one.is_allowed(entry) for one in findings)]
    assert not idle, f"entries of ALLOWED that allow nothing: {idle}"


def early_arrivals_of(codes: dict[KernelSpec, Code]) -> dict[KernelSpec, list[EarlyArrival]]:
    """The early arrivals of each kernel that has any."""
    for spec, code in codes.items():
        for load, use in unwaited_uses(code):
            pytest.fail(
                f"{spec}: {use} waits for {load}, and the rules of tests/machine_code.py do not see it"
            )
    return {spec: found for spec, code in codes.items() if (found := early_arrivals(code))}


def explain(
    early: dict[KernelSpec, list[EarlyArrival]],
    cubins: dict[KernelSpec, bytes],
    sources: SourceTree | None = None,
) -> list[Finding]:
    """Every open load of `early`, with source lines; this takes a second for each kernel."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chains = pool.map(lambda spec: source_lines(spec, cubins[spec], sources), early)
        lines = dict(zip(early, chains, strict=True))
    return [
        Finding(spec, one, lines[spec][one.arrival.address], lines[spec][one.load.address])
        for spec, found in early.items()
        for one in found
    ]


def table(findings: Iterable[Finding]) -> str:
    """A text with the findings by kernel and by source lines, each with one full example."""
    groups: dict[tuple[str, str, str, int], list[Finding]] = defaultdict(list)
    for one in findings:
        written = _written(one.arrival_lines), _written(one.load_lines)
        groups[one.spec.name, written[0], written[1], one.early.passed].append(one)
    rows = []
    for (kernel, arrival, load, passed), group in sorted(groups.items()):
        example, count = group[0], len({one.spec for one in group})
        rows.append(
            f"{count} of {kernel}\n"
            f"  arrival  {arrival}\n"
            f"  load     {load}\n"
            f"  passed   {passed} other arrivals\n"
            f"  such as  {example.spec}\n"
            f"           {example.early.arrival}  from {' < '.join(map(str, example.arrival_lines))}\n"
            f"           {example.early.load}  from {' < '.join(map(str, example.load_lines))}"
        )
    return "\n".join(rows)


def _written(chain: Chain) -> str:
    """The innermost line that is not in a wrapper of one instruction."""
    telling = [line for line in chain if not line.file.startswith(("ptx/", "common/"))]
    return f"{telling[0]}: {telling[0].text}" if telling else "unknown"


def _names(where: str, chain: Chain) -> bool:
    file, _, part = where.partition(": ")
    return any(line.file == file and part in line.text for line in chain)


WRAPPERS = """
#pragma once
using Barrier = unsigned long long;
__device__ unsigned address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
__device__ float load(const float* pointer) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address(pointer)) : "memory");
  return value;
}
__device__ float load_peer(const float* pointer) {
  float value;
  asm volatile("{.reg .b32 peer; mapa.shared::cluster.u32 peer, %1, 1; ld.shared::cluster.f32 %0, [peer];}"
               : "=f"(value) : "r"(address(pointer)) : "memory");
  return value;
}
__device__ void init(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barrier)) : "memory");
}
__device__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(barrier)) : "memory");
}
"""

KERNEL = """
#include "ptx/tiny.cuh"
extern "C" __global__ void __launch_bounds__(NUM_THREADS) tiny(float* out, int n) {
  __shared__ float stage[128];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) init(&barrier);
  stage[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  float value = 0;
  BODY
  out[threadIdx.x] = value;
}
"""

#: For each test: the code in place of BODY, and the opcodes of each expected pair (arrival, load).
COMPILED = {
    "open": ("value = load(stage + n); arrive(&barrier);", [("SYNCS", "LDS")]),
    "consumed": ("value = load(stage + n); if (value != 1.f) arrive(&barrier);", []),
    "open around the loop": (
        """#pragma unroll 1
        for (int i = 0; i < n; ++i) {
          arrive(&barrier);
          *const_cast<volatile float*>(out + i) = value;
          value = load(stage + i);
        }""",
        [("SYNCS", "LDS")],
    ),
    "open on one of two branches": (
        """if (n > 3) {
          __nanosleep(9);
          value = load(stage + n);
        } else {
          out[n] = 3;
        }
        arrive(&barrier);""",
        [("SYNCS", "LDS")],
    ),
    "block": ("value = load(stage + n); __syncthreads();", [("BAR", "LDS")]),
    "cluster": (
        'value = load_peer(stage); asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");'
        'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");',
        [("UCGABAR_ARV", "LD")],
    ),
    "cluster behind a fence": (
        'value = load_peer(stage); asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");'
        'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");',
        [],
    ),
}


@pytest.mark.parametrize(("body", "expected"), COMPILED.values(), ids=COMPILED)
def test_compiled_code(tmp_path: Path, body: str, expected: list[tuple[str, str]]) -> None:
    found = find_in(tmp_path, body)
    assert [(one.early.arrival.family, one.early.load.family) for one in found] == expected
    around = "for (" in body
    assert all((one.early.arrival.address < one.early.load.address) == around for one in found)


def test_both_source_lines_are_told(tmp_path: Path) -> None:
    (found,) = find_in(tmp_path, "value = load(stage + n);\n  arrive(&barrier);")
    assert [line.file for line in found.load_lines] == ["ptx/tiny.cuh", "tiny.cuh"]
    assert "ld.shared.f32" in found.load_lines[0].text
    report = table([found])
    assert "tiny.cuh:10: value = load(stage + n);" in report
    assert "tiny.cuh:11: arrive(&barrier);" in report

    entry = Allowed("t*", "tiny.cuh: arrive(", "tiny.cuh: load(stage", "")
    assert found.is_allowed(entry)
    assert not found.is_allowed(replace(entry, kernel="u*"))
    assert not found.is_allowed(replace(entry, arrival="other.cuh: arrive("))
    assert not found.is_allowed(replace(entry, load="tiny.cuh: arrive("))
    later = replace(found, early=replace(found.early, passed=1))
    assert not later.is_allowed(entry)
    assert later.is_allowed(replace(entry, passed=1))


@pytest.mark.parametrize(("body", "count"), [("value = __ldg(out + n);", 1), ("value = out[n];", 0)])
def test_constant_loads_are_seen(tmp_path: Path, body: str, count: int) -> None:
    (code,) = disassembled(compiled(tmp_path, body)[0]).values()
    assert len(constant_loads(code)) == count


@pytest.mark.parametrize(
    ("before", "ahead"),
    [("WAIT", False), ("if (n > 3) WAIT else WAIT", False), ("", True), ("if (n > 3) WAIT", True)],
)
def test_what_comes_ahead_of_the_wait_is_seen(tmp_path: Path, before: str, ahead: bool) -> None:
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    launch = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); out[n] = 3;'
    (code,) = disassembled(compiled(tmp_path, f"{before.replace('WAIT', wait)} {launch}")[0]).values()
    found = ahead_of_wait(code)
    assert (bool(launches(found)), any(one.is_global for one in found)) == (ahead, ahead)


def find_in(folder: Path, body: str) -> list[Finding]:
    cubins, sources = compiled(folder, body)
    return explain(early_arrivals_of(disassembled(cubins)), cubins, sources)


def compiled(folder: Path, body: str) -> tuple[dict[KernelSpec, bytes], SourceTree]:
    (folder / "ptx").mkdir()
    (folder / "ptx" / "tiny.cuh").write_text(WRAPPERS)
    (folder / "tiny.cuh").write_text(KERNEL.replace("BODY", body))
    sources = SourceTree(folder)
    return {tiny(): compile_kernel(tiny(), sources=sources).cubin}, sources
