"""Indexer logits on the GPU against float64; keys that nothing may read are NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from moe_fp8 import mqa_logits_fp8, paged_mqa_logits_fp8, paged_mqa_logits_metadata
from moe_fp8.ops.indexer import reference
from moe_fp8.ops.indexer.logits import mqa_logits_chunk_op
from tests import cases

HEADS = (8, 16, 32, 64)


def _num_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _sentinel(rows: int, columns: int, stride: int | None = None) -> torch.Tensor:
    """fp32 [rows, columns] full of the sentinel, with rows `stride` elements apart."""
    storage = torch.full((rows, stride or columns), cases.SENTINEL, device="cuda")
    return storage[:, :columns]


def _mqa(case: cases.MqaCase, columns: int | None = None, stride: int | None = None) -> torch.Tensor:
    width = case.k.shape[0] if columns is None else columns
    out = _sentinel(case.q.shape[0], width, stride)
    assert mqa_logits_fp8(*case.arguments(), max_seqlen_k=columns, out=out) is out
    return out


def _mqa_with_terms(
    case: cases.MqaCase, columns: int | None = None, fill: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Score the case as a chunk of a call that is large enough for the kernel with terms."""
    width = case.k.shape[0] if columns is None else columns
    out = _sentinel(case.q.shape[0], width).to(dtype)
    mqa_logits_chunk_op(*case.arguments(), columns is not None, fill, out, 1 << 20, 1 << 20)
    return out


Score = Callable[[cases.MqaCase], torch.Tensor]

MQA_SHAPES = [(1, 1), (1, 700), (5, 64), (33, 130), (130, 1000), (300, 4100)]


#: Both prefill kernels.
SCORE = pytest.mark.parametrize("score", [_mqa, _mqa_with_terms])


@SCORE
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("m, n", MQA_SHAPES)
@pytest.mark.parametrize("kind", ["causal", "random"])
def test_mqa(score: Score, m: int, n: int, heads: int, kind: str) -> None:
    case = cases.mqa_case(m, n, heads, kind, "cuda", seed=m + n)
    cases.check_logits(score(case), cases.mqa_expected(case))


@pytest.mark.parametrize("m, n, heads", [(2100, 300, 64), (1100, 135_000, 8)])
def test_mqa_of_many_items_and_of_more_than_a_chunk_of_keys(m: int, n: int, heads: int) -> None:
    case = cases.mqa_case(m, n, heads, "random", "cuda")
    cases.check_logits(_mqa(case), cases.mqa_expected(case))


@SCORE
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_mqa_head_dim(score: Score, heads: int, dim: int) -> None:
    case = cases.mqa_case(130, 1000, heads, "random", "cuda", dim=dim)
    cases.check_logits(score(case), cases.mqa_expected(case))


@pytest.mark.parametrize("columns", [None, 1077])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mqa_outputs_with_terms(columns: int | None, fill: bool, dtype: torch.dtype) -> None:
    case = cases.mqa_case(130, 1000, 32, "random", "cuda")
    rest = -math.inf if fill else cases.SENTINEL
    out = _mqa_with_terms(case, columns, fill, dtype)
    cases.check_logits(out, cases.mqa_expected(case, columns, rest), rest)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e25])
def test_mqa_terms_of_weights_of_any_size(size: float) -> None:
    case = cases.mqa_case(130, 1000, 64, "causal", "cuda")
    case.weights.mul_(size)
    cases.check_logits(_mqa_with_terms(case), cases.mqa_expected(case))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("fill", [False, True])
def test_mqa_in_bf16(heads: int, fill: bool) -> None:
    case = cases.mqa_case(130, 1000, heads, "random", "cuda")
    out = case.q.new_full((130, 1000), cases.SENTINEL, dtype=torch.bfloat16)
    mqa_logits_fp8(*case.arguments(), fill=fill, out=out)
    rest = -math.inf if fill else cases.SENTINEL
    cases.check_logits(out, cases.mqa_expected(case, rest=rest), rest)
    assert mqa_logits_fp8(*case.arguments(), out_dtype=torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("m, n", [(5, 64), (130, 1000)])
def test_mqa_compressed(m: int, n: int, heads: int) -> None:
    case = cases.mqa_case(m, n, heads, "random", "cuda", seed=m + n)
    widest = int((case.ke - case.ks).max())
    for columns in (widest, n + 77):
        cases.check_logits(_mqa(case, columns), cases.mqa_expected(case, columns))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("m, n", [(1, 9), (33, 130), (130, 1000)])
@pytest.mark.parametrize("kind", ["causal", "random", "empty"])
def test_mqa_fill(m: int, n: int, kind: str, compressed: bool) -> None:
    case = cases.mqa_case(m, n, 32, kind, "cuda")
    columns = n if compressed else None
    out = mqa_logits_fp8(*case.arguments(), max_seqlen_k=columns, fill=True)
    cases.check_logits(out, cases.mqa_expected(case, columns, -math.inf), -math.inf)


def test_mqa_with_empty_ranges_writes_nothing() -> None:
    case = cases.mqa_case(33, 130, 32, "empty", "cuda")
    assert (_mqa(case) == cases.SENTINEL).all()


def test_mqa_without_queries_or_keys() -> None:
    q, k, k_scale, weights, ks, ke = cases.mqa_case(4, 5, 8, "causal", "cuda").arguments()
    assert mqa_logits_fp8(q[:0], k, k_scale, weights[:0], ks[:0], ke[:0]).shape == (0, 5)
    zero = torch.zeros_like(ks)
    out = mqa_logits_fp8(q, k[:0], k_scale[:0], weights, zero, zero, max_seqlen_k=3, fill=True)
    assert (out == -math.inf).all()


@pytest.mark.parametrize("m, n, stride", [(1, 700, 1024), (33, 130, 131), (130, 1000, 1003)])
@pytest.mark.parametrize("fill", [False, True])
def test_mqa_row_stride(m: int, n: int, stride: int, fill: bool) -> None:
    case = cases.mqa_case(m, n, 32, "causal", "cuda")
    storage = torch.full((m, stride), cases.SENTINEL, device="cuda")
    mqa_logits_fp8(*case.arguments(), fill=fill, out=storage[:, :n])
    rest = -math.inf if fill else cases.SENTINEL
    cases.check_logits(storage[:, :n], cases.mqa_expected(case, rest=rest), rest)
    assert (storage[:, n:] == cases.SENTINEL).all()


@pytest.mark.sanitizer
@SCORE
@pytest.mark.parametrize("heads", [32, 64])
def test_mqa_small(score: Score, heads: int) -> None:
    case = cases.mqa_case(9, 200, heads, "random", "cuda")
    cases.check_logits(score(case), cases.mqa_expected(case))


def test_mqa_repeats_bit_for_bit() -> None:
    case = cases.mqa_case(300, 4100, 64, "causal", "cuda")
    first = _mqa(case)
    for _ in range(5):
        assert torch.equal(_mqa(case), first)


@pytest.mark.parametrize("compressed", [False, True])
def test_mqa_replay_reads_ranges_anew(compressed: bool) -> None:
    m, n = 65, 900
    # With "causal" every key is seen, so no key is NaN.
    case = cases.mqa_case(m, n, 32, "causal", "cuda")
    columns = n if compressed else None
    out = _mqa(case, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mqa_logits_fp8(*case.arguments(), max_seqlen_k=columns, out=out)
    for seed in range(4):
        ks, ke = cases.query_ranges("random", m, n, seed)
        case.ks.copy_(ks)
        case.ke.copy_(ke)
        out.fill_(cases.SENTINEL)
        graph.replay()
        cases.check_logits(out, cases.mqa_expected(case, columns))


def _metadata(case: cases.PagedCase, num_sms: int | None = None) -> torch.Tensor:
    return paged_mqa_logits_metadata(
        case.context_lens, block_size=case.block_size, num_sms=num_sms or _num_sms(), next_n=case.next_n
    )


def _paged(
    case: cases.PagedCase, columns: int, num_sms: int | None = None, stride: int | None = None
) -> torch.Tensor:
    out = _sentinel(case.q.shape[0] * case.next_n, columns, stride)
    got = paged_mqa_logits_fp8(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        _metadata(case, num_sms),
        max_context_len=columns,
        out=out,
    )
    assert got is out
    return out


def _lengths(batch: int, highest: int, seed: int) -> list[int]:
    gen = cases.generator(seed, "cpu")
    lengths = torch.randint(0, highest + 1, (batch,), generator=gen)
    lengths[torch.rand(batch, generator=gen) < 0.2] = 0
    return lengths.tolist()


@pytest.mark.parametrize("num_sms", [1, 66, 132])
@pytest.mark.parametrize("batch", [1, 7, 64, 300, 1500])
@pytest.mark.parametrize("next_n", [1, 4])
def test_metadata_equals_the_reference(batch: int, next_n: int, num_sms: int) -> None:
    for seed, highest in enumerate((0, 300, 70_000)):
        lengths = torch.tensor(_lengths(batch, highest, seed), dtype=torch.int32)
        per_token = (lengths[:, None] - torch.arange(next_n - 1, -1, -1)).clamp(min=0).int()
        for context_lens in (lengths, per_token):
            expected = torch.empty(num_sms + 1, 2, dtype=torch.int32)
            reference.paged_mqa_logits_metadata(context_lens, num_sms, next_n, expected)
            got = paged_mqa_logits_metadata(
                context_lens.cuda(), block_size=64, num_sms=num_sms, next_n=next_n
            )
            assert torch.equal(got.cpu(), expected)


def test_metadata_without_requests() -> None:
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    assert (paged_mqa_logits_metadata(none, block_size=64, num_sms=132) == 0).all()


@pytest.mark.sanitizer
def test_metadata_small() -> None:
    lengths = torch.tensor([0, 700, 3, 0, 4000], dtype=torch.int32)
    got = paged_mqa_logits_metadata(lengths.cuda(), block_size=64, num_sms=20)
    assert torch.equal(got.cpu(), paged_mqa_logits_metadata(lengths, block_size=64, num_sms=20))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_paged(heads: int, block_size: int) -> None:
    case = cases.paged_case([0, 1, 257, 64, 3000, 0, 31, 1024], 1, heads, block_size, "cuda")
    cases.check_logits(_paged(case, 3001), cases.paged_expected(case, 3001))


@pytest.mark.parametrize("next_n", range(1, 9))
@pytest.mark.parametrize("heads", HEADS)
def test_paged_next_n(heads: int, next_n: int) -> None:
    case = cases.paged_case([0, 1, 700, next_n, 256, 2], next_n, heads, 64, "cuda")
    cases.check_logits(_paged(case, 704), cases.paged_expected(case, 704))


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("next_n", [1, 3])
def test_paged_head_dim(heads: int, next_n: int, dim: int) -> None:
    case = cases.paged_case([0, 3, 700, 256], next_n, heads, 64, "cuda", dim=dim)
    cases.check_logits(_paged(case, 704), cases.paged_expected(case, 704))


@pytest.mark.parametrize("next_n", [1, 3])
def test_paged_in_bf16(next_n: int) -> None:
    case = cases.paged_case([0, 3, 700, 256], next_n, 64, 64, "cuda")
    out = torch.full((4 * next_n, 704), cases.SENTINEL, dtype=torch.bfloat16, device="cuda")
    arguments = (
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        _metadata(case),
    )
    paged_mqa_logits_fp8(*arguments, max_context_len=704, out=out)
    cases.check_logits(out, cases.paged_expected(case, 704))
    made = paged_mqa_logits_fp8(*arguments, max_context_len=704, out_dtype=torch.bfloat16)
    assert made.dtype is torch.bfloat16


@pytest.mark.parametrize("next_n", [1, 2, 4, 7])
def test_paged_length_of_each_token(next_n: int) -> None:
    lengths = [[(37 * b + 300 * t * (b % 3)) % 900 for t in range(next_n)] for b in range(20)]
    case = cases.paged_case(lengths, next_n, 64, 64, "cuda")
    cases.check_logits(_paged(case, 900), cases.paged_expected(case, 900))


@pytest.mark.parametrize("block_size, page_padding", [(32, 16), (64, 4096), (128, 1024 + 32)])
def test_paged_page_stride(block_size: int, page_padding: int) -> None:
    case = cases.paged_case([500, 0, 129], 1, 64, block_size, "cuda", page_padding=page_padding)
    cases.check_logits(_paged(case, 512), cases.paged_expected(case, 512))


@pytest.mark.parametrize("num_sms", [1, 2, 66, 131])
def test_paged_takes_the_number_of_workers_from_the_metadata(num_sms: int) -> None:
    case = cases.paged_case([500, 0, 3000, 1], 2, 64, 64, "cuda")
    cases.check_logits(_paged(case, 3000, num_sms), cases.paged_expected(case, 3000))


@pytest.mark.parametrize("lengths", [[5], [0, 1, 0], [0, 0]])
def test_paged_with_less_work_than_workers(lengths: list[int]) -> None:
    case = cases.paged_case(lengths, 1, 64, 64, "cuda")
    cases.check_logits(_paged(case, 64), cases.paged_expected(case, 64))


@pytest.mark.parametrize("columns, stride", [(700, 1024), (701, 703)])
def test_paged_one_row_with_a_real_row_stride(columns: int, stride: int) -> None:
    case = cases.paged_case([700], 1, 64, 64, "cuda")
    out = _paged(case, columns, stride=stride)
    cases.check_logits(out, cases.paged_expected(case, columns))


def test_paged_wide_block_table() -> None:
    case = cases.paged_case([500, 0, 129], 1, 32, 64, "cuda", max_pages=999)
    cases.check_logits(_paged(case, 512), cases.paged_expected(case, 512))


@pytest.mark.parametrize("batch, longest, next_n", [(200, 1500, 2), (1024, 300, 1)])
def test_paged_large_batch(batch: int, longest: int, next_n: int) -> None:
    case = cases.paged_case(_lengths(batch, longest, 3), next_n, 64, 64, "cuda")
    cases.check_logits(_paged(case, longest), cases.paged_expected(case, longest))


def test_paged_a_million_tokens() -> None:
    length = (1 << 20) + 3
    case = cases.paged_case([5, length], 1, 64, 128, "cuda")
    cases.check_logits(_paged(case, length), cases.paged_expected(case, length))


@pytest.mark.sanitizer
@pytest.mark.parametrize("next_n", [1, 2, 5])
def test_paged_small(next_n: int) -> None:
    case = cases.paged_case([0, 300, 7], next_n, 32, 64, "cuda", page_padding=64)
    cases.check_logits(_paged(case, 300, 8), cases.paged_expected(case, 300))


def test_paged_without_requests() -> None:
    case = cases.paged_case([3], 1, 64, 64, "cuda")
    none = cases.PagedCase(
        case.q[:0], case.kv_cache, case.weights[:0], case.context_lens[:0], case.block_table[:0]
    )
    assert _paged(none, 64).shape == (0, 64)


@pytest.mark.sanitizer
@pytest.mark.parametrize("entry", [-7, -(2**31), 2**31 - 1, 1000])
def test_paged_schedule_that_is_none_reads_and_writes_nothing_out_of_bounds(entry: int) -> None:
    case = cases.paged_case([300, 64, 500], 1, 32, 64, "cuda")
    schedule = torch.full((133, 2), entry, dtype=torch.int32, device="cuda")
    schedule[::2, 0] = 1
    columns = int(case.context_lens.max())
    out = torch.full((3 + 2, columns), float("nan"), device="cuda")
    paged_mqa_logits_fp8(
        case.q,
        case.kv_cache,
        case.weights,
        case.context_lens,
        case.block_table,
        schedule,
        max_context_len=columns,
        out=out[1:4],
    )
    torch.cuda.synchronize()
    assert out[0].isnan().all() and out[4].isnan().all()


def test_paged_repeats_bit_for_bit() -> None:
    case = cases.paged_case(_lengths(64, 4000, 1), 1, 64, 64, "cuda")
    first = _paged(case, 4000)
    for _ in range(5):
        assert torch.equal(_paged(case, 4000), first)


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_replay_reads_lengths_and_tables_anew(next_n: int) -> None:
    batch, columns, block_size = 12, 1024, 64
    # The table is wide enough for every case. The caches differ in size, so all are copied into the largest.
    fresh = [
        cases.paged_case(
            _lengths(batch, columns, seed),
            next_n,
            64,
            block_size,
            "cuda",
            seed=seed,
            max_pages=columns // block_size,
        )
        for seed in range(5)
    ]
    largest = max(fresh, key=lambda case: case.kv_cache.shape[0])
    static = cases.PagedCase(
        q=largest.q.clone(),
        kv_cache=largest.kv_cache.clone(),
        weights=largest.weights.clone(),
        context_lens=largest.context_lens.clone(),
        block_table=largest.block_table.clone(),
    )
    out = _paged(static, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_mqa_logits_fp8(
            static.q,
            static.kv_cache,
            static.weights,
            static.context_lens,
            static.block_table,
            _metadata(static),
            max_context_len=columns,
            out=out,
        )
    for case in fresh:
        static.q.copy_(case.q)
        static.kv_cache[: case.kv_cache.shape[0]] = case.kv_cache
        static.weights.copy_(case.weights)
        static.context_lens.copy_(case.context_lens)
        static.block_table.copy_(case.block_table)
        out.fill_(cases.SENTINEL)
        graph.replay()
        cases.check_logits(out, cases.paged_expected(static, columns))
