"""The engines' layers run on the CPU from their sources, and every stand-in of the tests has a use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import sglang_layers, trim, vllm_layers
from tests.engines.layers import EngineLayers
from tests.engines.sources import skipped, triton

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

RELEASES = [vllm_layers.RELEASE.name, sglang_layers.RELEASE.name]


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy for machines without a package index, which has all that the tests on a GPU load."""
    folder = tmp_path_factory.mktemp("sources")
    trim.copy(folder)
    return folder


@pytest.mark.parametrize("release", RELEASES)
def test_layers_on_the_cpu(release: str, trimmed: Path) -> None:
    changed = {"XDG_CACHE_HOME": str(trimmed), "PIP_NO_INDEX": "1", "PYTHONPATH": str(triton())}
    environment = os.environ | changed
    command = [sys.executable, "-m", "tests.engines.interpreted", release]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_trimmed_copy_is_small(trimmed: Path) -> None:
    sizes = [path.stat().st_size for path in trimmed.rglob("*.py")]
    assert len(sizes) == len(vllm_layers.REAL) + len(sglang_layers.REAL) and sum(sizes) < 10 << 20


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_command_copies_into_a_folder_only(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Path] = []
    monkeypatch.setattr(trim, "copy", copied.append)
    with pytest.raises(SystemExit):
        trim.main(arguments)
    assert copied == []
    trim.main(["sources"])
    assert copied == [Path("sources")]


def test_a_name_without_a_stand_in_is_an_error() -> None:
    layers = EngineLayers(vllm_layers.RELEASE, (), {"vllm.a.b": 3}, absent=("vllm.missing",))
    with layers.active():
        from vllm.a import b, c  # type: ignore[import-not-found]

        assert b == 3 and layers.used == {"vllm.a.b"} and layers.name("vllm.a.c") is c
        with pytest.raises(AssertionError, match=r"vllm\.a\.c is called"):
            c()
        with pytest.raises(AssertionError, match=r"vllm\.a\.c\.d decides"):
            bool(c.d)
        with pytest.raises(ImportError):
            import vllm.missing  # noqa: F401
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
