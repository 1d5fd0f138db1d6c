"""Calls of every op as functions of named tensors, with two sets of inputs, for trials of their capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fp8
from tests import cache_cases, cases, k_grouped_cases, moe_cases, topk_cases
from tests.gemm_addend_cases import addend, named_case

Named = dict[str, Tensor]


@dataclass(frozen=True)
class GraphCase:
    """`inputs(seed, device)` for seeds 0 and 1 differ only in contents, and `call` takes them by name."""

    inputs: Callable[[int, str], Named]
    call: Callable[[Named], Any]


def _on(device: str, **tensors: Tensor) -> Named:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _gemm(case: cases.GemmCase) -> Named:
    named = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return named if case.index is None else {**named, "index": case.index}


def _linear(seed: int, device: str) -> Named:
    x = torch.randn(5, 256, generator=cases.generator(seed, "cpu")).bfloat16()
    weight, scale = cases.weights(1, 192, 256, cases.generator(seed + 7, "cpu"))
    return _on(device, x=x, weight=weight[0], weight_scale=scale[0])


def _operands(given: Named) -> tuple[Tensor, ...]:
    return given["a"], given["a_scale"], given["b"], given["b_scale"]


def _with_addend(seed: int, device: str) -> Named:
    case = named_case("dense", (33,), 192, 256, device, seed)
    return {**_gemm(case), "c": addend(case, seed)}


def _contiguous(layout: str) -> GraphCase:
    rows = ((5, 0, 7), (2, 9, 1))  # with offsets, these are all rows
    total = 12 if layout == "offsets" else 512

    def call(given: Named) -> Tensor:
        index = given["index"]
        out = moe_fp8.grouped_gemm_fp8_contiguous(*_operands(given), **{layout: index})
        at = torch.arange(total, dtype=index.dtype, device=index.device)
        owned = torch.ones_like(at, dtype=torch.bool)
        if layout == "m_indices":
            owned = index >= 0
        elif layout == "psum":
            expert = torch.searchsorted(index, at, right=True).clamp_max(2)
            starts = torch.nn.functional.pad((index[:-1] + 127) // 128 * 128, (1, 0))
            owned = (at >= starts[expert]) & (at < index[expert])
        return torch.where(owned[:, None], out, 0)

    return GraphCase(
        lambda seed, device: _gemm(cases.contiguous_case(layout, rows[seed], 192, 256, device, seed, total)),
        call,
    )


def _masked_call(given: Named) -> Tensor:
    out = moe_fp8.grouped_gemm_fp8_masked(*_operands(given), given["index"])
    rows = torch.arange(16, device=out.device)
    return torch.where((rows < given["index"][:, None])[..., None], out, 0)


def _k_grouped(seed: int, device: str) -> Named:
    case = k_grouped_cases.k_grouped_case([(128, 0, 384), (256, 256, 0)][seed], 130, 192, device, seed)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    return {**dict(zip(names, case.operands(), strict=True)), "c": case.addend(seed)}


def _silu(seed: int, device: str) -> Named:
    gen = cases.generator(seed, "cpu")
    counts = torch.tensor([[3, 0, 8], [8, 5, 1]][seed], dtype=torch.int32)
    q = torch.zeros(3, 8, 256, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(3, 2, 8, device=device).mT
    x = torch.randn(3, 8, 512, generator=gen).bfloat16()
    return {**_on(device, x=x, counts=counts), "q": q, "scale": scale}


def _mqa(seed: int, device: str) -> Named:
    case = cases.mqa_case(6, 300, 16, "random", device, seed)
    return {name: getattr(case, name) for name in ("q", "k", "k_scale", "weights", "ks", "ke")}


_MQA = ("q", "k", "k_scale", "weights", "ks", "ke")


def _paged(seed: int, device: str) -> Named:
    # The same pages in all, so that the caches have one size.
    case = cases.paged_case([[70, 0, 200], [200, 70, 0]][seed], 2, 16, 64, device, seed, max_pages=4)
    names = ("q", "kv_cache", "weights", "context_lens", "block_table")
    return {
        **{name: getattr(case, name) for name in names},
        "out": torch.full((6, 256), cases.SENTINEL, device=device),
    }


def _paged_logits(given: Named) -> Tensor:
    metadata = moe_fp8.paged_mqa_logits_metadata(given["context_lens"], block_size=64, num_sms=4, next_n=2)
    operands = (given[name] for name in ("q", "kv_cache", "weights", "context_lens", "block_table"))
    return moe_fp8.paged_mqa_logits_fp8(*operands, metadata, max_context_len=256, out=given["out"])


def _paged_select(given: Named) -> Tensor:
    operands = (given[name] for name in ("q", "kv_cache", "weights", "context_lens", "block_table"))
    return moe_fp8.paged_indexer_select(*operands, topk=40, max_context_len=256, num_sms=4)


def _cache(seed: int, device: str) -> Named:
    case = cache_cases.cache_case(7, seed=seed)
    return _on(device, k=case.k, kv_cache=case.kv_cache.clone(), slot_mapping=case.slot_mapping)


def _topk(seed: int, device: str) -> Named:
    case = topk_cases.topk_case(9, 500, seed=seed)
    assert case.starts is not None and case.ends is not None
    return _on(device, logits=case.logits, ks=case.starts, ke=case.ends)


def _topk_call(given: Named) -> tuple[Tensor, Tensor]:
    values = torch.empty(9, 64, device=given["logits"].device)
    chosen = moe_fp8.indexer_topk(given["logits"], topk=64, ks=given["ks"], ke=given["ke"], values=values)
    return chosen, values


_LAYER = moe_cases.Case(12, 4, 8, 256)


def _layer(seed: int, device: str) -> Named:
    gen = cases.generator(seed, "cpu")
    w1, s1 = cases.weights(8, 512, 256, gen)
    w2, s2 = cases.weights(8, 256, 256, gen)
    ids, weights = _LAYER.ids(seed), torch.rand(12, 4, generator=gen)
    return _on(device, x=_LAYER.hidden(seed), ids=ids, weights=weights, w1=w1, s1=s1, w2=w2, s2=s2)


def _one_rank(seed: int, device: str) -> Named:
    """The same for a rank that has two thirds of the experts."""
    numbers = torch.tensor([0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1], dtype=torch.int32)
    ids = torch.rand(12, 12, generator=cases.generator(seed, "cpu")).argsort(1)[:, :4].contiguous()
    return {**_layer(seed, device), **_on(device, ids=ids, expert_map=numbers)}


def _interleaved(seed: int, device: str) -> Named:
    given = _layer(seed, device)
    return {**given, "w1": moe_fp8.interleave_gate_up(given["w1"])}


def _fused_call(given: Named, interleaved: bool = False) -> Tensor:
    operands = (given[name] for name in ("x", "ids", "weights", "w1", "s1", "w2", "s2"))
    return moe_fp8.fused_moe(*operands, expert_map=given.get("expert_map"), interleaved=interleaved)


def _layer_call(given: Named) -> Tensor:
    permuted = moe_fp8.moe_permute(given["x"], given["ids"], num_experts=8)
    grouped = moe_fp8.grouped_gemm_fp8_contiguous
    up = grouped(permuted.a, permuted.a_scale, given["w1"], given["s1"], offsets=permuted.offsets)
    down = grouped(*moe_fp8.silu_mul_quantize(up), given["w2"], given["s2"], offsets=permuted.offsets)
    return moe_fp8.moe_combine(down, permuted.rows, given["weights"])


CASES = {
    "quantize_fp8": GraphCase(
        lambda seed, device: _on(device, x=torch.randn(5, 256, generator=cases.generator(seed, "cpu"))),
        lambda given: moe_fp8.quantize_fp8(given["x"]),
    ),
    "silu_mul_quantize": GraphCase(
        _silu,
        lambda given: moe_fp8.silu_mul_quantize(
            given["x"], masked_m=given["counts"], out=(given["q"], given["scale"])
        ),
    ),
    "gemm_fp8": GraphCase(
        lambda seed, device: _gemm(cases.dense_case(33, 192, 256, device, seed)),
        lambda given: moe_fp8.gemm_fp8(*_operands(given)),
    ),
    "gemm_fp8 that adds": GraphCase(
        _with_addend,
        lambda given: moe_fp8.gemm_fp8(*_operands(given), c=given["c"]),
    ),
    "gemm_fp8 of rows": GraphCase(
        lambda seed, device: _gemm(named_case("dense of rows", (33,), 192, 256, device, seed)),
        lambda given: moe_fp8.gemm_fp8(*_operands(given)),
    ),
    "m_indices": _contiguous("m_indices"),
    "psum": _contiguous("psum"),
    "offsets": _contiguous("offsets"),
    "masked": GraphCase(
        lambda seed, device: _gemm(
            cases.masked_case([(3, 0, 16), (16, 2, 9)][seed], 16, 192, 256, device, seed)
        ),
        _masked_call,
    ),
    "k_grouped_gemm_fp8": GraphCase(
        _k_grouped,
        lambda given: moe_fp8.k_grouped_gemm_fp8(*_operands(given), given["offsets"], c=given["c"]),
    ),
    "mqa_logits_fp8": GraphCase(
        _mqa, lambda given: moe_fp8.mqa_logits_fp8(*(given[name] for name in _MQA), fill=True)
    ),
    "indexer_select": GraphCase(
        _mqa, lambda given: moe_fp8.indexer_select(*(given[name] for name in _MQA), topk=20)
    ),
    "paged_mqa_logits_metadata": GraphCase(
        lambda seed, device: _on(
            device, lengths=torch.tensor([[70, 0, 900], [5, 3000, 64]][seed], dtype=torch.int32)
        ),
        lambda given: moe_fp8.paged_mqa_logits_metadata(given["lengths"], block_size=64, num_sms=4),
    ),
    "paged_mqa_logits_fp8": GraphCase(_paged, _paged_logits),
    "paged_indexer_select": GraphCase(_paged, _paged_select),
    "indexer_quantize_and_cache": GraphCase(
        _cache,
        lambda given: moe_fp8.indexer_quantize_and_cache(
            given["k"], given["kv_cache"], given["slot_mapping"]
        ),
    ),
    "indexer_topk": GraphCase(_topk, _topk_call),
    "moe_permute": GraphCase(
        lambda seed, device: _on(device, x=_LAYER.hidden(seed), ids=_LAYER.ids(seed)),
        lambda given: moe_fp8.moe_permute(given["x"], given["ids"], num_experts=8),
    ),
    "moe_combine": GraphCase(
        lambda seed, device: _on(
            device,
            y=torch.randn(20, 64, generator=cases.generator(seed, "cpu")).bfloat16(),
            rows=torch.randint(-1, 20, (6, 4), generator=cases.generator(seed, "cpu")).int(),
        ),
        lambda given: moe_fp8.moe_combine(given["y"], given["rows"]),
    ),
    "route_topk": GraphCase(
        lambda seed, device: _on(device, logits=torch.randn(9, 32, generator=cases.generator(seed, "cpu"))),
        lambda given: moe_fp8.route_topk(given["logits"], topk=4, scoring="sigmoid"),
    ),
    "linear_fp8": GraphCase(
        _linear, lambda given: moe_fp8.linear_fp8(given["x"], given["weight"], given["weight_scale"])
    ),
    "fused_moe": GraphCase(_layer, _fused_call),
    "fused_moe of a rank": GraphCase(_one_rank, _fused_call),
    "fused_moe of interleaved weights": GraphCase(_interleaved, partial(_fused_call, interleaved=True)),
    "a layer of experts": GraphCase(_layer, _layer_call),
}
