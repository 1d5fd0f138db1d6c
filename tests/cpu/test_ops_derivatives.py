"""The ops have no derivatives, in any mode of autograd and under any transform of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import moe_fp8
from tests import cases

_GEMM = cases.dense_case(4, 64, 128)
_MQA = cases.mqa_case(4, 9, 8)


def _gemm(c: Tensor) -> Tensor:
    return moe_fp8.gemm_fp8(_GEMM.a, _GEMM.a_scale, _GEMM.b, _GEMM.b_scale, c=c)


def _gemm_of_scales(scale: Tensor) -> Tensor:
    addend = torch.ones(4, 64)
    return moe_fp8.gemm_fp8(_GEMM.a, scale, _GEMM.b, _GEMM.b_scale, c=addend)


def _select(weights: Tensor) -> Tensor:
    q, k, k_scale, _, ks, ke = _MQA.arguments()
    chosen = moe_fp8.indexer_select(q, k, k_scale, weights, ks, ke, topk=4)
    return chosen + 0 * weights.sum()


#: A function of one tensor, and its argument.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "quantize_fp8": (lambda x: moe_fp8.quantize_fp8(x)[1], torch.ones(4, 128)),
    "quantize_fp8_blocks": (lambda w: moe_fp8.quantize_fp8_blocks(w)[1], torch.ones(64, 128)),
    "to_mn_major": (moe_fp8.to_mn_major, torch.ones(4, 3)),
    "linear_fp8": (lambda x: moe_fp8.linear_fp8(x, _GEMM.b, _GEMM.b_scale), torch.ones(4, 128)),
    "gemm_fp8": (_gemm, torch.ones(4, 64)),
    "route_topk": (lambda logits: moe_fp8.route_topk(logits, 2)[0], torch.arange(12.0).view(3, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_result_has_a_tangent_or_a_gradient(name: str) -> None:
    call, x = CALLS[name]
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).tangent is None
    assert not call(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("call", "x"),
    [(_gemm_of_scales, _GEMM.a_scale), (_select, _MQA.arguments()[3]), CALLS["linear_fp8"]],
)
def test_gradients_of_transforms_are_zero(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert not torch.func.grad(lambda x: call(x).float().sum())(x).any()


@pytest.mark.parametrize(("call", "x"), [(_gemm_of_scales, _GEMM.a_scale), (_select, _MQA.arguments()[3])])
def test_torch_refuses_vmap(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented for moe_fp8"):
        torch.func.vmap(call)(x[None])


@pytest.mark.parametrize("k", [0, 128])
def test_an_empty_product_may_go_to_an_output_that_requires_gradients(k: int) -> None:
    values, scale = torch.zeros(64, k).to(torch.float8_e4m3fn), torch.ones(k // 128, 64).t()
    out = torch.ones(1, 64, 64, requires_grad=True)
    offsets = torch.tensor([0, k], dtype=torch.int32)
    moe_fp8.k_grouped_gemm_fp8(values, scale, values, scale, offsets, out=out)
    assert out.is_leaf and not out.any()


@pytest.mark.parametrize("keys", [0, 9])
def test_logits_of_no_keys_may_go_to_an_output_that_requires_gradients(keys: int) -> None:
    q, k, k_scale, weights, ks, _ = _MQA.arguments()
    none = torch.zeros_like(ks)
    out = torch.ones(4, 8, requires_grad=True)
    moe_fp8.mqa_logits_fp8(
        q, k[:keys], k_scale[:keys], weights, none, none, max_seqlen_k=8, fill=True, out=out
    )
    assert out.is_leaf and bool((out == float("-inf")).all())
