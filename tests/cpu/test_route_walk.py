"""route_walk.cpp runs the kernel of route_topk on the host, with the cases of the op."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_fp8.problems import RouteTopkProblem
from moe_fp8.specs import KernelSpec, kernel_spec
from tests import route_cases
from tests.cpu import host_program

THREADS, BLOCKS = 64, 2


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> route_cases.Route:
    """The kernel on the host, compiled once for each of its forms.

    Its file has the host's integers, shared memory and PTX instead of the device's.
    """
    folder = tmp_path_factory.mktemp("route")
    _sources(folder)
    return _run_on_host(folder)


def _sources(folder: Path) -> None:
    host_program.copy_headers(folder)
    entry = host_program.entry("route_topk", 1)
    for instruction, instead in (("cvt.f32.f16", "value = 0.0f;"), ("rcp.approx.f32", "result = 1.0f / x;")):
        entry, count = re.subn(rf'asm\("{re.escape(instruction)}.*\);', instead, entry)
        assert count == 1
    (folder / "route_topk.cuh").write_text(entry)


def _run_on_host(folder: Path) -> route_cases.Route:
    @cache
    def program(spec: KernelSpec) -> Path:
        defines = {**dict(spec.defines), "NUM_THREADS": THREADS, "CLUSTER_SIZE": 1, "SMEM_BYTES": 0}
        built = host_program.build("route_walk", folder, defines)
        return built.rename(folder / f"route_walk{len(list(folder.iterdir()))}")

    def run(case: route_cases.Case, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        in_dtype = str(logits.dtype).removeprefix("torch.")
        spec = kernel_spec(RouteTopkProblem(len(logits), case.experts, case.topk, in_dtype))
        wide = case.ids_dtype is torch.int64
        options = (case.scoring == "softmax", case.renormalize, wide, bias is not None, BLOCKS)
        sizes = (len(logits), case.experts, case.topk, case.groups, case.kept, *options)
        given, made = folder / "given", folder / "made"
        data = struct.pack("=10if", *sizes, case.scaling) + bytes(logits.view(torch.uint8).flatten().tolist())
        if bias is not None:
            data += bytes(bias.view(torch.uint8).tolist())
        given.write_bytes(data)
        host_program.execute(program(spec), given, made)
        count = len(logits) * case.topk
        written = bytearray(made.read_bytes())
        weights = torch.frombuffer(written, dtype=torch.float32, count=count)
        ids = torch.frombuffer(written, dtype=case.ids_dtype, count=count, offset=4 * count)
        return weights.view(-1, case.topk), ids.view(-1, case.topk)

    return run


@host_program.needs_compiler
@pytest.mark.parametrize(
    "name", [name for name, case in route_cases.CASES.items() if case.dtype is not torch.float16]
)
def test_the_kernel_chooses_what_float64_chooses(on_host: route_cases.Route, name: str) -> None:
    case = route_cases.CASES[name]
    route_cases.check(replace(case, tokens=min(case.tokens, 23)), on_host)


@host_program.needs_compiler
def test_equal_and_undefined_logits(on_host: route_cases.Route) -> None:
    route_cases.check_odd(on_host)
    route_cases.check_equal_groups(on_host)
