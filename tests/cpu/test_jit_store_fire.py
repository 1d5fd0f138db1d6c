"""The store under stress: many processes, kills, full disks, damage, two versions."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec, write_kernels

_ROOT = Path(__file__).parents[2]
_FACTORS = (2, 3, 4, 5)

#: A user without rights, for a process that root starts.
NOBODY = 65534

#: A program that gets every kernel through a runtime with a fake driver. It prints keys, counters and
#: warnings.
_SERVE = """
import json, logging, os, sys
from pathlib import Path
from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.jit.runtime import KernelRuntime
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.store import KernelStore
from tests.cpu.jit_kernels import spec
warnings = []
class Keep(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())
logging.getLogger("moe_fp8").addHandler(Keep(logging.WARNING))
cache, kernels, factors, started, user = sys.argv[1:]
if int(user) != os.geteuid():
    # Permissions do not hold for root. What only root may read is loaded before.
    compile_kernel(spec(), sources=SourceTree(Path(kernels)))
    os.setresuid(int(user), int(user), int(user))
store = KernelStore(cache, SourceTree(Path(kernels)))
specs = [spec(factor=factor) for factor in json.loads(factors)]
if started:
    print("started", flush=True)
    sys.stdin.readline()
runtime = KernelRuntime(store, lambda artifact, smem, threads: artifact)
for one in specs:
    assert runtime.get_kernel(one).cubin.startswith(b"\\x7fELF")
    assert runtime.get_kernel(one).key == store.key(one)
told = runtime.counters()
told = {"compiles": told.compiles, "store_hits": told.store_hits, "loads": told.loads}
print(json.dumps({**told, "keys": [store.key(one) for one in specs], "warnings": warnings}))
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels", "tiny")


def start(
    cache: Path,
    kernels: Path,
    factors: tuple[int, ...] = _FACTORS,
    *,
    wait: bool = False,
    user: int | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    arguments = (cache, kernels, json.dumps(factors), "1" * wait, os.geteuid() if user is None else user)
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE, *map(str, arguments)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=preexec_fn,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate("go\n", timeout=180)
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def serve(cache: Path, kernels: Path, factors: tuple[int, ...] = _FACTORS, **options: Any) -> dict[str, Any]:
    return finish(start(cache, kernels, factors, **options))


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_sixteen_cold_processes_compile_each_kernel_once(tmp_path: Path, kernels: Path) -> None:
    cache = tmp_path / "cache"
    # Each process begins with another kernel, so that all kernels are wanted at once.
    turns = [_FACTORS[n % 4 :] + _FACTORS[: n % 4] for n in range(16)]
    processes = [start(cache, kernels, turn, wait=True) for turn in turns]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [finish(process) for process in processes]
    assert sum(each["compiles"] for each in told) == len(_FACTORS)
    assert sum(each["store_hits"] for each in told) == 15 * len(_FACTORS)
    assert {each["loads"] for each in told} == {len(_FACTORS)}
    assert [each["warnings"] for each in told] == [[]] * 16
    keys = set(told[0]["keys"])
    assert {path.stem for path in cache.glob("*.kernel")} == keys
    assert files(cache) == sorted(f"{key}.{kind}" for key in keys for kind in ("kernel", "lock"))


def test_kills_at_any_moment_leave_nothing_that_blocks(tmp_path: Path, kernels: Path) -> None:
    cache = tmp_path / "cache"
    cold = time.monotonic()
    serve(tmp_path / "other", kernels)
    # The kills range from before the first kernel is compiled until after the last kernel is written.
    cold = time.monotonic() - cold
    for turn in range(12):
        process = start(cache, kernels)
        time.sleep(cold * turn / 11)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    began = time.monotonic()
    told = serve(cache, kernels)
    assert time.monotonic() - began < 10 * cold + 10, "waited for a lock of the dead"
    assert told["warnings"] == []
    assert told["compiles"] + told["store_hits"] == len(_FACTORS)
    assert {path.stem for path in cache.glob("*.kernel")} == set(told["keys"])
    again = serve(cache, kernels)
    assert (again["compiles"], again["store_hits"]) == (0, len(_FACTORS))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _text(path: Path) -> None:
    path.write_bytes(b"\x7fELF, but no kernel of ours")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(data)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("damage", [_flip, _truncate, _text])
def test_damage_costs_one_compile(tmp_path: Path, kernels: Path, damage: Callable[[Path], None]) -> None:
    cache = tmp_path / "cache"
    key = serve(cache, kernels)["keys"][1]
    whole = (cache / f"{key}.kernel").stat().st_size
    damage(cache / f"{key}.kernel")
    told = serve(cache, kernels)
    assert (told["compiles"], told["store_hits"]) == (1, len(_FACTORS) - 1)
    (warning,) = set(told["warnings"])
    assert key in warning and "damaged" in warning
    again = serve(cache, kernels)
    assert (again["compiles"], again["warnings"]) == (0, [])
    assert abs((cache / f"{key}.kernel").stat().st_size - whole) < 64


@pytest.mark.parametrize("obstacle", [_folder, _link])
def test_what_is_no_file_costs_one_warning(
    tmp_path: Path, kernels: Path, obstacle: Callable[[Path], None]
) -> None:
    cache = tmp_path / "cache"
    key = serve(cache, kernels)["keys"][1]
    obstacle(cache / f"{key}.kernel")
    told = serve(cache, kernels)
    assert told["compiles"] == 1
    assert len(told["warnings"]) == 1


def test_foreign_files_are_left_alone(tmp_path: Path, kernels: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(0o700)
    for name in ("README", "0" * 32 + ".kernel", "x.tmp", ".nfs0001"):
        (cache / name).write_text("not ours")
    told = serve(cache, kernels)
    assert (told["compiles"], told["warnings"]) == (len(_FACTORS), [])
    for name in ("README", "0" * 32 + ".kernel", "x.tmp", ".nfs0001"):
        assert (cache / name).read_text() == "not ours"


def test_a_full_disk_costs_one_warning(tmp_path: Path, kernels: Path) -> None:
    """No file may grow beyond 512 bytes: writing a kernel fails halfway, as on a full disk."""
    cache = tmp_path / "cache"

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))

    told = serve(cache, kernels, preexec_fn=fill)
    assert (told["compiles"], told["loads"]) == (len(_FACTORS), len(_FACTORS))
    (warning,) = told["warnings"]
    assert "cannot be written" in warning and "kept in memory" in warning
    assert not list(cache.glob("*.tmp")) and not list(cache.glob("*.kernel"))
    assert serve(cache, kernels)["warnings"] == []
    assert len(list(cache.glob("*.kernel"))) == len(_FACTORS)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can reach, in contrast to pytest's own folders."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("place", ["read-only", "missing", "under a file"])
def test_a_folder_that_cannot_be_written_costs_one_warning(public: Path, place: str) -> None:
    kernels = write_kernels(public / "kernels", "tiny")
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    cache = public / "parent" / "cache"
    cache.parent.mkdir()
    if place == "read-only":
        serve(cache, kernels, (2,))
        for path in (*cache.iterdir(), cache):
            os.chown(path, user, -1)
        cache.chmod(0o555)
    elif place == "missing":
        cache.parent.chmod(0o555)
    else:
        cache.write_text("in the way")
        cache = cache / "deeper"
    told = serve(cache, kernels, user=user)
    cache.parent.chmod(0o755)
    (warning,) = told["warnings"]
    assert "MOE_FP8_CACHE_DIR" in warning
    found = place == "read-only"
    assert (told["store_hits"], told["compiles"]) == (found, len(_FACTORS) - found)
    assert told["loads"] == len(_FACTORS)


def test_a_store_of_root_serves_other_users(public: Path) -> None:
    kernels = write_kernels(public / "kernels", "tiny")
    cache = public / "cache"
    serve(cache, kernels)
    told = serve(cache, kernels, user=NOBODY if os.geteuid() == 0 else os.geteuid())
    assert (told["store_hits"], told["compiles"]) == (len(_FACTORS), 0)
    assert not any("cannot be read" in warning for warning in told["warnings"])


def test_two_versions_share_a_folder(tmp_path: Path, kernels: Path) -> None:
    """Two versions of the kernel sources share a folder, in turns and at once, and find only own kernels."""
    cache = tmp_path / "cache"
    newer = write_kernels(tmp_path / "newer", "tiny")
    header = newer / "common" / "scaled.cuh"
    header.write_text(header.read_text().replace("x * FACTOR", "x * FACTOR + 1"))
    processes = [start(cache, folder) for folder in (kernels, newer) * 4]
    told = [finish(process) for process in processes]
    assert sum(each["compiles"] for each in told) == 2 * len(_FACTORS)
    old, new = set(told[0]["keys"]), set(told[1]["keys"])
    assert not old & new
    assert {path.stem for path in cache.glob("*.kernel")} == old | new
    stores = [KernelStore(cache, SourceTree(folder)) for folder in (kernels, newer)]
    artifacts = [store.get_or_compile(spec()) for store in stores]
    assert [hit for _, hit in artifacts] == [True, True]
    assert artifacts[0][0].cubin != artifacts[1][0].cubin
