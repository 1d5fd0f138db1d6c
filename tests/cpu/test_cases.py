"""The shared checks find one wrong value among many right values."""

from __future__ import annotations

import pytest
import torch

from tests import cases


def test_check_gemm_sees_one_wrong_element_in_a_small_row() -> None:
    case = cases.dense_case(2000, 4096, 128)
    out = cases.run_reference(case, case.runs[0]).bfloat16()
    cases.check_gemm(case, out)
    row = int(out.float().norm(dim=1).argmin())
    out[row, 77] = -2 * out[row].abs().max()
    with pytest.raises(AssertionError, match=f"row {row}:"):
        cases.check_gemm(case, out)


def test_check_logits_sees_one_wrong_element() -> None:
    case = cases.mqa_case(256, 3000, 8, "random", "cpu")
    expected = cases.mqa_expected(case)
    out = expected.clone().float()
    cases.check_logits(out, expected)
    row, column = ((expected != cases.SENTINEL) & (expected.abs() < 1)).nonzero()[100].tolist()
    out[row, column] += 0.3 * expected[expected != cases.SENTINEL].square().mean().sqrt().float()
    with pytest.raises(AssertionError, match="an element is wrong"):
        cases.check_logits(out, expected)
    outside = (expected == cases.SENTINEL).nonzero()[0].tolist()
    out = expected.clone().float()
    out[tuple(outside)] = torch.nan
    with pytest.raises(AssertionError, match="outside"):
        cases.check_logits(out, expected)
