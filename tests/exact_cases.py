"""Indexer cases whose logits are exact in any order of summation, and often equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_fp8.ops.indexer import reference
from tests import cases


def mqa(m: int, n: int, heads: int, kind: str, device: str = "cpu", seed: int = 0) -> cases.MqaCase:
    """Values are small integers and powers of two, so logits are exact in any order and often equal."""
    case = cases.mqa_case(m, n, heads, kind, "cpu", seed)
    gen = cases.generator(seed, "cpu")
    return cases.MqaCase(
        *(t.to(device) for t in (_small((m, heads, 128), gen), _small((n, 128), gen))),
        (2.0 ** torch.randint(-2, 3, (n,), generator=gen)).to(device),
        torch.randint(-3, 4, (m, heads), generator=gen).float().to(device),
        case.ks.to(device),
        case.ke.to(device),
    )


def paged(
    lengths: Sequence[int] | Sequence[Sequence[int]],
    next_n: int,
    heads: int,
    block_size: int,
    device: str = "cpu",
) -> cases.PagedCase:
    """The same with a paged cache; entries that nothing may read stay NaN."""
    case = cases.paged_case(lengths, next_n, heads, block_size, device)
    gen = cases.generator(1, "cpu")
    pages = case.kv_cache.shape[0]
    keys = case.kv_cache.view(pages, -1)[:, : block_size * 128]
    scales = case.kv_cache.view(pages, -1)[:, block_size * 128 :].view(torch.float32)
    exact = _small((pages, block_size * 128), gen).view(torch.uint8).to(device)
    keys.copy_(torch.where(keys == cases.NAN_BYTE, keys, exact))
    scales.copy_(torch.where(scales.isnan(), scales, 2.0 ** (scales * 4).floor()))
    return cases.PagedCase(
        _small(tuple(case.q.shape), gen).to(device),
        case.kv_cache,
        torch.randint(-3, 4, tuple(case.weights.shape), generator=gen).float().to(device),
        case.context_lens,
        case.block_table,
    )


def _small(shape: Sequence[int], gen: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=gen).float().to(torch.float8_e4m3fn)


def paged_logits(case: cases.PagedCase, out: Tensor) -> None:
    """The reference's logits in fp32, in the elements that the op should write."""
    reference.paged_mqa_logits(case.q, case.kv_cache, case.weights, case.context_lens, case.block_table, out)


def token_lengths(case: cases.PagedCase) -> Tensor:
    """int64 [B, next_n]."""
    return reference.token_lengths(case.context_lens, case.next_n)
