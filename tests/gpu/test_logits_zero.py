"""Logits that are 0 by definition: exactly 0 in most calls, and within a bound in the largest ones."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import mqa_logits_fp8
from moe_fp8.ops.indexer.logits import mqa_logits_chunk_op
from tests import cases

#: A share of k_scale * sum_h |weights| * sum_d |q * k|, as the docstring of `mqa_logits_fp8` says.
BOUND = 1e-3


def _case(heads: int, dim: int, signs: str) -> cases.MqaCase:
    case = cases.negative_scores(cases.mqa_case(130, 1000, heads, "causal", "cuda", dim=dim))
    if signs == "positive":
        case.weights.abs_()
    return case


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("signs", ["positive", "both"])
def test_scores_that_are_all_negative(heads: int, dim: int, signs: str) -> None:
    case = _case(heads, dim, signs)
    seen = torch.arange(1000, device="cuda")[None] < case.ke[:, None]
    exact = mqa_logits_fp8(*case.arguments())
    assert (exact[seen] == 0).all()

    # As a chunk of a call that is large enough for the kernel with terms.
    got = torch.empty_like(exact)
    mqa_logits_chunk_op(*case.arguments(), False, False, got, 1 << 20, 1 << 20)
    q, k = (tensor.to(cases.F64).abs() for tensor in (case.q, case.k))
    sizes = torch.einsum("mhd,nd,mh->mn", q, k, case.weights.to(cases.F64).abs()) * case.k_scale
    ratio = float((got.to(cases.F64).abs() / sizes)[seen].max())
    assert ratio <= BOUND, f"{ratio:.2e} of the sum of absolute values"
