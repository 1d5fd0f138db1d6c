"""The GEMMs of the module in the place of `deep_gemm`, and which calls go to the engine's own copy."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import moe_fp8
from moe_fp8.errors import ArgumentError, ContractError, UnsupportedError
from moe_fp8.integrations.deep_gemm import gemm
from tests import cases
from tests.gemm_addend_cases import named_case
from tests.k_grouped_cases import check, flat_operands, k_grouped_case


def test_dense(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(33, 192, 256)
    for scale in (case.a_scale, case.a_scale.contiguous()):
        out = case.poisoned()
        assert (
            deep_gemm.fp8_gemm_nt((case.a, scale), (case.b, case.b_scale), out, None, (1, 128, 128)) is None
        )
        cases.check_gemm(case, out)


def test_without_k_the_output_is_checked(deep_gemm: ModuleType) -> None:
    nothing = torch.empty(4, 0, dtype=torch.float8_e4m3fn), torch.empty(4, 0)
    weights = torch.empty(64, 0, dtype=torch.float8_e4m3fn), torch.empty(1, 0)
    for out in (torch.ones(5, 64), torch.ones(4, 64, dtype=torch.int64)):
        with pytest.raises(ArgumentError, match="d: expected"):
            deep_gemm.fp8_gemm_nt(nothing, weights, out)
        assert (out == 1).all()
    room = torch.zeros(5, 64)
    with pytest.raises(ArgumentError, match="memory"):
        deep_gemm.fp8_gemm_nt(nothing, weights, room[1:], c=room[:4])


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
        ({"recipe": (1, 1, 128), "recipe_a": (1, 128)}, "of b of 128 x 128"),
        ({"recipe_a": (1, 32)}, "scales of a are of 1 x 128"),
        ({"recipe_b": (128, 32)}, "of b of 128 x 128"),
        ({"recipe_a": (1, 32), "recipe_b": (1, 128)}, "scales of a are of 1 x 128"),
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
    assert copy.calls == [("fp8_gemm_nt", given, changes)]
    del copy.fp8_gemm_nt
    with pytest.raises(UnsupportedError, match=reason):
        deep_gemm.fp8_gemm_nt(*given, **changes)


def test_a_sum_in_bf16_is_not_served(copy: ModuleType, deep_gemm: ModuleType) -> None:
    case = cases.dense_case(9, 128, 256)
    given = (case.a, case.a_scale), (case.b, case.b_scale), torch.empty(9, 128, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(*given, c=torch.zeros(9, 128))
    assert [name for name, *_ in copy.calls] == ["fp8_gemm_nt"]


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


@pytest.mark.parametrize("change", ["a", "a of two dimensions", "b_scale", "ks_cpu"])
def test_ragged_k_that_does_not_fit(change: str, deep_gemm: ModuleType) -> None:
    case = k_grouped_case((128, 256), 36, 64)
    (a, a_scale), (b, b_scale) = flat_operands(case)
    sizes = [128, 128, 128] if change == "ks_cpu" else [128, 256]
    a, b_scale = a[36 * 128 :] if change == "a" else a, b_scale[:, :2] if change == "b_scale" else b_scale
    a = case.a if change == "a of two dimensions" else a
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


def test_ragged_k_of_wrong_operands_zeroes_no_expert_without_k(deep_gemm: ModuleType) -> None:
    a, b = (torch.zeros(rows * 128, dtype=torch.int8) for rows in (4, 64))
    scales, out = (torch.ones(4, 1), torch.ones(64, 1)), torch.ones(2, 4, 64)
    layout = torch.tensor([0, 128])
    with pytest.raises(ArgumentError):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, scales[0]), (b, scales[1]), out, [0, 128], layout)
    assert (out == 1).all()


def test_an_addend_that_shares_some_memory_is_refused(deep_gemm: ModuleType) -> None:
    case = cases.dense_case(128, 128, 256)
    square = torch.zeros(128, 128)
    with pytest.raises(ArgumentError):
        deep_gemm.fp8_gemm_nt((case.a, case.a_scale), (case.b, case.b_scale), square, square.t())
    ragged = k_grouped_case((128, 256), 36, 64)
    sums = torch.zeros(3, 36, 64)
    with pytest.raises(ArgumentError) as caught:  # else the sum of expert 0 would be added for expert 1
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
            *flat_operands(ragged), sums[1:], [128, 256], ragged.offsets, sums[:-1]
        )
    assert caught.value.argument == "c" and not sums.any()


def test_scales_of_weights_may_have_any_stride(deep_gemm: ModuleType) -> None:
    def spaced(scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([scale, scale], -1)[..., 0]

    dense, masked = cases.dense_case(9, 192, 256), cases.masked_case((3, 0, 9), 16, 192, 256)
    out = dense.poisoned()
    deep_gemm.fp8_gemm_nt((dense.a, dense.a_scale), (dense.b, spaced(dense.b_scale)), out)
    cases.check_gemm(dense, out)
    out = masked.poisoned()
    b = masked.b, spaced(masked.b_scale)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((masked.a, masked.a_scale), b, out, masked.index, 4)
    cases.check_gemm(masked, out)


def test_the_op_gets_the_expected_rows_and_ranges_within_the_operand(
    deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    for name in ("grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked"):
        monkeypatch.setattr(gemm, name, lambda *_, **options: given.append(options))
    gen = cases.generator(3, "cpu")
    a, b = cases.activations(130, 256, gen), cases.weights(2, 128, 256, gen)
    out = torch.empty(130, 128, dtype=torch.bfloat16)
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    # The padding of the last expert would end at row 192.
    ends = torch.tensor([70, 130], dtype=torch.int32)
    options = {"use_psum_layout": True, "expected_m_for_psum_layout": 7}
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, ends, **options)
    assert given[0]["expected_m"] == 7 and given[0]["offsets"].tolist() == [0, 128, 130]
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, ends, 4)
    assert given[1]["expected_m"] == 4


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


@pytest.mark.parametrize(
    ("n", "k", "refusal"), [(64, 576, "K is a multiple of 128, got 576"), (96, 256, "N is .* 64, got 96")]
)
def test_an_n_or_a_k_that_does_not_fit_is_not_served(
    n: int, k: int, refusal: str, deep_gemm: ModuleType
) -> None:
    a = torch.zeros(4, k, dtype=torch.float8_e4m3fn), torch.ones(4, -(-k // 128))
    b = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(1, -(-k // 128))
    with pytest.raises(UnsupportedError, match=refusal):
        deep_gemm.fp8_gemm_nt(a, b, torch.empty(4, n, dtype=torch.bfloat16))


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


def test_outputs_stay_as_they_are_while_nothing_launches(
    deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases.contiguous_case("m_indices", (3, 0, 130, 1), 128, 256)
    monkeypatch.setattr(gemm, "launches", lambda out: False)
    monkeypatch.setattr(gemm, "grouped_gemm_fp8_contiguous", lambda *operands, **options: None)
    out = case.poisoned()
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (case.a, case.a_scale), (case.b, case.b_scale), out, case.index, ensure_zero_padding=True
    )
    assert out.isnan().all()
    a, b = ((case.a[:4, :0], case.a_scale[:4, :0]), (case.b[0, :, :0], case.b_scale[0, :, :0]))
    deep_gemm.fp8_gemm_nt(a, b, out[:4])
    assert out.isnan().all()


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("use_psum_layout", [False, True])
def test_a_layout_that_does_not_fit_is_refused(
    use_psum_layout: bool, alignment: int, deep_gemm: ModuleType
) -> None:
    gen = cases.generator(3, "cpu")
    a, b = cases.activations(256, 256, gen), cases.weights(2, 128, 256, gen)
    out = torch.empty(256, 128, dtype=torch.bfloat16)
    right = torch.tensor([128, 256] if use_psum_layout else [0] * 128 + [1] * 128, dtype=torch.int32)
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    for wrong in (right[:1], right.repeat(2), right.long(), right.float(), right[None]):
        with pytest.raises(ArgumentError):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, wrong, use_psum_layout=use_psum_layout)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, right, use_psum_layout=use_psum_layout)


@pytest.mark.parametrize("layout", ["m_indices", "psum"])
@pytest.mark.parametrize("alignment", [16, 64, 256])
def test_contiguous_with_another_alignment(alignment: int, layout: str, deep_gemm: ModuleType) -> None:
    ends, index = cases.segments_of((3, 0, 70, 1), alignment)
    rows = len(index)
    gen = cases.generator(3, "cpu")
    a, a_scale = cases.activations(rows, 256, gen)
    b, b_scale = cases.weights(4, 128, 256, gen)
    out = torch.full((rows, 128), float("nan"), dtype=torch.bfloat16)
    given = torch.tensor(ends if layout == "psum" else index, dtype=torch.int32)
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_scale), (b, b_scale), out, given, use_psum_layout=layout == "psum", ensure_zero_padding=True
    )
    assert not out[torch.tensor(index) < 0].any()
    for expert in range(4):
        own = torch.tensor(index) == expert
        expected = moe_fp8.gemm_fp8(a[own], a_scale[own], b[expert], b_scale[expert])
        assert torch.equal(out[own], expected)
    with pytest.raises(ArgumentError):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


def test_experts_out_of_order_are_found_in_checked_mode(
    deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an alignment that 128 does not divide, experts must ascend."""
    gen = cases.generator(3, "cpu")
    a, b = cases.activations(192, 256, gen), cases.weights(3, 128, 256, gen)
    out = torch.empty(192, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(gemm, "checked", lambda tensor: True)
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    for experts, row in (((0, 2, 1), 128), ((0, 3, -1), 64), ((0, -1, 2), None)):
        index = torch.tensor(experts, dtype=torch.int32).repeat_interleave(64)
        if row is None:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, index)
            continue
        with pytest.raises(ContractError, match="ascending experts from 0 to 2") as error:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, index)
        assert error.value.row == row


@pytest.mark.parametrize("alignment", [64, 256])
def test_wrong_ends_are_found_in_checked_mode(
    alignment: int, deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an alignment other than 128, ends fall nowhere and lie within the rows."""
    gen = cases.generator(3, "cpu")
    a, b = cases.activations(768, 256, gen), cases.weights(3, 128, 256, gen)
    out = torch.empty(768, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(gemm, "checked", lambda tensor: True)
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    for ends, wrong in (
        ((70, 512, 768), None),
        ((70, 512, 769), 2),
        ((70, 300, 2**31 - 1), 2),
        ((300, 70, 768), 1),
        ((70, 71, 768), 1),  # the rows of expert 1 start behind the padding
        ((-1, 512, 768), 0),
    ):
        psum = torch.tensor(ends, dtype=torch.int32)
        if wrong is None:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, psum, use_psum_layout=True)
            continue
        with pytest.raises(ContractError, match="an end from") as error:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, psum, use_psum_layout=True)
        found = error.value
        assert (found.op, found.argument) == ("m_grouped_fp8_gemm_nt_contiguous", "grouped_layout")
        assert (found.expert, found.row) == (wrong, ends[wrong])


def test_masked(copy: ModuleType, deep_gemm: ModuleType) -> None:
    case = cases.masked_case((3, 0, 9), 16, 128, 256)
    for name in ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"):
        out = case.poisoned()
        operands = (case.a, case.a_scale), (case.b, case.b_scale), out
        getattr(deep_gemm, name)(*operands, masked_m=case.index, expected_m=4)
        cases.check_gemm(case, out)
    for options in ({"enable_overlap": True}, {"signal": case.index}):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*operands, case.index, 4, **options)
    assert [call[0] for call in copy.calls] == ["m_grouped_fp8_gemm_nt_masked"] * 2


@pytest.mark.parametrize("k", [128, 256])  # a single group of scales is contiguous in either layout
@pytest.mark.parametrize("name", ["dense", "dense of rows"])
def test_only_weights_are_read_early(
    name: str, k: int, deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = importlib.import_module("moe_fp8.integrations.deep_gemm.gemm"), []
    monkeypatch.setattr(module, "gemm_fp8", lambda *_, **options: given.append(options["constant_weights"]))
    case = named_case(name, (5,), 192, k)
    recipe = (1, 1, 128) if name == "dense of rows" else None

    class EnginesParameter(Parameter):
        pass

    weight, scale = Parameter(case.b, requires_grad=False), EnginesParameter(case.b_scale)
    strided = Parameter(torch.stack([scale, scale], -1)[..., 0])  # another kernel makes it contiguous
    operands = [
        (weight, scale),
        (weight, strided),
        (case.b, scale),
        (weight, case.b_scale),
        (case.b, case.b_scale),
    ]
    for pdl in (True, False):
        deep_gemm.set_pdl(pdl)
        for b in operands:
            deep_gemm.fp8_gemm_nt((case.a, case.a_scale), b, case.poisoned(), recipe=recipe)
    # Another kernel may just have written tensors that are no parameters.
    assert given == [name == "dense", *[False] * 9]


def test_a_result_needs_a_place(deep_gemm: ModuleType) -> None:
    """Without it, the ops would allocate the result, and nobody would see it."""
    dense, masked = cases.dense_case(9, 128, 256), cases.masked_case((3, 2), 4, 64, 256)
    grouped = cases.contiguous_case("m_indices", (3, 2), 64, 256)
    for name, case, *index in (
        ("fp8_gemm_nt", dense),
        ("m_grouped_fp8_gemm_nt_masked", masked, masked.index, 3),
        ("m_grouped_fp8_gemm_nt_contiguous", grouped, grouped.index),
    ):
        with pytest.raises(ArgumentError, match="d: expected a tensor, got NoneType"):
            getattr(deep_gemm, name)((case.a, case.a_scale), (case.b, case.b_scale), None, *index)


def test_experts_of_a_ragged_result_do_not_overlap(deep_gemm: ModuleType) -> None:
    a, b = flat_operands(k_grouped_case((128, 256), 8, 64))
    d = torch.zeros(1, 8, 64).expand(2, 8, 64)
    with pytest.raises(ArgumentError, match="d: expected elements that do not overlap"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, [128, 256], None)


@pytest.mark.parametrize("size", [0, 3, 32])
def test_elements_that_do_not_divide_sixteen_bytes_are_refused(deep_gemm: ModuleType, size: int) -> None:
    assert deep_gemm.get_tma_aligned_size(5, 4) == 8
    with pytest.raises(ArgumentError, match="element_size: expected 1, 2, 4, 8 or 16"):
        deep_gemm.get_tma_aligned_size(5, size)
