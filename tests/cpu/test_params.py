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
from moe_fp8.problems import PagedMqaMetadataProblem, QuantizeProblem
from moe_fp8.specs import kernel_spec

KERNELS = Path(moe_fp8.__file__).parent / "kernels"
QUANTIZE = kernel_spec(QuantizeProblem(16, 256))


def test_fields_lie_where_a_compiler_of_c_puts_them() -> None:
    made = params.ParamStruct("Some", "int a", "TensorMap map", "int b", "pointer p", "int c")
    assert made.offsets == {"a": 0, "map": 64, "b": 192, "p": 200, "c": 208}
    assert made.size == 256
    buffer = bytearray(made.size)
    made.pack_into(buffer, 0, 1, b"m" * 128, 2, 3, 4)
    assert struct.unpack("=i60x128si4xQi", buffer[:212]) == (1, b"m" * 128, 2, 3, 4)


def test_every_kernel_has_its_struct() -> None:
    kernels = {path.stem for path in KERNELS.glob("*.cuh")}
    assert {kernel for kernel in kernels if params.assertions(kernel)} == kernels
    assert params.assertions("tiny") == ""


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("quantize_fp8.cuh", "    int m;\n    int k;\n", "    int64_t m;\n    int k;\n"),
        ("quantize_fp8.cuh", "    float* scale;\n", "    float* scale;\n    float* more;\n"),
        ("common/types.cuh", "kBlockK = 128", "kBlockK = 256"),
    ],
)
def test_device_code_that_differs_does_not_compile(tmp_path: Path, file: str, old: str, new: str) -> None:
    shutil.copytree(KERNELS, tmp_path / "kernels")
    changed = tmp_path / "kernels" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new))
    with pytest.raises(CompileError, match=r"see params\.py"):
        compile_kernel(QUANTIZE, sources=SourceTree(tmp_path / "kernels"))


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
