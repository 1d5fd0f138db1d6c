"""The module in the place of `deep_gemm`: names, semantics, and what goes to the engine's own copy."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8 import integrations
from moe_fp8.errors import ArgumentError, ConfigError, UnsupportedError
from moe_fp8.integrations import vendored
from moe_fp8.ops.modes import Modes

GEMMS = (
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked",
    "k_grouped_fp8_gemm_nt_contiguous",
)
INDEXER = ("fp8_mqa_logits", "fp8_fp4_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    integrations.uninstall()
    moe_fp8.set_num_sms(None)


def test_a_copy_that_comes_after_the_first_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    vendored.forget()
    assert vendored.find() is None
    copy = ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", copy)
    integrations.install()
    assert vendored.find() is copy
    integrations.uninstall()
    assert sys.modules["deep_gemm"] is copy


def test_the_copy_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(vendored, "_shipped", lambda: looked.append(1))
    vendored.forget()
    assert vendored.find() is vendored.find() is None
    assert looked == [1]


def test_imports_find_the_module_and_uninstall_restores() -> None:
    assert importlib.util.find_spec("deep_gemm") is None
    module = integrations.install()
    assert integrations.installed() == ("dense", "experts", "indexer")
    assert importlib.import_module("deep_gemm") is module
    assert importlib.util.find_spec("deep_gemm") is not None
    layout = importlib.import_module("deep_gemm.utils.layout")
    assert layout.get_mn_major_tma_aligned_tensor is module.get_mn_major_tma_aligned_tensor
    assert importlib.import_module("deep_gemm.utils").ceil_div(5, 4) == 2
    # Files of ours that DeepGEMM does not have are not found under its name.
    assert importlib.util.find_spec("deep_gemm.modes") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_gemm.layout")
    assert all(callable(getattr(module, name)) for name in (*GEMMS, *INDEXER))
    integrations.uninstall()
    assert integrations.installed() == () and importlib.util.find_spec("deep_gemm") is None


def test_an_installed_package_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("deep_gemm")
    theirs.einsum = "theirs"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", theirs)
    module = integrations.install()
    assert sys.modules["deep_gemm"] is module and module.einsum == "theirs"
    integrations.uninstall()
    assert sys.modules["deep_gemm"] is theirs


def test_a_package_that_is_blocked_stays_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    integrations.install()
    assert vendored.find() is None
    integrations.uninstall()
    assert sys.modules["deep_gemm"] is None


@pytest.fixture
def installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package `deep_gemm` on the path, behind our module; its `late` imports itself by its own name."""
    sources = {
        "__init__": "from . import testing\n"
        "given = []\n"
        "set_mk_alignment_for_contiguous_layout = given.append",
        "testing/__init__": "from . import bench\nfrom .bench import *",
        "testing/bench": "def bench_kineto(): return 1",
        "utils/__init__": "from . import math",
        "utils/math": "theirs = 1",
        "utils/dist": "def init_dist(): return 2",
        "late": "import deep_gemm\n"
        "from deep_gemm.testing.bench import bench_kineto\n"
        "assert deep_gemm.given == []",
        "lacking": "import a_library_that_is_not_there",
    }
    for name, source in sources.items():
        file = tmp_path / "deep_gemm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return integrations.install()


def test_headers_are_found_beside_the_installed_package(installed_copy: ModuleType, tmp_path: Path) -> None:
    """SGLang takes them from the folder of the file that `find_spec` tells."""

    def origin(name: str) -> Path:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        return Path(spec.origin)

    assert origin("deep_gemm") == tmp_path / "deep_gemm/__init__.py"
    integrations.uninstall()
    assert origin("moe_fp8.integrations.deep_gemm") == Path(str(installed_copy.__file__))


def test_modules_that_are_not_ours_come_from_the_copy(installed_copy: ModuleType) -> None:
    before = set(sys.modules)
    testing = importlib.import_module("deep_gemm.testing")
    bench = importlib.import_module("deep_gemm.testing.bench")
    assert testing.bench is bench and testing.bench_kineto() == 1
    # A name of a module gives the same object as its import.
    assert installed_copy.testing is testing is vendored.lookup("testing")
    assert importlib.import_module("deep_gemm.late").bench_kineto is bench.bench_kineto
    assert importlib.import_module("deep_gemm.utils.dist").init_dist() == 2
    # Ours stay in their places.
    assert sys.modules["deep_gemm"] is installed_copy
    assert importlib.import_module("deep_gemm.utils.math").align(5, 4) == 8
    assert importlib.import_module("deep_gemm.utils.math").theirs == 1
    for name, told in (("nothing", r"deep_gemm\.nothing"), ("lacking", "a_library_that_is_not_there")):
        with pytest.raises(ModuleNotFoundError, match=told):
            importlib.import_module(f"deep_gemm.{name}")
    finders = len(sys.meta_path)
    integrations.uninstall()
    assert len(sys.meta_path) == finders - 1
    assert not [name for name in set(sys.modules) - before if name.startswith("deep_gemm")]
    assert not {"testing", "late"} & set(vars(installed_copy)) and "dist" not in vars(installed_copy.utils)


def test_uninstall_leaves_what_was_imported_without_us(installed_copy: ModuleType) -> None:
    importlib.import_module("deep_gemm.testing")
    integrations.uninstall()
    theirs = importlib.import_module("deep_gemm.testing")
    try:
        integrations.install()
        integrations.uninstall()
        assert sys.modules["deep_gemm.testing"] is theirs
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deep_gemm"]:
            del sys.modules[name]


def test_an_installed_package_is_taken_before_the_one_that_vllm_ships(
    copy: ModuleType, installed_copy: ModuleType
) -> None:
    found = vendored.find()
    assert found is not None and found is not copy and found.__name__ == "deep_gemm"


def test_a_kind_may_be_a_text_and_counts_once() -> None:
    integrations.install("indexer")
    assert integrations.installed() == ("indexer",)
    integrations.install(["indexer", "dense", "indexer"])
    assert integrations.installed() == ("indexer", "dense")


def test_an_extension_of_the_installed_package_is_imported_once(
    installed_copy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name only begins like the package's."""
    (tmp_path / "deep_gemm_cpp.py").write_text("")
    (tmp_path / "deep_gemm" / "__init__.py").write_text("import deep_gemm_cpp as extension")
    try:
        assert importlib.import_module("deep_gemm_cpp") is vendored.lookup("extension")
        assert sys.modules["deep_gemm_cpp"] is vendored.lookup("extension")
    finally:
        sys.modules.pop("deep_gemm_cpp", None)


def test_a_copy_of_vllms_that_cannot_be_imported_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep_gemm: ModuleType
) -> None:
    for parent in ("vllm", "vllm.third_party"):
        package = ModuleType(parent)
        package.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, parent, package)
    (tmp_path / "deep_gemm.py").write_text("raise RuntimeError('no CUDA')")
    assert vendored.find() is None and getattr(deep_gemm, "einsum", None) is None
    with pytest.raises(UnsupportedError, match="alpha"):
        pair = torch.zeros(64, 128, dtype=torch.float8_e4m3fn), torch.ones(64, 1)
        deep_gemm.fp8_gemm_nt(pair, pair, torch.zeros(64, 64), alpha=2.0)


def test_uninstall_keeps_a_number_of_sms_that_the_module_did_not_set() -> None:
    moe_fp8.set_num_sms(100)
    integrations.install()
    integrations.uninstall()
    assert Modes.num_sms == 100


def test_the_copy_gets_the_alignment(installed_copy: ModuleType) -> None:
    given = vendored.lookup("given")
    try:
        for value in (128, 64, 64):
            installed_copy.set_mk_alignment_for_contiguous_layout(value)
    finally:
        installed_copy.set_mk_alignment_for_contiguous_layout(128)
    assert given == [64, 128]


@pytest.mark.parametrize("value", [0, -128, True, 128.0, "128", None])
def test_an_alignment_is_a_positive_number(value: Any, deep_gemm: ModuleType) -> None:
    with pytest.raises(ArgumentError, match="value: expected an integer of at least 1"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(value)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


def test_uninstall_ends_the_modes(installed_copy: ModuleType) -> None:
    installed_copy.set_mk_alignment_for_contiguous_layout(64)
    installed_copy.set_pdl(True)
    installed_copy.set_compile_mode(1)
    installed_copy.set_num_sms(16)
    integrations.uninstall()
    assert Modes.launching and Modes.num_sms is None
    module = integrations.install()
    assert not module.get_pdl() and not module.get_compile_mode()
    assert module.get_mk_alignment_for_contiguous_layout() == 128


def test_a_second_uninstall_keeps_a_number_of_sms_that_was_set_since_the_first() -> None:
    integrations.install().set_num_sms(16)
    integrations.uninstall()
    moe_fp8.set_num_sms(8)
    integrations.install()
    integrations.uninstall()
    assert Modes.num_sms == 8


def test_uninstall_ends_the_choice_of_kinds() -> None:
    """Our module is of use under its own name, too."""
    module = integrations.install(["dense"])
    assert not hasattr(module, "fp8_mqa_logits")
    integrations.uninstall()
    assert hasattr(module, "fp8_mqa_logits") and "fp8_mqa_logits" in dir(module)


def test_the_copy_gets_no_mode_of_an_installation_that_has_ended(installed_copy: ModuleType) -> None:
    installed_copy.set_mk_alignment_for_contiguous_layout(64)
    integrations.uninstall()
    integrations.install()
    assert vendored.lookup("given") == []


def test_threads_wait_for_the_copy(installed_copy: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "deep_gemm" / "__init__.py"
    package.write_text("import time\ntime.sleep(0.5)\neinsum = 'theirs'\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: getattr(installed_copy, "einsum", None), range(4)))
    assert found == ["theirs"] * 4


def test_names_that_nobody_has_are_absent(deep_gemm: ModuleType) -> None:
    for name in ("einsum", "fp8_mega_moe", "tf32_hc_prenorm_gemm", "__wrapped__"):
        assert getattr(deep_gemm, name, None) is None
    with pytest.raises(AttributeError, match="no attribute 'einsum'"):
        _ = deep_gemm.einsum
    assert getattr(deep_gemm.utils, "nothing", None) is None


def test_unknown_names_reach_the_copy(copy: ModuleType, deep_gemm: ModuleType) -> None:
    deep_gemm.einsum(1, out=2)
    assert copy.calls == [("einsum", (1,), {"out": 2})]
    copy.__wrapped__ = "theirs"  # type: ignore[attr-defined]
    assert not hasattr(deep_gemm, "__wrapped__")


def test_kinds_that_are_not_served_reach_the_copy(copy: ModuleType) -> None:
    module = integrations.install(["experts"])
    assert module.fp8_gemm_nt is copy.fp8_gemm_nt and module.fp8_mqa_logits is copy.fp8_mqa_logits
    assert module.m_grouped_fp8_gemm_nt_masked is not copy.m_grouped_fp8_gemm_nt_masked
    assert getattr(module, "fp8_paged_mqa_logits", None) is None
    assert "m_grouped_fp8_gemm_nt_masked" in dir(module) and "fp8_paged_mqa_logits" not in dir(module)
    with pytest.raises(ConfigError, match="dense, experts, indexer"):
        integrations.install(["moe"])


@pytest.mark.parametrize(("size", "of_bytes", "aligned"), [(5, 4, 8), (8, 4, 8), (5, 2, 8), (17, 1, 32)])
def test_sizes_are_multiples_of_16_bytes(
    size: int, of_bytes: int, aligned: int, deep_gemm: ModuleType
) -> None:
    assert deep_gemm.get_tma_aligned_size(size, of_bytes) == aligned


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (8, 2), (2, 5, 3), (3, 4, 1)])
def test_scales_get_exact_strides(shape: tuple[int, ...], deep_gemm: ModuleType) -> None:
    scale = torch.randn(shape)
    made = deep_gemm.get_mn_major_tma_aligned_tensor(scale)
    pitch = deep_gemm.get_tma_aligned_size(shape[-2], 4)
    assert made.stride() == ((1, pitch) if len(shape) == 2 else (pitch * shape[-1], 1, pitch))
    assert torch.equal(made, scale) and deep_gemm.get_mn_major_tma_aligned_tensor(made) is made
    with pytest.raises(ArgumentError):
        deep_gemm.get_mn_major_tma_aligned_tensor(scale.half())


def test_required_layouts(deep_gemm: ModuleType) -> None:
    def transform(sf: Tensor, *sizes: int, **named: Any) -> Tensor:
        made: Tensor = deep_gemm.transform_sf_into_required_layout(sf, *sizes, **named)
        return made

    blocks = torch.randn(3, 2, 5)
    weights = {"recipe": (1, 128, 128), "num_groups": 3, "is_sfa": False, "disable_ue8m0_cast": True}
    assert transform(blocks, mn=200, k=640, **weights) is blocks
    rows = torch.randn(7, 5)
    assert transform(rows, 7, 640, (1, 128, 128), is_sfa=True).stride() == (1, 8)  # type: ignore[arg-type]
    assert transform(rows, 7, 640, recipe=(1, 128)).stride() == (1, 8)
    # Two numbers are the granularities of this operand, whatever it is.
    for is_sfa in (True, False, None):
        named = {"num_groups": 3, "is_sfa": is_sfa}
        assert transform(blocks, 200, 640, recipe=(128, 128), **named) is blocks
        assert transform(blocks, 2, 640, recipe=(1, 128), **named).stride() == (20, 1, 4)
    with pytest.raises(ArgumentError, match=r"fp32 \[3, 2, 4\]"):
        transform(blocks, 200, 512, **weights)
    for recipe in ((1, 32), (128, 32), (1, 1, 32), (64, 128), (128,), (1, 128, 128, 1)):
        with pytest.raises(UnsupportedError, match=re.escape(f"got the recipe {recipe}")):
            transform(rows, 7, 160, recipe=recipe)


def test_layouts_that_are_not_served_reach_the_copy(copy: ModuleType, deep_gemm: ModuleType) -> None:
    copy.transform_sf_into_required_layout = lambda *given: given  # type: ignore[attr-defined]
    rows = torch.randn(7, 5)
    given = rows, 7, 160, (1, 32)
    assert deep_gemm.transform_sf_into_required_layout(*given) == given
    served = rows, 7, 640, (1, 128), None, True, False
    assert deep_gemm.transform_sf_into_required_layout(*served, psum_layout=None).stride() == (1, 8)
    given = (*served, torch.zeros(3, dtype=torch.int32))  # type: ignore[assignment]
    assert deep_gemm.transform_sf_into_required_layout(*given)[-1] is given[-1]


def test_modes(copy: ModuleType, deep_gemm: ModuleType) -> None:
    assert deep_gemm.get_pdl() is False and deep_gemm.get_compile_mode() == 0
    deep_gemm.set_pdl(True)
    deep_gemm.set_compile_mode(1)
    deep_gemm.set_num_sms(100)
    try:
        assert deep_gemm.get_pdl() and deep_gemm.get_compile_mode() == 1
        assert moe_fp8.ops.modes.Modes.num_sms == 100  # type: ignore[attr-defined]
        # The copy hears of it when it is loaded.
        deep_gemm.einsum()
        assert ("set_num_sms", (100,), {}) in copy.calls
    finally:
        deep_gemm.set_compile_mode(0)
        deep_gemm.set_pdl(False)
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(8, 128) == 128
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=512, num_groups=4) == 128


def test_the_copy_hears_of_every_mode(copy: ModuleType, deep_gemm: ModuleType) -> None:
    heard: list[tuple[str, Any]] = []
    for name in ("set_pdl", "set_compile_mode"):
        setattr(copy, name, lambda value, name=name: heard.append((name, value)))
    deep_gemm.set_pdl(True)
    deep_gemm.set_compile_mode(1)
    deep_gemm.set_compile_mode(1)
    deep_gemm.einsum()
    deep_gemm.set_compile_mode(0)
    deep_gemm.set_pdl(False)
    assert Modes.launching, "one end is enough for two beginnings"
    assert heard == [("set_pdl", True), ("set_compile_mode", 1), ("set_compile_mode", 0), ("set_pdl", False)]
