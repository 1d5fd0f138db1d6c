"""indexer_quantize_and_cache on the GPU leaves the whole storage as the reference does, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import ContractError, indexer_quantize_and_cache, quantize_fp8
from tests import cache_cases
from tests.cache_cases import CacheCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check(case: CacheCase, power_of_two: bool = False) -> None:
    on_gpu = case.to("cuda")
    for each in (case, on_gpu):
        indexer_quantize_and_cache(each.k, each.kv_cache, each.slot_mapping, power_of_two=power_of_two)
    assert torch.equal(on_gpu.storage.cpu(), case.storage)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_exact(dtype: torch.dtype, dim: int, block_size: int, power_of_two: bool) -> None:
    for rows in (1, 7, 300):
        _check(cache_cases.cache_case(rows, dim, block_size, dtype, seed=rows), power_of_two)


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("page_padding, row_padding", [(16, 0), (4096, 8), (0, 384)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_strides_of_pages_and_rows(
    dim: int, page_padding: int, row_padding: int, slot_dtype: torch.dtype
) -> None:
    case = cache_cases.cache_case(
        200, dim, 32, slot_dtype=slot_dtype, page_padding=page_padding, row_padding=row_padding
    )
    _check(case)


def test_many_rows() -> None:
    _check(cache_cases.cache_case(20_000, pages=400))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dim", [32, 128])
def test_small(dim: int) -> None:
    _check(cache_cases.cache_case(37, dim, 32, pages=2, page_padding=16))


@pytest.mark.parametrize("slots", [[-1] * 4, [192, 193, 1 << 40, -(1 << 40)]])
def test_rows_without_a_slot_write_nothing(slots: list[int]) -> None:
    case = cache_cases.cache_case(4, pages=3).to("cuda")
    before = case.storage.clone()
    indexer_quantize_and_cache(case.k, case.kv_cache, torch.tensor(slots, device="cuda"))
    assert torch.equal(case.storage, before)


def test_no_rows_and_no_pages() -> None:
    case = cache_cases.cache_case(4, pages=2).to("cuda")
    before = case.storage.clone()
    indexer_quantize_and_cache(case.k[:0], case.kv_cache, case.slot_mapping[:0])
    indexer_quantize_and_cache(case.k, case.kv_cache[:0], case.slot_mapping)
    assert torch.equal(case.storage, before)


def test_addresses_past_two_gigabytes() -> None:
    page_stride = 1 << 20
    storage = torch.zeros(2500, page_stride, dtype=torch.uint8, device="cuda")
    cache = storage.as_strided((2500, 64, 1, 132), (page_stride, 132, 132, 1))
    k = cache_cases.keys(3, 128, torch.bfloat16).cuda()
    slots = torch.tensor([2499 * 64 + 63, 2048 * 64, 5], device="cuda")
    indexer_quantize_and_cache(k, cache, slots)
    codes, scale = quantize_fp8(k)
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, 64)
        values = storage[page, offset * 128 : offset * 128 + 128]
        at = 64 * 128 + offset * 4
        scale_bytes = storage[page, at : at + 4]
        assert torch.equal(values, codes[row].view(torch.uint8))
        assert torch.equal(scale_bytes.view(torch.float32), scale[row])
        values.zero_()
        scale_bytes.zero_()
    assert not storage.any()


def test_a_nan_stays_in_its_row() -> None:
    clean = cache_cases.cache_case(40).to("cuda")
    spoilt = clean.to("cuda")
    spoilt.k[1, 7] = float("nan")
    for each in (clean, spoilt):
        indexer_quantize_and_cache(each.k, each.kv_cache, each.slot_mapping)
    page, offset = divmod(int(clean.slot_mapping[1]), clean.block_size)
    for each in (clean, spoilt):
        each.storage[page, offset * 128 : offset * 128 + 128] = 0
        at = clean.block_size * 128 + offset * 4
        each.storage[page, at : at + 4] = 0
    assert torch.equal(clean.storage, spoilt.storage)


def test_a_slot_that_rows_share_holds_bytes_of_theirs() -> None:
    case = cache_cases.cache_case(100).to("cuda")
    before = case.storage.clone()
    indexer_quantize_and_cache(case.k, case.kv_cache, torch.full((100,), 70, device="cuda"))
    codes, scale = quantize_fp8(case.k)
    page, at = case.storage[1], 64 * 128 + 6 * 4
    assert (page[6 * 128 : 7 * 128] == codes.view(torch.uint8)).any(0).all()
    assert (page[at : at + 4].view(torch.float32) == scale).any()
    for storage in (case.storage, before):
        storage[1, 6 * 128 : 7 * 128] = 0
        storage[1, at : at + 4] = 0
    assert torch.equal(case.storage, before)


def test_replay_reads_new_keys_and_slots() -> None:
    static = cache_cases.cache_case(33, pages=5).to("cuda")
    indexer_quantize_and_cache(static.k, static.kv_cache, static.slot_mapping)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer_quantize_and_cache(static.k, static.kv_cache, static.slot_mapping)
    for seed in range(4):
        case = cache_cases.cache_case(33, pages=5, seed=seed)
        static.k.copy_(case.k)
        static.storage.copy_(case.storage)
        static.slot_mapping.copy_(case.slot_mapping)
        graph.replay()
        indexer_quantize_and_cache(case.k, case.kv_cache, case.slot_mapping)
        assert torch.equal(static.storage.cpu(), case.storage)


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_names_the_row_past_the_cache() -> None:
    case = cache_cases.cache_case(4, pages=3).to("cuda")
    slots = torch.tensor([5, -1, 191, -9], device="cuda")
    indexer_quantize_and_cache(case.k, case.kv_cache, slots)
    # The launch that was just made must not be repeated without a check of the slots.
    slots[2] = 192
    with pytest.raises(ContractError, match="192 at row 2"):
        indexer_quantize_and_cache(case.k, case.kv_cache, slots)
