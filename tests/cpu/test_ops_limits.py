"""Sizes beyond what the kernels can count are refused by name. Tensors on the meta device take no memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import ArgumentError, ContractError, heuristics
from moe_fp8.ops.arguments import MAX_EXTENT
from moe_fp8.ops.gemm import checks as gemm_checks
from moe_fp8.ops.indexer import checks as indexer_checks
from moe_fp8.ops.moe import checks as moe_checks
from moe_fp8.ops.quantize import checks as quantize_checks

ROOT = Path(__file__).resolve().parents[2]
F8, BF16, F32, I32, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32, torch.uint8


def _meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _scales(*shape: int) -> torch.Tensor:
    """MN-major."""
    *experts, m, groups = shape
    return torch.empty((*experts, groups, -(-m // 4) * 4), device="meta").mT[..., :m, :]


def _dense(m: int, n: int, k: int) -> None:
    b_scale = _meta(-(-n // 128), k // 128)
    gemm_checks.gemm(
        _meta(m, k, dtype=F8), _scales(m, k // 128), _meta(n, k, dtype=F8), b_scale, _meta(m, n, dtype=BF16)
    )


def _masked(experts: int, m: int, n: int) -> None:
    gemm_checks.gemm_masked(
        _meta(experts, m, 128, dtype=F8),
        _scales(experts, m, 1),
        _meta(experts, n, 128, dtype=F8),
        _meta(experts, -(-n // 128), 1),
        _meta(experts, dtype=I32),
        None,
        _meta(experts, m, n, dtype=BF16),
    )


def _k_grouped(experts: int, m: int, n: int, k: int) -> None:
    gemm_checks.k_grouped_gemm(
        _meta(m, k, dtype=F8),
        _scales(m, k // 128),
        _meta(n, k, dtype=F8),
        _scales(n, k // 128),
        _meta(experts + 1, dtype=I32),
        _meta(experts, m, n),
    )


def _quantize(m: int, k: int) -> None:
    quantize_checks.quantize(_meta(m, k, dtype=BF16), _meta(m, k, dtype=F8), _scales(m, k // 128), False)


def _silu(experts: int, m: int, k: int) -> None:
    x, q = _meta(experts, m, 2 * k, dtype=BF16), _meta(experts, m, k, dtype=F8)
    counts = _meta(experts, dtype=I32)
    quantize_checks.silu_mul_quantize(x, counts, q, _scales(experts, m, k // 128), False, None)


def _cache(rows: int) -> None:
    k = _meta(1, 128, dtype=BF16).expand(rows, 128)
    cache = _meta(3, 64, 1, 132, dtype=U8)
    indexer_checks.indexer_quantize_and_cache(k, cache, _meta(rows, dtype=torch.int64))


def _mqa(m: int, n: int, heads: int = 64, width: int | None = None) -> None:
    indexer_checks.mqa_logits(
        _meta(m, heads, 32, dtype=F8),
        _meta(n, 32, dtype=F8),
        _meta(n),
        _meta(m, heads),
        _meta(m, dtype=I32),
        _meta(m, dtype=I32),
        width is not None,
        False,
        _meta(m, n if width is None else width),
    )


def _paged(batch: int, next_n: int, pages: int, width: int, workers: int = 132) -> None:
    indexer_checks.paged_mqa_logits(
        _meta(batch, next_n, 64, 32, dtype=F8),
        _meta(pages, 64, 1, 36, dtype=U8),
        _meta(batch * next_n, 64),
        _meta(batch, dtype=I32),
        _meta(batch, 1, dtype=I32),
        _meta(workers + 1, 2, dtype=I32),
        _meta(batch * next_n, width),
    )


def _schedule(batch: int, next_n: int, workers: int) -> None:
    out = _meta(workers + 1, 2, dtype=I32)
    indexer_checks.paged_mqa_logits_metadata(_meta(batch, dtype=I32), 64, next_n, out)


def _topk(rows: int, columns: int) -> None:
    logits = _meta(1, columns).expand(rows, columns)
    indexer_checks.indexer_topk(logits, 4, None, None, False, _meta(rows, 4, dtype=I32), None)


def _route(tokens: int) -> None:
    logits, weights = _meta(1, 8).expand(tokens, 8), _meta(tokens, 2)
    moe_checks.route(
        logits,
        None,
        weights,
        _meta(tokens, 2, dtype=I32),
        "softmax",
        1,
        1,
        renormalize=True,
        scaling_factor=1.0,
    )


def _permute(tokens: int, places: int, columns: int, mapped: int = 2) -> None:
    rows = tokens * places
    moe_checks.permute(
        _meta(tokens, columns, dtype=BF16),
        None,
        _meta(tokens, places, dtype=I32),
        _meta(mapped, dtype=I32),
        _meta(rows, columns, dtype=F8),
        _scales(rows, columns // 128),
        _meta(2, dtype=I32),
        _meta(tokens, places, dtype=I32),
        False,
    )


def _combine(tokens: int, places: int, rows: int, columns: int) -> None:
    y, out = _meta(rows, columns, dtype=BF16), _meta(tokens, columns, dtype=BF16)
    moe_checks.combine(y, _meta(tokens, places, dtype=I32), None, out)


def _gemm_silu_mul(experts: int, n: int, m: int = 8, k: int = 128) -> None:
    moe_checks.gemm_silu_mul(
        _meta(m, k, dtype=F8),
        _scales(m, k // 128),
        _meta(experts, n, k, dtype=F8),
        _meta(experts, n // 128, k // 128),
        _meta(experts + 1, dtype=I32),
        None,
        None,
        False,
        False,
        _meta(m, n // 2, dtype=F8),
        _scales(m, n // 256),
    )


MOST = MAX_EXTENT

#: A call at its limit (which passes), and one beyond with the argument that is named.
LIMITS: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], str]] = [
    (_dense, (MOST, 64, 128), (MOST + 1, 64, 128), "a"),
    (_dense, (8, MOST // 64 * 64, 128), (8, MOST + 64, 128), "b"),
    (_dense, (8, 64, MOST // 128 * 128), (8, 64, MOST + 128), "a"),
    (_masked, (2, MOST // 2, 64), (2, MOST // 2 + 1, 64), "a"),
    (_masked, (MOST // 64, 1, 64), (MOST // 64 + 1, 1, 64), "b"),
    (_k_grouped, (2, MOST // 2, 64, 128), (2, MOST // 2 + 1, 64, 128), "out"),
    (_k_grouped, (1, 8, MOST // 64 * 64, 128), (1, 8, MOST + 64, 128), "b"),
    (_k_grouped, (1, 8, 64, MOST // 128 * 128), (1, 8, 64, MOST + 128), "a"),
    (_quantize, (MOST, 128), (MOST + 1, 128), "x"),
    (_quantize, (1, MOST // 128 * 128), (1, MOST + 128), "x"),
    (_silu, (2, MOST // 2, 128), (2, MOST // 2 + 1, 128), "x"),
    (_silu, (MOST // 2, 1, 256), (MOST // 2 + 1, 1, 256), "x"),
    (_cache, (MOST,), (MOST + 1,), "k"),
    (_mqa, (MOST // 64, 64), (MOST // 64 + 1, 64), "q"),
    (_mqa, (8, MOST), (8, MOST + 1), "k"),
    (_mqa, (8, MOST // 2, 64, MOST // 2), (8, MOST // 2, 64, MOST // 2 + 1), "max_seqlen_k"),
    (_mqa, (8, 1, 64, MOST - 1), (8, 1, 64, MOST + 1), "out"),
    (_paged, (MOST // 128, 2, 1, 64), (MOST // 128 + 1, 2, 1, 64), "q"),
    (_paged, (1, 1, MOST, 64), (1, 1, MOST + 1, 64), "kv_cache"),
    (_paged, (1, 1, 1, MOST), (1, 1, 1, MOST + 1), "out"),
    (_paged, (1, 1, 1, 64, MOST - 1), (1, 1, 1, 64, MOST), "metadata"),
    (_schedule, (MOST // 8, 8, 132), (MOST // 8 + 1, 8, 132), "context_lens"),
    (_schedule, (1, 1, MOST - 1), (1, 1, MOST), "out"),
    (_topk, (MOST, 8), (MOST + 1, 8), "logits"),
    (_topk, (8, 2**31 - 1), (8, 2**31), "logits"),
    (_route, (MOST,), (MOST + 1,), "logits"),
    (_permute, (MOST // 2, 2, 128), (MOST // 2 + 1, 2, 128), "x"),
    (_permute, (8, 2, 1 << 24), (8, 2, (1 << 24) + 128), "x"),
    (_permute, (8, 2, 128, MOST), (8, 2, 128, MOST + 1), "expert_map"),
    (_combine, (MOST // 2, 2, 8, 8), (MOST // 2 + 1, 2, 8, 8), "y"),
    (_combine, (8, 2, MOST, 8), (8, 2, MOST + 1, 8), "y"),
    (_combine, (8, 2, 8, MOST // 8 * 8), (8, 2, 8, MOST + 8), "y"),
    (_gemm_silu_mul, (MOST // 256, 256), (MOST // 256 + 1, 256), "w13"),
    (_gemm_silu_mul, (1, 256, MOST), (1, 256, MOST + 1), "a"),
    (_gemm_silu_mul, (1, 256, 8, MOST // 128 * 128), (1, 256, 8, MOST + 128), "a"),
]


@pytest.mark.parametrize("check, largest, beyond, argument", LIMITS)
def test_sizes_that_32_bits_do_not_hold(
    check: Any, largest: tuple[Any, ...], beyond: tuple[Any, ...], argument: str
) -> None:
    check(*largest)
    with pytest.raises(ArgumentError, match="at most") as caught:
        check(*beyond)
    assert caught.value.argument == argument


def test_a_token_goes_to_512_experts_at_most() -> None:
    _permute(3, 512, 128)
    _combine(3, 512, 8, 8)
    with pytest.raises(ArgumentError, match=r"topk_ids: expected shape .* from 1 to 512"):
        _permute(3, 513, 128)
    with pytest.raises(ArgumentError, match=r"rows: expected shape .* from 1 to 512"):
        _combine(3, 513, 8, 8)


def test_a_rank_has_1024_experts_at_most() -> None:
    def layer(experts: int) -> None:
        w13, w2 = (_meta(experts, rows, 128, dtype=F8) for rows in (256, 128))
        scales = _meta(experts, 2, 1), _meta(experts, 1, 1)
        moe_checks.layer_weights(_meta(3, 128, dtype=BF16), w13, scales[0], w2, scales[1])

    layer(1024)
    with pytest.raises(ArgumentError, match=r"w13: expected shape .* at most 1024 experts"):
        layer(1025)


@pytest.mark.parametrize("heads, tile", [(64, 4), (32, 8), (8, 8)])
@pytest.mark.parametrize("keys", [1 << 20, (1 << 20) + 1, 1 << 24])
def test_stages_of_all_queries_fit_32_bits(heads: int, tile: int, keys: int) -> None:
    # A tile of queries has a stage for every 64 keys; each of its items, of 2^17 keys, counts four more.
    stages = -(-keys // 64) + 4 * -(-keys // (1 << 17))
    most = heuristics.mqa_most_queries(keys, heads)
    assert most % tile == 0 and most // tile * stages < 2**32 <= (most // tile + 1) * stages
    _mqa(most, keys, heads, 2048)
    with pytest.raises(ArgumentError, match=f"q: expected at most {most} queries") as caught:
        _mqa(most + 1, keys, heads, 2048)
    assert "several calls" in caught.value.remedy


def test_what_the_kernel_counts_for_an_item() -> None:
    """`mqa_most_queries` restates it."""
    source = (ROOT / "moe_fp8" / "kernels" / "mqa_logits_fp8.cuh").read_text()
    assert re.search(r"kItemCost = TERMS \? 4 : 1;", source)


def test_a_width_of_the_paged_selection() -> None:
    with pytest.raises(ArgumentError, match="max_context_len: expected at most"):
        moe_fp8.paged_indexer_select(
            torch.zeros(1, 1, 8, 32).to(F8),
            torch.zeros(1, 64, 1, 36, dtype=U8),
            torch.zeros(1, 8),
            torch.zeros(1, dtype=I32),
            torch.zeros(1, 1, dtype=I32),
            topk=4,
            max_context_len=2**31,
            num_sms=1,
        )


@pytest.mark.usefixtures("checked_mode")
def test_chunks_of_all_requests_are_counted_in_checked_mode() -> None:
    lengths = torch.full((64,), 2**31 - 1, dtype=I32)
    with pytest.raises(ContractError, match="chunks of 64 tokens in all requests together"):
        moe_fp8.paged_mqa_logits_metadata(lengths, block_size=64, num_sms=2)
    moe_fp8.paged_mqa_logits_metadata(lengths[:63], block_size=64, num_sms=2)
