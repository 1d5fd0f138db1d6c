"""The indexer's logits on the CPU against loops over queries, heads and keys."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8 import mqa_logits_fp8, paged_mqa_logits_fp8, paged_mqa_logits_metadata
from moe_fp8.ops.indexer import reference
from tests import cases


def _logit(q: torch.Tensor, key: torch.Tensor, key_scale: float, weights: torch.Tensor) -> float:
    total = 0.0
    for head in range(q.shape[0]):
        dot = float((q[head].double() * key.double()).sum())
        total += max(dot, 0.0) * key_scale * float(weights[head])
    return total


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["causal", "random", "empty"])
def test_mqa_follows_the_definition(kind: str, compressed: bool) -> None:
    case = cases.mqa_case(6, 9, 8, kind)
    columns = 9 if compressed else None
    out = torch.full((6, 9), cases.SENTINEL)
    assert mqa_logits_fp8(*case.arguments(), max_seqlen_k=columns, out=out) is out
    for i, (start, end) in enumerate(zip(case.ks.tolist(), case.ke.tolist(), strict=True)):
        expected = [cases.SENTINEL] * 9
        for j in range(start, end):
            at = j - start if compressed else j
            expected[at] = _logit(case.q[i], case.k[j], float(case.k_scale[j]), case.weights[i])
        assert out[i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("compressed", [False, True])
def test_fill_writes_minus_infinity_outside_the_ranges(compressed: bool) -> None:
    case = cases.mqa_case(20, 33, 16, "random")
    columns = 33 if compressed else None
    filled = mqa_logits_fp8(*case.arguments(), max_seqlen_k=columns, fill=True)
    cases.check_logits(filled, cases.mqa_expected(case, columns, -math.inf), -math.inf)


def test_mqa_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.mqa_case(50, 40, 8, "random")
    whole = mqa_logits_fp8(*case.arguments(), fill=True)
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 8 * 40 * 7)
    assert torch.allclose(mqa_logits_fp8(*case.arguments(), fill=True), whole, rtol=1e-5, atol=1e-4)


def test_mqa_without_queries_or_keys() -> None:
    case = cases.mqa_case(4, 5, 8)
    q, k, k_scale, weights, ks, ke = case.arguments()
    assert mqa_logits_fp8(q[:0], k, k_scale, weights[:0], ks[:0], ke[:0]).shape == (0, 5)
    zero = torch.zeros_like(ks)
    assert mqa_logits_fp8(q, k[:0], k_scale[:0], weights, zero, zero).shape == (4, 0)
    out = mqa_logits_fp8(q, k[:0], k_scale[:0], weights, zero, zero, max_seqlen_k=3, fill=True)
    assert torch.equal(out, torch.full((4, 3), -math.inf))


def test_one_row_with_a_real_row_stride() -> None:
    case = cases.mqa_case(1, 70, 8)
    storage = torch.full((1, 256), cases.SENTINEL)
    out = storage[:, :70]
    mqa_logits_fp8(*case.arguments(), out=out)
    cases.check_logits(out, cases.mqa_expected(case))
    assert (storage[:, 70:] == cases.SENTINEL).all()


@pytest.mark.parametrize("next_n", [1, 2, 3, 8])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("per_token", [False, True])
def test_paged_equals_unpaged(next_n: int, block_size: int, per_token: bool) -> None:
    lengths = [0, 1, 129, 64, 5, 300]
    if per_token:
        per_request = [[max(0, length - 2 * t) for t in range(next_n)] for length in lengths]
        case = cases.paged_case(per_request, next_n, 8, block_size, page_padding=32)
        seen = per_request
    else:
        case = cases.paged_case(lengths, next_n, 8, block_size, page_padding=32)
        seen = [[max(0, length - (next_n - 1 - t)) for t in range(next_n)] for length in lengths]
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=block_size, num_sms=7, next_n=next_n)
    out = torch.full((len(lengths) * next_n, 301), cases.SENTINEL)
    paged_mqa_logits_fp8(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        metadata,
        max_context_len=301,
        out=out,
    )
    for b, length in enumerate(lengths):
        keys, scales = [], []
        for position in range(length):
            page = case.kv_cache[int(case.block_table[b, position // block_size])].reshape(-1)
            slot = position % block_size
            keys.append(page[slot * 128 : slot * 128 + 128])
            at = block_size * 128 + slot * 4
            scales.append(page[at : at + 4])
        for t in range(next_n):
            row = out[b * next_n + t]
            visible = seen[b][t]
            if visible:
                k = torch.stack(keys[:visible]).view(torch.float8_e4m3fn)
                k_scale = torch.cat(scales[:visible]).view(torch.float32)
                expected = mqa_logits_fp8(
                    case.q[b, t : t + 1],
                    k,
                    k_scale,
                    case.weights[b * next_n + t][None],
                    torch.zeros(1, dtype=torch.int32),
                    torch.full((1,), visible, dtype=torch.int32),
                )
                assert torch.allclose(row[:visible], expected[0], rtol=1e-5, atol=1e-4)
            assert (row[visible:] == cases.SENTINEL).all()


def test_paged_without_requests() -> None:
    case = cases.paged_case([3], 1, 8, 64)
    metadata = paged_mqa_logits_metadata(case.context_lens[:0], block_size=64, num_sms=4)
    assert metadata.tolist() == [[0, 0]] * 5
    out = paged_mqa_logits_fp8(
        case.q[:0],
        case.kv_cache,
        case.weights[:0],
        case.context_lens[:0],
        case.block_table[:0],
        metadata,
        max_context_len=8,
    )
    assert out.shape == (0, 8)


@pytest.mark.parametrize("next_n", [1, 8])
def test_one_worker_may_do_all_work(next_n: int) -> None:
    case = cases.paged_case([70, 300], next_n, 8, 64)
    operands = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    one, many = (
        paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=workers, next_n=next_n)
        for workers in (1, 7)
    )
    assert one.tolist() == [[0, 0], [2, 0]]
    outs = [torch.zeros(2 * next_n, 300) for _ in range(2)]
    for metadata, out in zip((one, many), outs, strict=True):
        paged_mqa_logits_fp8(*operands, metadata, max_context_len=300, out=out)
    assert torch.equal(*outs)


def _metadata_by_definition(lengths: list[int], num_sms: int) -> list[list[int]]:
    work = [(b, chunk) for b, length in enumerate(lengths) for chunk in range(math.ceil(length / 64))]
    work.append((len(lengths), 0))
    return [list(work[s * (len(work) - 1) // num_sms]) for s in range(num_sms + 1)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 40))
def test_metadata_follows_the_definition(lengths: list[int], num_sms: int) -> None:
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    metadata = paged_mqa_logits_metadata(context_lens, block_size=64, num_sms=num_sms)
    assert metadata.dtype is torch.int32
    assert metadata.tolist() == _metadata_by_definition(lengths, num_sms)
    # Every worker has its share, to within one chunk.
    starts = [sum(math.ceil(length / 64) for length in lengths[:b]) + chunk for b, chunk in metadata.tolist()]
    shares = [end - start for start, end in itertools.pairwise(starts)]
    assert max(shares) - min(shares) <= 1


def test_metadata_counts_the_longest_token() -> None:
    per_token = torch.tensor([[1, 257], [0, 0], [600, 3]], dtype=torch.int32)
    metadata = paged_mqa_logits_metadata(per_token, block_size=64, num_sms=5)
    assert metadata.tolist() == [[0, 0], [0, 3], [2, 1], [2, 4], [2, 7], [3, 0]]


def test_no_length_goes_beyond_the_table() -> None:
    case = cases.paged_case([300, 5, 129], 1, 8, 64)
    table = case.block_table[:, :2].contiguous()  # 128 keys of each request
    metadata = paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=3)
    out = torch.full((3, 301), cases.SENTINEL)
    operands = case.q, case.kv_cache, case.weights, case.context_lens
    paged_mqa_logits_fp8(*operands, table, metadata, max_context_len=301, out=out)
    whole = torch.full_like(out, cases.SENTINEL)
    paged_mqa_logits_fp8(*operands, case.block_table, metadata, max_context_len=301, out=whole)
    assert torch.allclose(out[:, :128], whole[:, :128], rtol=1e-5, atol=1e-4)
    assert (out[:, 128:] == cases.SENTINEL).all()


@pytest.mark.parametrize("per_token", [False, True])
def test_negative_lengths_count_as_no_keys(per_token: bool) -> None:
    case = cases.paged_case([[70, 70], [9, 9]] if per_token else [70, 9], 2, 8, 64)
    given = torch.tensor([[70, -3], [-9, -1]] if per_token else [70, -9], dtype=torch.int32)
    without = given.clamp(min=0)
    schedule = paged_mqa_logits_metadata(without, block_size=64, num_sms=3, next_n=2)
    assert torch.equal(paged_mqa_logits_metadata(given, block_size=64, num_sms=3, next_n=2), schedule)
    out, expected = torch.full((4, 80), cases.SENTINEL), torch.full((4, 80), cases.SENTINEL)
    for lengths, into in ((given, out), (without, expected)):
        paged_mqa_logits_fp8(
            case.q, case.kv_cache, case.weights, lengths, case.block_table, schedule,
            max_context_len=80, out=into,
        )  # fmt: skip
    assert torch.equal(out, expected) and (out[2:] == cases.SENTINEL).all()
