"""The runner of DeepGEMM's published tests, on scripts and a copy that this test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import published

_COPY = {
    "__init__": "from . import testing\ndef einsum(x): return x",
    "testing/__init__": "import os\ndef timings_are_off(): return 'DG_USE_NVIDIA_TOOLS' in os.environ",
}

_LISTS = """
def enumerate_sizes():
    yield from (1, 2, 3, 4, 5)

def enumerate_parts(size):
    yield from range(size)

def enumerate_broken():
    raise ValueError("no list")
    yield 1
"""

_SCRIPT = """
import deep_gemm
from deep_gemm.testing import timings_are_off
from deep_gemm.utils import get_mn_major_tma_aligned_tensor
import torch
from lists import enumerate_sizes, enumerate_parts, enumerate_broken

def sample_cases(cases):
    return cases

def test_sizes():
    for size in enumerate_sizes():
        assert timings_are_off()
        assert [deep_gemm.einsum(part) for part in enumerate_parts(size)] == list(range(size))
        assert size != 4, f"{size=}"

def test_layouts():
    for rows in sample_cases([3, 8]):
        assert get_mn_major_tma_aligned_tensor(torch.ones(rows, 2)).stride(0) == 1

def test_alone():
    assert deep_gemm.einsum(3) == 3

def test_broken():
    for size in enumerate_broken():
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in _COPY.items():
        file = tmp_path / "peer" / "deep_gemm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/lists.py").write_text(_LISTS)
    (tmp_path / "scripts/test_some.py").write_text(_SCRIPT)
    return tmp_path


def _run(folder: Path, *options: str) -> int:
    places = [str(folder / "scripts"), "--peer", str(folder / "peer"), "--logs", str(folder / "logs")]
    return published.main([*places, "--scripts", "test_some", *options])


def test_each_case_is_reported_with_who_served_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "--shards", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    said = {line.split(":")[0]: line for line in lines if line.startswith("test_some.")}
    assert "4 of 5 cases passed, 0 of 5 by our" in said["test_some.test_sizes"]
    assert "2 of 2 cases passed, 2 of 2 by our" in said["test_some.test_layouts"]
    assert "1 of 1 cases passed, 0 of 1 by our" in said["test_some.test_alone"]
    assert "    sent on to the copy: einsum 15" in lines
    assert "    served by our kernels: get_mn_major_tma_aligned_tensor 2" in lines
    failed = [line for line in lines if "FAILED" in line]
    assert "case 3: AssertionError: size=4" in failed[0]
    # A list that fails is reported by each process, and ends its function.
    assert len(failed) == 3 and all("ValueError: no list" in line for line in failed[1:])
    assert lines[-1] == "7 cases passed, 3 failed, 0 processes in trouble"


def test_a_part_of_the_cases(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "--every", "2", "--only", "test_sizes", "test_alone") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 cases passed, 0 failed, 0 processes in trouble"


def test_a_script_that_cannot_be_imported_is_trouble(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "scripts/test_some.py").write_text("import no_such_module")
    assert _run(folder) == 1
    assert "TROUBLE test_some, shard 0: exit code 1: ModuleNotFoundError" in capsys.readouterr().out


def test_a_folder_without_the_copy_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _run(folder, "--peer", str(folder / "scripts"))
    assert "scripts has neither deep_gemm/ nor deep_gemm.zip" in capsys.readouterr().err
