"""MN-major scales: recognition, conversion, and the trace that an implicit conversion leaves."""

from __future__ import annotations

import logging

import pytest
import torch

from moe_fp8 import gemm_fp8, grouped_gemm_fp8_masked, jit, to_mn_major
from moe_fp8.ops import registry, scales
from moe_fp8.ops.gemm import checks
from tests import cases
from tests.cpu.op_arguments import OPS, SCALED_GEMMS


@pytest.mark.parametrize("m", [1, 2, 4, 5, 129])
@pytest.mark.parametrize("groups", [1, 3])
def test_two_dimensions(m: int, groups: int) -> None:
    scale = torch.rand(m, groups)
    out = to_mn_major(scale)
    assert torch.equal(out, scale)
    assert out.stride() == (1, (m + 3) // 4 * 4) or out is scale
    assert scales.is_mn_major(out)
    assert to_mn_major(out) is out


@pytest.mark.parametrize("m", [1, 4, 5])
def test_three_dimensions(m: int) -> None:
    scale = torch.rand(3, m, 2)
    out = to_mn_major(scale)
    pitch = (m + 3) // 4 * 4
    assert torch.equal(out, scale)
    assert out.stride() == (pitch * 2, 1, pitch)
    assert scales.is_mn_major(out)


def test_what_is_not_mn_major() -> None:
    assert not scales.is_mn_major(torch.rand(8, 2))
    assert not scales.is_mn_major(torch.rand(2, 5).T), "columns must be 16-byte aligned"
    assert not scales.is_mn_major(torch.rand(2, 16).T[1:9]), "the address must be 16-byte aligned"
    assert not scales.is_mn_major(torch.rand(2, 3, 4)[..., 0]), "two rows that are no neighbours"
    assert not scales.is_mn_major(torch.rand(1, 2)), "one row, but groups 4 apart are wanted"
    assert not scales.is_mn_major(torch.rand(3, 8, 2))
    assert scales.is_mn_major(torch.rand(8, 1)), "with one group the group stride does not matter"
    assert scales.is_mn_major(torch.rand(0, 7))
    room = torch.rand(64)
    assert scales.is_mn_major(room.as_strided((5, 2), (1, 8)))
    assert not scales.is_mn_major(room[1:].as_strided((5, 2), (1, 8))), "the address of usual strides too"


@pytest.mark.parametrize(
    "shape, strides",
    [
        ((0, 7), (1, 0)),
        ((0, 5, 2), (8, 1, 4)),
        ((2, 0, 3), (0, 1, 0)),
        ((1, 2), (7, 8)),
        ((1, 5, 1), (3, 1, 5)),
        ((1, 5, 2), (3, 1, 12)),
        ((3, 5, 1), (12, 1, 5)),
    ],
)
def test_strides_that_reach_no_element_do_not_matter(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    scale = torch.zeros(64).as_strided(shape, strides)
    assert to_mn_major(scale) is scale


def test_usual_strides_at_another_address_are_converted() -> None:
    given = OPS["gemm_fp8"]()
    a_scale = torch.zeros(64)[1:].as_strided((3, 2), (1, 4))
    others = checks.gemm(*{**given, "a_scale": a_scale}.values())
    assert others is not None and others[1].data_ptr() % 16 == 0


@pytest.mark.parametrize("kind", ["row-major", "unaligned columns"])
def test_a_gemm_converts_other_layouts_and_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    case = cases.dense_case(5, 64, 256)
    expected = gemm_fp8(case.a, case.a_scale, case.b, case.b_scale)
    other = case.a_scale.contiguous() if kind == "row-major" else case.a_scale.T.contiguous().T
    before = jit.counters().scale_conversions
    with caplog.at_level(logging.DEBUG, logger="moe_fp8"):
        out = gemm_fp8(case.a, other, case.b, case.b_scale)
    assert torch.equal(out, expected)
    assert jit.counters().scale_conversions == before + 1
    assert "gemm_fp8" in caplog.text and "MN-major" in caplog.text


def test_mn_major_scales_are_not_counted() -> None:
    case = cases.masked_case((3, 2), 6, 64, 256)
    before = jit.counters().scale_conversions
    grouped_gemm_fp8_masked(case.a, case.a_scale, case.b, case.b_scale, case.index)
    to_mn_major(case.a_scale.contiguous())
    assert jit.counters().scale_conversions == before


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("op", SCALED_GEMMS)
def test_a_conversion_keeps_all_other_arguments(op: str, flag: bool) -> None:
    registered, given = registry.OPS[op], OPS[op]()
    options = {"expected_m": 3, "config": "128x128", "limit": 7.0, "power_of_two": flag, "rounded": not flag}
    options |= {"constant_weights": flag, "accumulate": flag}
    given |= {name: value for name, value in options.items() if name in given}
    given["a_scale"] = given["a_scale"].contiguous()
    if "out" in given:
        given["out"] = given["out"].float()  # only fp32 is added to
    found = registered.check(*(given[name] for name in registered.arguments))
    assert found is not None
    kept = {name: one is given[name] for name, one in zip(registered.arguments, found, strict=True)}
    assert kept == {name: name != "a_scale" for name in registered.arguments}
    assert scales.is_mn_major(found[1])
    torch.testing.assert_close(found[1], given["a_scale"], rtol=0, atol=0, equal_nan=True)
