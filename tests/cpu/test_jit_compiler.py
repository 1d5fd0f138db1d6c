from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_fp8.errors import CompileError
from moe_fp8.jit import compiler, toolchain
from moe_fp8.jit.compiler import _STACK, _largest, _warnings, compile_kernel
from moe_fp8.jit.key import compile_options, digest, kernel_key
from moe_fp8.jit.sources import SourceTree, _digest, package_sources
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec, write_kernels


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels", "tiny")


def test_compile_reports_resources(kernels: Path) -> None:
    artifact = compile_kernel(spec(), sources=SourceTree(kernels))
    assert artifact.cubin.startswith(b"\x7fELF")
    assert b"tiny" in artifact.cubin
    assert artifact.name == "tiny"
    assert 0 < artifact.registers < 64
    assert artifact.static_smem_bytes == 128
    assert (artifact.spill_bytes, artifact.local_bytes) == (0, 0)
    assert artifact.warnings == ()
    assert artifact.compile_seconds > 0
    assert artifact.key == kernel_key(spec(), sources=SourceTree(kernels))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="folder"):
        SourceTree(tmp_path / "nowhere").digest()


def test_spills_and_local_memory_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "spills.cuh").write_text(
        """
        extern "C" __global__ void __launch_bounds__(1024) spills(float* x, int n) {
          float values[96];
          #pragma unroll
          for (int i = 0; i < 96; ++i) values[i] = x[i * 1024 + threadIdx.x];
          __syncthreads();
          for (int round = 0; round < n; ++round) {
            #pragma unroll
            for (int i = 0; i < 96; ++i) values[i] = values[i] * values[(i * 7 + 1) % 96] + 1.f;
          }
          #pragma unroll
          for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = values[i];
        }
        """
    )
    artifact = compile_kernel(replace(spec("spills"), num_threads=1024), sources=SourceTree(folder))
    assert artifact.registers <= 64
    (stores,), (loads,) = (
        re.findall(rf"(\d+) bytes spill {what}", artifact.log) for what in ("stores", "loads")
    )
    assert artifact.spill_bytes == int(stores) + int(loads) > int(stores) > 0
    assert artifact.local_bytes > 0


def test_a_function_that_is_not_inlined_counts(tmp_path: Path) -> None:
    (tmp_path / "calls.cuh").write_text(
        """
        __device__ __noinline__ float last(const float* x, int n) {
          float values[32];
          for (int i = 0; i < 32; ++i) values[i] = x[i * n];
          for (int i = 0; i < n; ++i) values[values[i] > 0 ? i % 32 : n % 32] += 1.f;
          return values[n % 32];
        }
        extern "C" __global__ void calls(float* x, int n) { x[0] = last(x, n); }
        """
    )
    artifact = compile_kernel(spec("calls"), sources=SourceTree(tmp_path))
    own, called = sorted(map(int, re.findall(r"(\d+) bytes stack frame", artifact.log)))
    assert artifact.local_bytes == called >= 128 > own


def test_the_function_with_the_most_of_something_may_stand_anywhere_in_the_report() -> None:
    reports = [
        f"{stack} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads"
        for stack, spills in ((8, 0), (0, 4), (0, 0))
    ]
    for order in (reports, reports[::-1]):
        assert _largest(_STACK, "\n".join(order)) == (8, 4, 0)


def test_warnings_are_kept_and_logged(kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = (kernels / "tiny.cuh").read_text()
    (kernels / "tiny.cuh").write_text(text.replace("__shared__", "int forgotten = 3;\n  __shared__"))
    artifact = compile_kernel(spec(), sources=SourceTree(kernels))
    assert len(artifact.warnings) == 1
    assert "forgotten" in artifact.warnings[0]
    assert "forgotten" in caplog.text


def test_errors_carry_the_log(kernels: Path) -> None:
    (kernels / "tiny.cuh").write_text('extern "C" __global__ void tiny() { undeclared = 1; }')
    with pytest.raises(CompileError, match="undeclared") as caught:
        compile_kernel(spec(), sources=SourceTree(kernels))
    assert caught.value.name == "tiny"
    assert "undeclared" in caught.value.log


@pytest.mark.parametrize(
    ("log", "told"), [(b"", "NVRTC_ERROR_COMPILATION"), (b"\xff is no UTF-8", "\ufffd is no UTF-8")]
)
def test_a_failure_is_told_whatever_the_log_holds_and_leaves_no_program(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, log: bytes, told: str
) -> None:
    results = toolchain.nvrtc().nvrtcResult
    freed: list[int] = []

    def fill(program: int, buffer: bytearray) -> tuple[object]:
        buffer[:] = log + b"\0"
        return (results.NVRTC_SUCCESS,)

    api = SimpleNamespace(
        nvrtcResult=results,
        nvrtcCreateProgram=lambda *_: (results.NVRTC_SUCCESS, 7),
        nvrtcCompileProgram=lambda *_: (results.NVRTC_ERROR_COMPILATION,),
        nvrtcGetProgramLogSize=lambda program: (results.NVRTC_SUCCESS, len(log) + 1),
        nvrtcGetProgramLog=fill,
        nvrtcDestroyProgram=freed.append,
    )
    monkeypatch.setattr(compiler, "nvrtc", lambda: api)
    with pytest.raises(CompileError, match=told):
        compile_kernel(spec(), sources=SourceTree(kernels))
    assert freed == [7]


def test_no_kernel_comes_from_the_cache_of_nvrtc() -> None:
    """It has no report of registers and spills. Only machines with a driver have this cache."""
    assert "--no-cache" in compile_options(spec())


def test_static_assert_sees_the_launch_facts(kernels: Path) -> None:
    with pytest.raises(CompileError, match="static assertion"):
        compile_kernel(spec(num_threads=33), sources=SourceTree(kernels))


@pytest.mark.parametrize(
    "text",
    [
        "__global__ void tiny() {}",
        'extern "C" __global__ void other() {}',
        'extern "C" __global__ void tiny() {} extern "C" __global__ void other() {}',
        "",
    ],
)
def test_the_symbol_must_be_the_one_kernel(kernels: Path, text: str) -> None:
    (kernels / "tiny.cuh").write_text(text)
    with pytest.raises(CompileError, match="exactly one kernel"):
        compile_kernel(spec(), sources=SourceTree(kernels))


def test_nothing_outside_the_folder_is_included(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ambient.h").write_text("#define AMBIENT 1\n")
    monkeypatch.chdir(tmp_path)
    kernel = (kernels / "tiny.cuh").read_text()
    for include in ('#include "ambient.h"', "#include <ambient.h>", '#define A "ambient.h"\n#include A'):
        (kernels / "tiny.cuh").write_text(f"{include}\n{kernel}")
        with pytest.raises(CompileError, match=r"ambient\.h"):
            compile_kernel(spec(), sources=SourceTree(kernels))
    # Another spelling of a name would be another file, whose text comes twice.
    for name in ("../ambient.h", f"{tmp_path}/ambient.h", "./common/scaled.cuh", "common//scaled.cuh"):
        (kernels / "tiny.cuh").write_text(f'#include "{name}"\n{kernel}')
        with pytest.raises(CompileError, match="plain path"):
            compile_kernel(spec(), sources=SourceTree(kernels))


def test_closure_is_transitive_and_survives_cycles(kernels: Path) -> None:
    (kernels / "common" / "scaled.cuh").write_text('#pragma once\n  #  include "common/deep.cuh"\n')
    (kernels / "common" / "deep.cuh").write_text('#pragma once\n#include "common/scaled.cuh"\n')
    closure = SourceTree(kernels).closure("tiny")
    assert [name for name, _ in closure.files] == ["common/deep.cuh", "common/scaled.cuh", "tiny.cuh"]
    assert closure.text.startswith(b"#include")
    assert [name for name, _ in closure.headers] == ["common/deep.cuh", "common/scaled.cuh"]


def test_key_is_content(kernels: Path, tmp_path: Path) -> None:
    key = kernel_key(spec(), sources=SourceTree(kernels))
    elsewhere = write_kernels(tmp_path / "elsewhere", "tiny", "unrelated")
    assert kernel_key(spec(), sources=SourceTree(elsewhere)) == key

    (elsewhere / "common" / "scaled.cuh").open("a").write("// one byte of a header\n")
    others = {
        kernel_key(spec(), sources=SourceTree(elsewhere)),
        kernel_key(spec(factor=3), sources=SourceTree(kernels)),
        kernel_key(spec(num_threads=256), sources=SourceTree(kernels)),
        kernel_key(spec(smem_bytes=16), sources=SourceTree(kernels)),
        kernel_key(replace(spec(), cluster_size=2), sources=SourceTree(kernels)),
    }
    closure = SourceTree(kernels).closure("tiny")
    others.add(digest(closure, (), (13, 0)))
    others.add(digest(closure, (), (13, 1)))
    others.add(digest(closure, ("-DA=1", "-DB=1"), (13, 0)))
    others.add(digest(closure, ("-DA=1-DB=1",), (13, 0)))
    assert key not in others
    assert len(others) == 9


def test_the_digest_of_a_folder_is_that_of_its_device_code(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle fits a package with the same digest, wherever the package is installed."""
    deep = kernels / "common" / "deep" / "inner.cuh"
    deep.parent.mkdir()
    deep.write_text("// one\n")
    digest = SourceTree(kernels).digest()
    for folder in (kernels, kernels / "common"):
        (folder / "notes.txt").write_text("no device code")
    listed = Path.iterdir
    with monkeypatch.context() as patch:
        # The order of a listing is the file system's.
        for backwards in (False, True):
            patch.setattr(Path, "iterdir", lambda path, to=backwards: iter(sorted(listed(path), reverse=to)))
            assert SourceTree(kernels).digest() == digest
    assert SourceTree(kernels).kernels() == ["tiny"]
    deep.write_text("// two\n")
    assert SourceTree(kernels).digest() != digest


def test_texts_that_are_split_otherwise_have_another_digest() -> None:
    assert _digest([("a.cuh", b"1"), ("b.cuh", b"2")]) != _digest([("a.cuh", b"1b.cuh2")])


def test_kernels_may_be_in_an_archive(kernels: Path, tmp_path: Path) -> None:
    tree = SourceTree(zipfile.Path(shutil.make_archive(str(tmp_path / "archive"), "zip", kernels)))
    folder = SourceTree(kernels)
    assert tree.folder is None and KernelStore(None, tree).location()["kernels"] is None
    assert (tree.kernels(), tree.digest()) == (folder.kernels(), folder.digest())
    assert kernel_key(spec(), sources=tree) == kernel_key(spec(), sources=folder)
    with pytest.raises(CompileError, match=r"absent\.cuh"):
        tree.closure("absent")


def test_a_process_keeps_the_text_it_read_first(kernels: Path) -> None:
    tree = SourceTree(kernels)
    key = kernel_key(spec(), sources=tree)
    tree.closure("tiny")
    (kernels / "tiny.cuh").write_text("broken")
    assert compile_kernel(spec(), sources=tree).key == key


def test_kernels_of_a_process_share_one_version_of_a_header(tmp_path: Path) -> None:
    kernels = write_kernels(tmp_path / "kernels", "tiny", "other")
    tree = SourceTree(kernels)
    (header,) = tree.closure("tiny").headers
    (kernels / "common" / "scaled.cuh").write_text("// edited\n")
    assert tree.closure("other").headers == (header,)


def test_missing_kernel_says_which_file(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"absent\.cuh"):
        compile_kernel(spec("absent"), sources=SourceTree(kernels))


def test_package_kernels_are_readable() -> None:
    closure = package_sources().closure("gemm_fp8")
    assert b'extern "C"' in closure.text
    assert closure.headers


def test_import_loads_neither_torch_nor_cuda() -> None:
    code = (
        "import sys, moe_fp8.jit, moe_fp8.jit.worker\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('torch', 'cuda', 'rich')]\n"
        "assert not loaded, loaded\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
        "assert 'libnvrtc' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_ptxas_remarks_are_warnings_and_its_report_is_not() -> None:
    report = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'tiny' for 'sm_90a'\n"
        "ptxas info    : Function properties for tiny\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
        "ptxas info    : Compile time = 2.220 ms\n"
    )
    remark = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized "
        "due to insufficient register resources for the wgmma pipeline in function 'tiny'"
    )
    assert _warnings(report) == ()
    assert _warnings(f"{remark}\n{report}") == (remark,)
    assert _warnings(f"{report}ptxas warning : something") == ("ptxas warning : something",)
