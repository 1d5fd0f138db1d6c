"""Parameter structs are packed as device code reads them; if the two differ, the kernel does not compile."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest

import moe_fp8
from moe_fp8 import params
from moe_fp8.errors import CompileError
from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.jit.key import kernel_key
from moe_fp8.jit.sources import SourceTree, package_sources
from moe_fp8.problems import (
    GemmProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    Problem,
    QuantizeProblem,
)
from moe_fp8.specs import kernel_spec

KERNELS = Path(moe_fp8.__file__).parent / "kernels"
QUANTIZE = QuantizeProblem(16, 256)
GEMM = GemmProblem("dense", 64, 4096, 7168)
MQA = MqaLogitsProblem(64, 8192, 64, 128)
PAGED = PagedMqaLogitsProblem(1, 1, 64, 128, 64)


def test_fields_lie_where_a_compiler_of_c_puts_them() -> None:
    made = params.ParamStruct("Some", "int a", "TensorMap map", "int b", "pointer p", "int c")
    assert made.offsets == {"a": 0, "map": 64, "b": 192, "p": 200, "c": 208}
    assert made.size == 256
    assert (made.maps, made.pointers, made.addresses) == (((1, 8),), ((3, 25),), (8, 25))
    buffer = bytearray(made.size)
    made.pack_into(buffer, 0, 1, b"m" * 128, 2, 3, 4)
    assert struct.unpack("=i60x128si4xQi", buffer[:212]) == (1, b"m" * 128, 2, 3, 4)


def test_every_kernel_has_its_struct() -> None:
    kernels = {path.stem for path in KERNELS.glob("*.cuh")}
    assert {kernel for kernel in kernels if params.assertions(kernel)} == kernels
    assert params.assertions("tiny") == ""


@pytest.mark.parametrize(
    "problem, file, old, new",
    [
        (QUANTIZE, "quantize_fp8.cuh", "    int m;\n    int k;\n", "    int64_t m;\n    int k;\n"),
        (QUANTIZE, "quantize_fp8.cuh", "    float* scale;\n", "    float* scale;\n    float* more;\n"),
        (QUANTIZE, "common/types.cuh", "kBlockK = 128", "kBlockK = 256"),
        (QUANTIZE, "common/types.cuh", "kBf16 = 0, kFp16 = 1", "kBf16 = 1, kFp16 = 0"),
        # This kernel's own tile is another one: each kernel checks all of them.
        (GEMM, "sched/tile_walk.cuh", "kTokens < 64 ? kTokens : 64", "kTokens < 32 ? kTokens : 32"),
        (GEMM, "gemm/shape.cuh", "kPiecesOf = kWeightRows == 256", "kPiecesOf = kWeightRows > 64"),
        (GEMM, "gemm/shape.cuh", "? kWeightRows / 2 :", "? kWeightRows / 4 :"),
        (GEMM, "gemm/shape.cuh", "kStoredTokens = 16", "kStoredTokens = 8"),
        (GEMM, "mma/fragments.cuh", "kBoxRowsOf = kBlockN % 64 == 0 ? 64 : 32", "kBoxRowsOf = 32"),
        (MQA, "mqa/tile.cuh", "kTokens * kHeads > 128 ? 2 : 1", "kTokens * kHeads > 64 ? 2 : 1"),
        (PAGED, "paged_mqa_logits_fp8.cuh", "kTokens < kBlockKv ? kTokens : kBlockKv", "32"),
    ],
)
def test_device_code_that_differs_does_not_compile(
    tmp_path: Path, problem: Problem, file: str, old: str, new: str
) -> None:
    shutil.copytree(KERNELS, tmp_path / "kernels")
    changed = tmp_path / "kernels" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new))
    with pytest.raises(CompileError, match=r"see params\.py"):
        compile_kernel(kernel_spec(problem), sources=SourceTree(tmp_path / "kernels"))


def test_what_is_asserted_is_a_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kernel_spec(PagedMqaMetadataProblem(1, 1))
    key, whole = kernel_key(spec), package_sources().digest()
    monkeypatch.setattr("moe_fp8.jit.sources.assertions", lambda kernel: "// another fact\n")
    again = SourceTree(KERNELS)
    assert kernel_key(spec, sources=again) != key
    assert again.digest() != whole


def test_assertions_name_every_field() -> None:
    text = params.assertions("gemm_fp8")
    assert re.findall(r"offsetof\(GemmParams, (\w+)\) ==", text) == list(params.GEMM.offsets)


def test_every_kernel_has_a_struct_that_is_checked() -> None:
    kernels = {file.stem for file in Path(params.__file__).parent.joinpath("kernels").glob("*.cuh")}
    assert kernels == set(params._KERNELS)
