"""The module in the place of `deep_gemm`: names, semantics, and what goes to the engine's own copy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
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
from tests import cases
from tests.gemm_addend_cases import named_case
from tests.k_grouped_cases import check, flat_operands, k_grouped_case

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


@pytest.fixture
def deep_gemm() -> ModuleType:
    return integrations.install()


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The engine's own copy, which records calls of any name it has."""
    module = ModuleType("vllm.third_party.deep_gemm")
    module.calls = []  # type: ignore[attr-defined]
    for name in (
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_masked",
        *GEMMS[4:],
        "fp8_mqa_logits",
        "einsum",
        "set_num_sms",
    ):
        setattr(module, name, lambda *given, name=name, **named: module.calls.append((name, given, named)))
    for parent in ("vllm", "vllm.third_party"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", module)
    vendored.forget()
    return module


def test_a_copy_that_comes_after_the_first_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    vendored.forget()
    assert vendored.find() is None
    copy = ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", copy)
    integrations.install()
    assert vendored.find() is copy
    integrations.uninstall()
    assert sys.modules["deep_gemm"] is copy


def test_imports_find_the_module_and_uninstall_restores() -> None:
    assert importlib.util.find_spec("deep_gemm") is None
    module = integrations.install()
    assert integrations.installed() == ("dense", "experts", "indexer")
    assert importlib.import_module("deep_gemm") is module
    assert importlib.util.find_spec("deep_gemm") is not None
    layout = importlib.import_module("deep_gemm.utils.layout")
    assert layout.get_mn_major_tma_aligned_tensor is module.get_mn_major_tma_aligned_tensor
    assert importlib.import_module("deep_gemm.utils").ceil_div(5, 4) == 2
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
    }
    for name, source in sources.items():
        file = tmp_path / "deep_gemm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return integrations.install()


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
    with pytest.raises(ModuleNotFoundError, match=r"deep_gemm\.nothing"):
        importlib.import_module("deep_gemm.nothing")
    finders = len(sys.meta_path)
    integrations.uninstall()
    assert len(sys.meta_path) == finders - 1
    assert not [name for name in set(sys.modules) - before if name.startswith("deep_gemm")]
    assert not {"testing", "late"} & set(vars(installed_copy)) and "dist" not in vars(installed_copy.utils)


def test_the_copy_gets_the_alignment(installed_copy: ModuleType) -> None:
    given = vendored.lookup("given")
    try:
        for value in (128, 64, 64):
            installed_copy.set_mk_alignment_for_contiguous_layout(value)
    finally:
        installed_copy.set_mk_alignment_for_contiguous_layout(128)
    assert given == [64, 128]


def test_names_that_nobody_has_are_absent(deep_gemm: ModuleType) -> None:
    for name in ("einsum", "fp8_mega_moe", "tf32_hc_prenorm_gemm", "__wrapped__"):
        assert getattr(deep_gemm, name, None) is None
    with pytest.raises(AttributeError, match="no attribute 'einsum'"):
        _ = deep_gemm.einsum
    assert getattr(deep_gemm.utils, "nothing", None) is None


def test_unknown_names_reach_the_copy(copy: ModuleType, deep_gemm: ModuleType) -> None:
    deep_gemm.einsum(1, out=2)
    assert copy.calls == [("einsum", (1,), {"out": 2})]


def test_kinds_that_are_not_served_reach_the_copy(copy: ModuleType) -> None:
    module = integrations.install(["experts"])
    assert module.fp8_gemm_nt is copy.fp8_gemm_nt and module.fp8_mqa_logits is copy.fp8_mqa_logits
    assert module.m_grouped_fp8_gemm_nt_masked is not copy.m_grouped_fp8_gemm_nt_masked
    assert getattr(module, "fp8_paged_mqa_logits", None) is None
    with pytest.raises(ConfigError, match="dense, experts, indexer"):
        integrations.install(["moe"])


def test_dense(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(33, 192, 256)
    for scale in (case.a_scale, case.a_scale.contiguous()):
        out = case.poisoned()
        assert (
            deep_gemm.fp8_gemm_nt((case.a, scale), (case.b, case.b_scale), out, None, (1, 128, 128)) is None
        )
        cases.check_gemm(case, out)


@pytest.mark.parametrize("in_place", [False, True])
def test_dense_accumulates(in_place: bool, deep_gemm: ModuleType) -> None:
    case = cases.dense_case(9, 128, 256)
    added = torch.randn(9, 128)
    out = added.clone() if in_place else torch.empty(9, 128)
    c = out if in_place else added
    deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), out, c=c)
    product = moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out_dtype=torch.float32)
    assert torch.equal(out, product + added)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": (1, 1, 32)}, "of b of 128 x 128"),
        ({"alpha": 2.0}, "alpha"),
        ({"c": torch.zeros(9, 128, dtype=torch.bfloat16)}, "c is added in fp32"),
    ],
)
def test_dense_calls_that_are_not_served(
    changes: dict[str, Any], reason: str, copy: ModuleType, deep_gemm: ModuleType
) -> None:
    case = cases.dense_case(9, 128, 256)
    given = (case.a, case.a_scale), (case.b, case.b_scale), torch.empty(9, 128)
    deep_gemm.fp8_gemm_nt(*given, **changes)
    assert [call[0] for call in copy.calls] == ["fp8_gemm_nt"]
    del copy.fp8_gemm_nt
    with pytest.raises(UnsupportedError, match=reason):
        deep_gemm.fp8_gemm_nt(*given, **changes)


@pytest.mark.parametrize("recipes", [{"recipe": (1, 1, 128)}, {"recipe_a": (1, 128), "recipe_b": (1, 128)}])
def test_dense_with_scales_of_rows(recipes: dict[str, Any], deep_gemm: ModuleType) -> None:
    case = named_case("dense of rows", (33,), 192, 256)
    added = torch.randn(33, 192)
    for scale in (case.b_scale, case.b_scale.contiguous()):
        out = case.poisoned(torch.float32)
        deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, scale), out, **recipes)
        cases.check_gemm(case, out)
        total = added.clone()
        deep_gemm.fp8_gemm_nt(
            (case.a, case.a_scale), (case.b, scale), total, c=total.view(33, 192), **recipes
        )
        assert torch.equal(total, out + added)


@pytest.mark.parametrize("recipe", [None, (1, 128, 128), (1, 1, 128)])
def test_scales_have_the_shape_of_the_recipe(recipe: Any, deep_gemm: ModuleType) -> None:
    case = named_case("dense" if recipe == (1, 1, 128) else "dense of rows", (5,), 192, 256)
    with pytest.raises(ArgumentError, match="by the recipe"):
        deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), case.poisoned(), recipe=recipe)


@pytest.mark.parametrize("sizes", [(256, 0, 128, 384), (0, 128), (0, 0)])
@pytest.mark.parametrize("addend", ["none", "other", "itself", "view"])
def test_ragged_k(addend: str, sizes: tuple[int, ...], deep_gemm: ModuleType) -> None:
    case = k_grouped_case(sizes, 36, 192)
    a, b = flat_operands(case, row_major=addend == "other")
    c = case.addend()
    out = c.clone() if addend in ("itself", "view") else case.poisoned()
    given = {"none": None, "other": c, "itself": out, "view": out.view(out.shape)}[addend]
    layout = torch.tensor(sizes, dtype=torch.int32)
    assert deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, list(sizes), layout, given) is None
    check(case, out, None if addend == "none" else c)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": (1, 1, 32)},
        {"use_psum_layout": True},
        {"ks_cpu": None},
        {"ks_cpu": [64, 320]},
        {"epilogue": 1},
    ],
)
def test_ragged_k_that_is_not_served(
    changes: dict[str, Any], copy: ModuleType, deep_gemm: ModuleType
) -> None:
    case = k_grouped_case((128, 256), 36, 64)
    a, b = flat_operands(case)
    given = {"ks_cpu": [128, 256], "grouped_layout": case.offsets} | changes
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, case.poisoned(), **given)
    assert [call[0] for call in copy.calls] == ["k_grouped_fp8_gemm_nt_contiguous"]


@pytest.mark.parametrize("change", ["a", "b_scale", "ks_cpu"])
def test_ragged_k_that_does_not_fit(change: str, deep_gemm: ModuleType) -> None:
    case = k_grouped_case((128, 256), 36, 64)
    (a, a_scale), (b, b_scale) = flat_operands(case)
    sizes = [128, 128, 128] if change == "ks_cpu" else [128, 256]
    a, b_scale = a[36 * 128 :] if change == "a" else a, b_scale[:, :2] if change == "b_scale" else b_scale
    out = case.addend()
    before = out.clone()
    with pytest.raises(ArgumentError):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, sizes, case.offsets, out)
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    "form, sizes, argument",
    [((1, 1, 64), [128, 256], "c"), ((2, 36, 64), [512, -128], "ks_cpu")],
)
def test_ragged_k_of_wrong_forms_leaves_the_output(
    form: tuple[int, ...], sizes: list[int], argument: str, deep_gemm: ModuleType
) -> None:
    case = k_grouped_case((128, 256), 36, 64)
    a, b = flat_operands(case)
    out = case.addend()
    before = out.clone()
    with pytest.raises(ArgumentError) as caught:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, sizes, case.offsets, torch.ones(form))
    assert caught.value.argument == argument
    assert torch.equal(out, before)


@pytest.mark.parametrize("recipe", [None, (1, 1, 128)])
def test_a_sum_of_nothing(recipe: Any, deep_gemm: ModuleType) -> None:
    a = torch.zeros(4, 0, dtype=torch.float8_e4m3fn), torch.ones(4, 0)
    b = torch.zeros(64, 0, dtype=torch.float8_e4m3fn), torch.ones(64 if recipe else 1, 0)
    out, c = torch.ones(4, 64), torch.randn(4, 64)
    deep_gemm.fp8_gemm_nt(a, b, out, c=out, recipe=recipe)
    assert torch.equal(out, torch.ones(4, 64))
    deep_gemm.fp8_gemm_nt(a, b, out, c=c, recipe=recipe)
    assert torch.equal(out, c)
    deep_gemm.fp8_gemm_nt(a, b, out, recipe=recipe)
    assert not out.any()


def test_a_k_that_128_does_not_divide_is_not_served(deep_gemm: ModuleType) -> None:
    a = torch.zeros(4, 576, dtype=torch.float8_e4m3fn), torch.ones(4, 5)
    b = torch.zeros(64, 576, dtype=torch.float8_e4m3fn), torch.ones(1, 5)
    with pytest.raises(UnsupportedError, match="K is a multiple of 128, got 576"):
        deep_gemm.fp8_gemm_nt(a, b, torch.empty(4, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
def test_contiguous(layout: str, deep_gemm: ModuleType) -> None:
    case = cases.contiguous_case(layout, (3, 0, 130, 1), 128, 256)
    out = case.poisoned()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (case.a, case.a_scale), (case.b, case.b_scale), out, case.index, use_psum_layout=layout == "psum",
        expected_m_for_psum_layout=7, disable_ue8m0_cast=True,
    )  # fmt: skip
    cases.check_gemm(case, out)


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
def test_zero_padding_on_request(layout: str, deep_gemm: ModuleType) -> None:
    case = cases.contiguous_case(layout, (3, 0, 130, 1), 128, 256)
    operands = (case.a, case.a_scale), (case.b, case.b_scale)
    expected = case.poisoned()
    for given in ({}, {"ensure_zero_padding": False}):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            *operands, expected, case.index, use_psum_layout=layout == "psum", **given
        )
    padding = expected.isnan()
    assert padding.any() and not padding.all()
    out = case.poisoned()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        *operands, out, case.index, use_psum_layout=layout == "psum", ensure_zero_padding=True
    )
    assert torch.equal(out, expected.masked_fill(padding, 0))


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
@pytest.mark.parametrize("alignment", [16, 64, 256])
def test_contiguous_with_another_alignment(alignment: int, layout: str, deep_gemm: ModuleType) -> None:
    counts, rows, index, ends = (3, 0, 70, 1), 0, [], []
    for expert, count in enumerate(counts):
        ends.append(rows + count)
        padded = -(-count // alignment) * alignment
        index += [expert] * count + [-1] * (padded - count)
        rows += padded
    gen = cases.generator(3, "cpu")
    a, a_scale = cases.activations(rows, 256, gen)
    b, b_scale = cases.weights(4, 128, 256, gen)
    out = torch.full((rows, 128), float("nan"), dtype=torch.bfloat16)
    given = torch.tensor(ends if layout == "psum" else index, dtype=torch.int32)
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (b, b_scale), out, given, use_psum_layout=layout == "psum", ensure_zero_padding=True
        )
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    assert not out[torch.tensor(index) < 0].any()
    for expert in range(4):
        own = torch.tensor(index) == expert
        expected = moe_fp8.gemm_fp8(a[own], a_scale[own], b[expert], b_scale[expert])
        assert torch.equal(out[own], expected)
    with pytest.raises(ArgumentError):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


def test_masked(copy: ModuleType, deep_gemm: ModuleType) -> None:
    case = cases.masked_case((3, 0, 9), 16, 128, 256)
    for name in ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"):
        out = case.poisoned()
        operands = (case.a, case.a_scale), (case.b, case.b_scale), out
        getattr(deep_gemm, name)(*operands, masked_m=case.index, expected_m=4)
        cases.check_gemm(case, out)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(*operands, case.index, 4, enable_overlap=True, signal=case.index)
    assert [call[0] for call in copy.calls] == ["m_grouped_fp8_gemm_nt_masked"]


def test_logits_in_every_spelling(deep_gemm: ModuleType) -> None:
    case = cases.mqa_case(6, 40, 32)
    q, k, k_scale, weights, ks, ke = case.arguments()
    outside = (torch.arange(40) < ks[:, None]) | (torch.arange(40) >= ke[:, None])
    full = moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, fill=True)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke), full)
    cleaned = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=True)
    assert torch.equal(cleaned, full)
    plain = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, clean_logits=False)
    assert torch.equal(plain[~outside], full[~outside])
    # vLLM 0.33 passes a width in the sixth place.
    width = int((ke - ks).max())
    compressed = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, width)
    assert compressed.shape == (6, width) and compressed.dtype is torch.float32
    for row in range(6):
        own = full[row, ks[row] : ke[row]]
        assert torch.equal(compressed[row, : len(own)], own)
    # By keyword too, compressed rows are not cleaned unless the caller asks for it.
    named = {"max_seqlen_k": width}
    marked = moe_fp8.mqa_logits_fp8(q, k, k_scale, weights, ks, ke, max_seqlen_k=width, fill=True)
    cleaned = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, True, **named)
    assert torch.equal(cleaned, marked)
    plain = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, **named)
    inside = torch.arange(width) < (ke - ks)[:, None]
    assert torch.equal(plain[inside], marked[inside])
    with pytest.raises(UnsupportedError, match="queries with scales"):
        deep_gemm.fp8_fp4_mqa_logits((q, weights), (k, k_scale), weights, ks, ke, width)


def test_the_copy_may_have_the_newer_spelling_alone(copy: ModuleType, deep_gemm: ModuleType) -> None:
    case = cases.mqa_case(6, 40, 32)
    q, k, k_scale, weights, ks, ke = case.arguments()
    copy.fp8_fp4_mqa_logits = copy.fp8_mqa_logits  # type: ignore[attr-defined]
    del copy.fp8_mqa_logits
    deep_gemm.fp8_fp4_mqa_logits((q, weights), (k, k_scale), weights, ks, ke, 8)
    assert len(copy.calls) == 1 and copy.calls[0][1][-1] == 8


def test_paged_logits(deep_gemm: ModuleType) -> None:
    case = cases.paged_case([3, 0, 130], 2, 32, 64)
    lens = case.context_lens
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    assert metadata.shape == (133, 2)
    columns = 192
    given: tuple[Any, ...] = (case.kv_cache, case.weights, lens, case.block_table, metadata, columns)
    expected = moe_fp8.paged_mqa_logits_fp8(
        case.q, case.kv_cache, case.weights, lens, case.block_table, metadata, max_context_len=columns,
        out=torch.full((6, columns), float("-inf")),
    )  # fmt: skip
    cleaned = deep_gemm.fp8_paged_mqa_logits(case.q, *given, clean_logits=True)
    assert torch.equal(cleaned, expected)
    plain = deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *given)
    written = expected > float("-inf")
    assert torch.equal(plain[written], expected[written])
    for call in (
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *given, indices=lens),
        lambda: deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132, indices=lens),
    ):
        with pytest.raises(UnsupportedError, match="indices"):
            call()


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
    assert transform(rows, 7, 640, recipe_ab=(1, 128)).stride() == (1, 8)
    with pytest.raises(ArgumentError, match=r"fp32 \[3, 2, 4\]"):
        transform(blocks, 200, 512, **weights)
    with pytest.raises(UnsupportedError, match="1 x 32"):
        transform(rows, 7, 160, recipe_ab=(1, 32))


@pytest.mark.parametrize("name", ["dense", "dense of rows"])
def test_only_weights_are_read_early(
    name: str, deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = importlib.import_module("moe_fp8.integrations.deep_gemm.gemm"), []
    monkeypatch.setattr(module, "gemm_fp8", lambda *_, **options: given.append(options["constant_weights"]))
    case = named_case(name, (5,), 192, 256)
    recipe = (1, 1, 128) if name == "dense of rows" else None
    strided = torch.stack([case.b_scale, case.b_scale], -1)[..., 0]  # another kernel makes it contiguous
    deep_gemm.set_pdl(True)
    try:
        for scale in (case.b_scale, strided):
            deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, scale), case.poisoned(), recipe=recipe)
    finally:
        deep_gemm.set_pdl(False)
    assert given == [name == "dense", False]


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
