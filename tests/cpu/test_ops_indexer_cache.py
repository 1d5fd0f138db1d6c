"""indexer_quantize_and_cache on the CPU against its definition, byte by byte."""

from __future__ import annotations

import struct

import pytest
import torch

from moe_fp8 import (
    ContractError,
    indexer_quantize_and_cache,
    mqa_logits_fp8,
    paged_mqa_logits_fp8,
    paged_mqa_logits_metadata,
    quantize_fp8,
)
from moe_fp8.ops.indexer import contracts
from tests import cache_cases, cases
from tests.cache_cases import CacheCase
from tests.fp8_definition import quantize_group

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _expected(case: CacheCase, power_of_two: bool) -> list[list[int]]:
    """The bytes of `case.storage` after the op."""
    pages = case.storage.tolist()
    size, dim = case.block_size, case.k.shape[1]
    for row, slot in enumerate(case.slot_mapping.tolist()):
        if 0 <= slot < len(pages) * size:
            page, offset = divmod(slot, size)
            codes, scale = quantize_group(case.k[row].float().tolist(), power_of_two)
            pages[page][offset * dim : offset * dim + dim] = codes
            at = size * dim + offset * 4
            pages[page][at : at + 4] = struct.pack("<f", scale)
    return pages


def _check(case: CacheCase, power_of_two: bool = False) -> None:
    expected = _expected(case, power_of_two)
    done = indexer_quantize_and_cache(case.k, case.kv_cache, case.slot_mapping, power_of_two=power_of_two)
    assert done is None
    assert case.storage.tolist() == expected


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_follows_the_definition(dtype: torch.dtype, dim: int, block_size: int, power_of_two: bool) -> None:
    _check(cache_cases.cache_case(9, dim, block_size, dtype), power_of_two)


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("page_padding, row_padding", [(16, 0), (4096, 8), (0, 384)])
def test_strides_of_pages_and_rows(slot_dtype: torch.dtype, page_padding: int, row_padding: int) -> None:
    case = cache_cases.cache_case(
        40, 32, 32, slot_dtype=slot_dtype, page_padding=page_padding, row_padding=row_padding
    )
    _check(case)


def test_one_page_of_any_stride() -> None:
    case = cache_cases.cache_case(5, pages=1)
    width = case.kv_cache.shape[3]
    odd = case.kv_cache.as_strided(case.kv_cache.shape, (7, width, width, 1))
    expected = _expected(case, False)
    indexer_quantize_and_cache(case.k, odd, case.slot_mapping)
    assert case.storage.tolist() == expected


def test_one_row_of_any_stride() -> None:
    case = cache_cases.cache_case(1, 64)
    k = torch.empty_strided((1, 64), (3, 1), dtype=torch.bfloat16).copy_(case.k)
    expected = _expected(case, False)
    indexer_quantize_and_cache(k, case.kv_cache, case.slot_mapping)
    assert case.storage.tolist() == expected


@pytest.mark.parametrize("slots", [[-1] * 4, [192, 193, 1 << 40, -(1 << 40)]])
def test_rows_without_a_slot_write_nothing(slots: list[int]) -> None:
    case = cache_cases.cache_case(4, pages=3)
    before = case.storage.clone()
    indexer_quantize_and_cache(case.k, case.kv_cache, torch.tensor(slots))
    assert torch.equal(case.storage, before)


def test_no_rows_and_no_pages() -> None:
    case = cache_cases.cache_case(4, pages=2)
    before = case.storage.clone()
    indexer_quantize_and_cache(case.k[:0], case.kv_cache, case.slot_mapping[:0])
    indexer_quantize_and_cache(case.k, case.kv_cache[:0], case.slot_mapping)
    assert torch.equal(case.storage, before)


def test_a_nan_stays_in_its_row() -> None:
    clean = cache_cases.cache_case(5)
    spoilt = clean.to("cpu")
    indexer_quantize_and_cache(clean.k, clean.kv_cache, clean.slot_mapping)
    spoilt.k[1, 7] = float("nan")
    indexer_quantize_and_cache(spoilt.k, spoilt.kv_cache, spoilt.slot_mapping)
    changed = (clean.storage != spoilt.storage).nonzero().tolist()
    page, offset = divmod(int(clean.slot_mapping[1]), clean.block_size)
    own = {(page, offset * 128 + i) for i in range(128)}
    own |= {(page, clean.block_size * 128 + offset * 4 + i) for i in range(4)}
    assert {tuple(at) for at in changed} <= own


def test_a_slot_that_rows_share_holds_bytes_of_theirs() -> None:
    case = cache_cases.cache_case(6)
    slots = torch.full((6,), 70)
    indexer_quantize_and_cache(case.k, case.kv_cache, slots)
    codes, scale = quantize_fp8(case.k)
    page = case.storage[1]
    assert (page[6 * 128 : 7 * 128] == codes.view(torch.uint8)).any(0).all()
    at = 64 * 128 + 6 * 4
    assert page[at : at + 4].view(torch.float32) in scale


@pytest.mark.parametrize("power_of_two", [False, True])
def test_paged_logits_of_cached_keys_equal_those_of_quantized_ones(power_of_two: bool) -> None:
    length, block_size, heads = 150, 64, 8
    gen = cases.generator(3, "cpu")
    k = cache_cases.keys(length, 128, torch.bfloat16)
    q = cases.random_fp8((1, heads, 128), gen)
    weights = torch.randn(1, heads, generator=gen)
    cache = torch.full((6, block_size, 1, 132), cases.NAN_BYTE, dtype=torch.uint8)
    table = torch.tensor([[4, 0, 3]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0, positions // block_size] * block_size + positions % block_size
    indexer_quantize_and_cache(k, cache, slots, power_of_two=power_of_two)
    lens = torch.tensor([length], dtype=torch.int32)
    metadata = paged_mqa_logits_metadata(lens, block_size=block_size, num_sms=2)
    paged = paged_mqa_logits_fp8(q[None], cache, weights, lens, table, metadata, max_context_len=length)
    keys, scale = quantize_fp8(k, power_of_two=power_of_two)
    flat = mqa_logits_fp8(q, keys, scale[:, 0].contiguous(), weights, torch.zeros_like(lens), lens)
    assert torch.equal(paged, flat)


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_names_the_row_past_the_cache_and_writes_nothing() -> None:
    case = cache_cases.cache_case(4, pages=3)
    before = case.storage.clone()
    with pytest.raises(ContractError, match="192 at row 2") as caught:
        indexer_quantize_and_cache(case.k, case.kv_cache, torch.tensor([5, -1, 192, 200]))
    assert (caught.value.argument, caught.value.row) == ("slot_mapping", 2)
    assert torch.equal(case.storage, before)
    indexer_quantize_and_cache(case.k, case.kv_cache, torch.tensor([5, -1, 191, -9]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("page_padding", [0, 64])
def test_a_compiled_call_equals_an_eager_one(page_padding: int, dynamic: bool) -> None:
    def layer(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        indexer_quantize_and_cache(k * 2, cache, slots, power_of_two=True)
        return cache.clone()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        case = cache_cases.cache_case(rows, pages=3, page_padding=page_padding)
        eager = case.to("cpu")
        got = compiled(case.k, case.kv_cache, case.slot_mapping)
        expected = layer(eager.k, eager.kv_cache, eager.slot_mapping)
        assert torch.equal(got, expected)
        assert torch.equal(case.storage, eager.storage)


def test_meta_tensors_are_accepted() -> None:
    case = cache_cases.cache_case(5)
    k, cache, slots = (t.to("meta") for t in (case.k, case.kv_cache, case.slot_mapping))
    indexer_quantize_and_cache(k, cache, slots)


@pytest.mark.parametrize("num_slots", [2**31, 2**32 + 3])
def test_int32_slots_lie_in_every_cache_of_more_slots_than_int32_holds(num_slots: int) -> None:
    contracts.cache_slots(torch.tensor([-1, 5, 2**31 - 1], dtype=torch.int32), num_slots)
    with pytest.raises(ContractError, match=f"{num_slots} at row 1"):
        contracts.cache_slots(torch.tensor([num_slots - 1, num_slots]), num_slots)
